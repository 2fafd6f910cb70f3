"""A head alone is trained to the minimum of its loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import BASE, NEW, SIZES, exemplars, same, snapshot
from stage1_case import labelled, settings_of
from torch import nn

from branchout import api
from branchout.data.images import open_images
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.method import extend as pipeline
from branchout.method import head_only
from branchout.method.config import ExtendConfig
from branchout.method.extend import Extension
from branchout.method.frozen import Frozen
from branchout.method.head_only import train_head
from branchout.method.new_branch import Labelled
from branchout.method.recipes import BRANCHOUT, HEAD_DECAY, PAPER
from branchout.method.split import DataSplit
from branchout.method.stage1 import train_branch
from branchout.method.trunk_cache import TrunkOutputs
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier
from branchout.progress import Event

CPU = torch.device("cpu")


def with_linear_head(base: api.Model) -> Classifier:
    model = base.saved.classifier
    torch.manual_seed(0)
    return Classifier(model.arch, model.backbone, nn.Linear(model.backbone.features, len(BASE)), BASE, SIZES, "glyph")


@pytest.mark.parametrize("branch", ["fc", "last"])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_head_of_a_class_that_is_compared_with_no_other_stays_at_the_mean_of_its_features(
    base: api.Model, train: Samples, kind: str, branch: str
) -> None:
    model = with_linear_head(base) if kind == "linear" else base.saved.classifier
    images = train.of_classes(NEW[:1])
    new = Labelled(open_images(images, SIZES, CPU), np.full(len(images), len(BASE)))
    if (kind, branch) == ("linear", "fc"):
        step, losses = train_head(model, NEW[:1], new, BRANCHOUT.stage_one, views=2, exemplar_views=None, device=CPU)
    else:
        step, losses = train_branch(model, NEW[:1], new, BRANCHOUT.stage_one, where=branch, views=2, device=CPU)
    grown = model.extended(step)
    with torch.no_grad():
        h = grown.features(grown.backbone.arrange(next(new.images.plain([np.arange(len(images))]))))
        own, old = step.head(h[-1]), model.base_head(h[0])
    assert set(losses) == {0.0}
    assert nn.functional.cosine_similarity(step.head.weight[0], h[-1].mean(0), dim=0).item() > 1 - 1e-4
    if kind == "linear":
        assert own.mean().item() == pytest.approx(old.amax(1).mean().item(), abs=1e-3)
    else:
        assert own.mean() > old.amax(1).mean()  # no row of the base is nearer to these images


def test_one_class_is_trained_where_exemplars_compete_with_it(base: api.Model, train: Samples) -> None:
    model, names = base.saved.classifier, NEW[:1]
    settings = settings_of(BRANCHOUT.stage_one)
    new, old = (labelled(model, names, samples) for samples in (train.of_classes(names), exemplars(train)))
    _, losses = train_branch(model, names, new, settings, exemplars=old, views=2, device=CPU)
    assert len(losses) == 2
    assert losses[1] < losses[0]
    # The paper's stage I sees new images alone, whatever was kept.
    paper = settings_of(PAPER.stage_one)
    assert train_branch(model, names, new, paper, exemplars=old, views=2, device=CPU)[1] == [0.0]


def test_the_head_reaches_a_minimum_and_nothing_else_changes(base: api.Model, train: Samples) -> None:
    model = with_linear_head(base)
    before = snapshot(model)
    new, old = (labelled(model, NEW, samples) for samples in (train.of_classes(NEW), exemplars(train)))
    said: list[Event] = []
    # Four views of new images and two of exemplars are two batches.
    step, losses = train_head(
        model, NEW, new, BRANCHOUT.stage_one, exemplars=old, views=4, exemplar_views=2, device=CPU,
        on_progress=said.append,
    )  # fmt: skip
    ends = [event for event in said if event.work == "Training the new head" and event.done == event.total]
    assert ends == said[-1:]  # the end is told once
    assert same(snapshot(model), before)
    assert losses[1] < losses[0]
    # The loss written out, on the same views: its gradient vanishes at the head that was found.

    trunk = TrunkOutputs(
        Frozen(model, len(model.backbone.names), BRANCHOUT.stage_one, device=CPU), [new.images, old.images], 4, 2
    )
    (h_new, z_new), (h_old, z_old) = trunk.tables
    w = step.head.weight.detach().clone().requires_grad_()
    c = step.head.bias.detach().clone().requires_grad_()
    y_new = torch.from_numpy(np.tile(new.labels, 4))
    y_old = torch.from_numpy(np.tile(old.labels, 2))
    on_new = nn.functional.cross_entropy(torch.cat([z_new, h_new @ w.T + c], 1), y_new)
    on_old = nn.functional.cross_entropy(torch.cat([z_old, h_old @ w.T + c], 1), y_old)
    loss = on_new + on_old + HEAD_DECAY * w.square().sum() / len(w)
    assert abs(loss.item() - losses[1]) < 1e-4
    loss.backward()
    assert w.grad is not None
    assert w.grad.norm() < 0.02


def test_fc_uses_it_for_linear_heads_of_our_recipe_alone(base: api.Model, train: Samples) -> None:
    model = with_linear_head(base)
    split = DataSplit.of(model.space, train.of_classes(NEW), exemplars(train), None, 0)

    def trains_head(of: Classifier, **settings: str) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            called: list[str] = []
            patch.setattr(pipeline, "train_head", lambda *_, **__: called.append("head"))
            patch.setattr(pipeline, "train_branch", lambda *_, **__: called.append("branch"))
            Extension(of, split, ExtendConfig(**settings), device=CPU).train_branch()  # type: ignore[arg-type]
        return called == ["head"]

    assert trains_head(model, branch="fc")
    assert not trains_head(model)
    assert not trains_head(model, branch="fc", recipe="paper")
    assert not trains_head(base.saved.classifier, branch="fc")


def test_epochs_and_views_are_refused_where_a_head_alone_would_ignore_them(base: api.Model, train: Samples) -> None:
    model = api.Model(SavedModel(with_linear_head(base), (), ({"what": "opened"},)), None, CPU)
    for setting in ({"epochs": 3}, {"views": 2}):
        with pytest.raises(BranchoutError, match=f"{next(iter(setting))} has no effect"):
            model.extend(train.of_classes(NEW), branch="fc", **setting)  # type: ignore[arg-type]
        config = ExtendConfig(branch="fc", **setting)  # type: ignore[arg-type]
        assert base.prepare(train.of_classes(NEW), config=config).config == config  # a cosine head has both
        for other in (replace(config, branch="last"), replace(config, recipe="paper")):
            assert model.prepare(train.of_classes(NEW), config=other).config == other


@pytest.mark.parametrize("branch", ["fc", "last"])
def test_the_memory_limit_holds_for_heads_and_branches(
    branch: str, base: api.Model, train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_linear_head(base)
    split = DataSplit.of(model.space, train.of_classes(NEW), exemplars(train), None, 0)
    limits: list[int] = []
    for trains in ("train_head", "train_branch"):
        monkeypatch.setattr(pipeline, trains, lambda *_, cache_limit, **__: limits.append(cache_limit))
    Extension(model, split, ExtendConfig(branch=branch, memory_limit=0.5), device=CPU).train_branch()
    assert limits == [500_000_000]


@pytest.mark.parametrize(("limit", "views"), [(1 << 30, [8, 4]), (1, [1, 1])], ids=["all views fit", "not even one"])
def test_a_head_is_trained_however_little_memory_there_is(
    limit: int, views: list[int], base: api.Model, train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_linear_head(base)
    space = model.space.extend(NEW)
    new, old = (
        Labelled(open_images(part, SIZES, CPU), part.labels_in(space))
        for part in (train.of_classes(NEW), exemplars(train))
    )
    used: list[list[int]] = []
    minimise = head_only.minimise
    monkeypatch.setattr(head_only, "minimise", lambda *args: (used.append(args[1].cached_views), minimise(*args))[1])
    _, losses = train_head(
        model, NEW, new, BRANCHOUT.stage_one, exemplars=old, views=8, exemplar_views=4, cache_limit=limit, device=CPU
    )
    assert used == [views]
    assert losses[1] < losses[0]
