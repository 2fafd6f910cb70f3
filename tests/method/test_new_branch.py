"""How a new branch and its heads start."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import BASE, CPU, NEW, SIZES, untrained
from stage1_case import labelled, trained
from torch import nn

from branchout.data.samples import Samples
from branchout.method import new_branch
from branchout.method.recipes import PAPER
from branchout.model.classifier import Classifier


def test_distillation_alone_is_nothing_at_the_start_in_eval_mode(models: dict[str, Classifier]) -> None:
    """The clone starts where the frozen branch is, so its rows start by saying what the frozen network says."""
    model = models["after a step"]
    h = torch.randn(5, 64)
    rows = torch.cat([head(h) for head in new_branch.copied_heads(model)], dim=1)
    assert torch.equal(rows, torch.cat([head(h) for head in model.fused.heads], dim=1))


@pytest.mark.parametrize("bias", [True, False])
def test_copied_rows_of_linear_heads_say_the_same(bias: bool) -> None:
    model = untrained(BASE)
    head = nn.Linear(64, len(BASE), bias=bias)
    linear = Classifier(model.arch, model.backbone, head, BASE, SIZES, "glyph")
    h = torch.randn(5, 64)
    (copied,) = new_branch.copied_heads(linear)
    assert torch.equal(copied(h), head(h))
    assert (copied.bias is None) == (not bias)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(copied.parameters(), head.parameters(), strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("names", [NEW, NEW[:1], (*NEW[:2], BASE[0])], ids=["several", "one", "an old one too"])
def test_a_linear_head_starts_along_its_classes_and_no_louder_than_the_base(
    names: tuple[str, ...], bias: bool, train: Samples
) -> None:
    model = untrained(BASE)
    base = nn.Linear(64, len(BASE), bias=bias)
    linear = Classifier(model.arch, model.backbone, base, BASE, SIZES, "glyph")
    new = labelled(linear, names, train.of_classes(names))
    space = linear.space.extend(names)
    head = new_branch.new_head(linear.base_head, len(names))
    new_branch.imprint(head, linear, new, space, 0.2, CPU)
    with torch.no_grad():
        pictures = next(new.images.plain([np.arange(len(new.labels))]))
        h = linear.features(linear.backbone.arrange(pictures))[0]
        own, old = head(h), base(h)
    lengths = head.weight.norm(dim=1)
    short = 0.2 * base.weight.norm(dim=1).mean()
    assert torch.allclose(lengths, short.expand_as(lengths), atol=1e-4)
    means = [h[torch.from_numpy(new.labels == space.index([name])[0])].mean(0) for name in names]
    middle = sum(means) / len(means) if len(means) > 1 else torch.zeros(64)
    for number, (name, mean) in enumerate(zip(names, means, strict=True)):
        members = torch.from_numpy(new.labels == space.index([name])[0])
        assert F.cosine_similarity(head.weight[number], mean - middle, dim=0).item() == pytest.approx(1, abs=1e-4)
        if bias:  # on its own images it says on average what the base says at most
            assert own[members, number].mean().item() == pytest.approx(old[members].amax(1).mean().item(), abs=1e-3)


def test_a_cosine_head_starts_afresh(
    models: dict[str, Classifier], train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_branch, "imprint", lambda *_: pytest.fail("the paper's head is fresh"))
    trained(models["base"], train, PAPER.stage_one, views=0)
