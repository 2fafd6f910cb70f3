"""A head alone is trained to the minimum of its loss."""

import numpy as np
import pytest
import torch
from helpers import BASE, NEW, SIZES, exemplars, same, snapshot
from torch import nn

from branchout import api
from branchout.data.images import open_images
from branchout.data.samples import Samples
from branchout.method import extend as pipeline
from branchout.method.config import ExtendConfig
from branchout.method.extend import Extension
from branchout.method.head_only import DECAY, train_head
from branchout.method.new_branch import Labelled
from branchout.method.recipes import BRANCHOUT
from branchout.method.split import DataSplit
from branchout.method.trunk_cache import Frozen, TrunkOutputs
from branchout.model.classifier import Classifier

CPU = torch.device("cpu")


def with_linear_head(base: api.Model) -> Classifier:
    model = base.saved.classifier
    torch.manual_seed(0)
    return Classifier(model.arch, model.backbone, nn.Linear(model.backbone.features, len(BASE)), BASE, SIZES, "glyph")


def test_the_head_reaches_a_minimum_and_nothing_else_changes(base: api.Model, train: Samples) -> None:
    model = with_linear_head(base)
    space = model.space.extend(NEW)
    before = snapshot(model)

    def labelled(samples: Samples) -> Labelled:
        return Labelled(open_images(samples, SIZES, CPU), space.index(samples.classes)[samples.labels])

    new, old = labelled(train.of_classes(NEW)), labelled(exemplars(train))
    step, losses = train_head(model, NEW, new, BRANCHOUT.stage_one, exemplars=old, views=2, device=CPU)
    assert same(snapshot(model), before)
    assert losses[1] < losses[0]
    # The loss written out, on the same views: its gradient vanishes at the head that was found.

    trunk = TrunkOutputs(
        Frozen(model, len(model.backbone.names), logits=True, device=CPU), [new.images, old.images], 2, 1
    )
    (h_new, z_new), (h_old, z_old) = trunk.tables
    w = step.head.weight.detach().clone().requires_grad_()
    c = step.head.bias.detach().clone().requires_grad_()
    y_new = torch.from_numpy(np.tile(new.labels, 2))
    y_old = torch.from_numpy(old.labels)
    on_new = nn.functional.cross_entropy(torch.cat([z_new, h_new @ w.T + c], 1), y_new)
    on_old = nn.functional.cross_entropy(torch.cat([z_old, h_old @ w.T + c], 1), y_old)
    loss = on_new + on_old + DECAY * w.square().sum() / len(w)
    assert abs(loss.item() - losses[1]) < 1e-4
    loss.backward()
    assert w.grad is not None
    assert w.grad.norm() < 0.02


def test_fc_uses_it_for_linear_heads_of_our_recipe_alone(base: api.Model, train: Samples) -> None:
    model = with_linear_head(base)
    split = DataSplit.of(model.space, train.of_classes(NEW), exemplars(train), None, 0)

    def head_only(of: Classifier, **settings: str) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            called: list[str] = []
            patch.setattr(pipeline, "train_head", lambda *_, **__: called.append("head"))
            patch.setattr(pipeline, "train_branch", lambda *_, **__: called.append("branch"))
            Extension(of, split, ExtendConfig(**settings), device=CPU).train_branch()  # type: ignore[arg-type]
        return called == ["head"]

    assert head_only(model, branch="fc")
    assert not head_only(model)
    assert not head_only(model, branch="fc", recipe="paper")
    assert not head_only(base.saved.classifier, branch="fc")
