"""Classifier alignment: the Gaussians, the rows, and what alignment mends."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from branchout.baselines import classifier_alignment
from branchout.baselines.task import Task
from branchout.labels import LabelSpace
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead
from branchout.training.optimisation import Optimisation


def test_the_shared_covariance_is_that_around_each_groups_mean() -> None:
    rng = np.random.default_rng(0)
    groups = [rng.normal(size=(n, 4)) + 10 * n for n in (3, 8)]
    slow = sum(np.outer(x - g.mean(0), x - g.mean(0)) for g in groups for x in g) / (11 - 2)
    assert classifier_alignment.shared_covariance([torch.from_numpy(g) for g in groups]).numpy() == pytest.approx(slow)


@pytest.mark.parametrize("count", [1, 3, 500])
def test_a_gaussian_is_its_own_the_more_images_it_has(count: int) -> None:
    rng = np.random.default_rng(0)
    group, shared = rng.normal(size=(count, 4)) * [1, 2, 3, 4], np.diag([5.0, 5, 5, 5])
    own = np.cov(group.T) if count > 1 else np.zeros((4, 4))
    expected = (count * own + 4 * shared) / (count + 4)
    root = classifier_alignment.factor(torch.from_numpy(group), torch.from_numpy(shared)).numpy()
    assert root @ root.T == pytest.approx(expected, rel=1e-3, abs=2e-3)


def test_normalised_logits_do_not_depend_on_their_length() -> None:
    space = LabelSpace.of(["a", "b", "c"], ["d", "e"])
    z = torch.randn(6, 5)
    normalised = classifier_alignment.normalised(z, space)
    assert torch.allclose(classifier_alignment.normalised(7 * z, space), normalised, atol=1e-5)
    length = (z[0, :3].norm() + z[0, 3:].norm()) / 2
    assert torch.allclose(normalised[0], z[0] / (0.1 * length))


@pytest.mark.parametrize("head", [CosineHead(6, 4), nn.Linear(6, 4), nn.Linear(6, 4, bias=False)])
def test_old_rows_stay_and_new_ones_point_along_the_means(head: CosineHead | nn.Linear) -> None:
    means = torch.randn(2, 6)
    wide = classifier_alignment.widened(head, means)
    assert type(wide) is type(head)
    x = torch.randn(9, 6)
    assert torch.allclose(wide(x)[:, :4], head(x), atol=1e-6)
    assert torch.allclose(torch.cosine_similarity(wide.weight[4:], means), torch.ones(2))


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_alignment_mends_rows_that_answer_for_others(task: Task, kind: str) -> None:
    """A head whose last row is the sum of two others takes all; draws from the Gaussians set it right."""
    torch.manual_seed(0)
    means = torch.eye(4) * 3
    space = LabelSpace.of(["a", "b", "c"], ["d"])
    factors = (0.3 * torch.eye(4)).expand(4, 4, 4)
    head: CosineHead | nn.Linear = CosineHead(4, 4) if kind == "cosine" else nn.Linear(4, 4)
    rows = torch.eye(4)
    rows[3] = torch.tensor([1.0, 1.0, 1.0, 1.0]) * 2
    with torch.no_grad():
        head.weight.copy_(rows)
        if isinstance(head, nn.Linear):
            head.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    drawn = means.repeat_interleave(50, 0) + 0.3 * torch.randn(200, 4)
    wanted = torch.arange(4).repeat_interleave(50)
    quick = replace(task, space=space, heads=Optimisation(epochs=10, batch=64, schedule="constant"))
    mended = classifier_alignment.aligned(head, means, factors, quick)
    assert (mended(drawn).argmax(1) == wanted).float().mean() > 0.95
    if kind == "linear":
        assert (head(drawn).argmax(1) == wanted).float().mean() < 0.5
    assert torch.equal(head.weight, rows)


def test_its_gaussians_are_not_needed_to_answer(classifier: Classifier, task: Task) -> None:
    quick = replace(task, heads=Optimisation(epochs=1, batch=512, schedule="constant"))
    head = classifier_alignment.learn(classifier, quick).head
    features = torch.rand(3, 1, classifier.backbone.features)
    scores = head(features)
    for buffer in (head.means, head.factors, head.shared):
        buffer.fill_(torch.nan)
    assert torch.equal(head(features), scores)
    assert head.stored() == 0
