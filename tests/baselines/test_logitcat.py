"""Logits side by side."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import CPU, untrained

from branchout.baselines import logitcat
from branchout.baselines.networks import scores_of
from branchout.baselines.task import Task
from branchout.data.samples import Samples
from branchout.model.classifier import Classifier

BRANCHES = (["ant", "bee", "cow"], ["bee", "dog"], ["bee", "cow", "elk"])


@pytest.mark.parametrize(("pooler", "pool"), [("max", max), ("average", lambda z: sum(z) / len(z))])
def test_columns_of_one_class_are_pooled(pooler: str, pool: Callable[[list[float]], float], task: Task) -> None:
    model = untrained(*BRANCHES)
    features = torch.randn(9, 3, model.backbone.features, generator=torch.Generator().manual_seed(1))
    scores = logitcat.pooled(model, replace(task, space=model.space), pooler=pooler).head(features)
    for each, score in zip(features, scores, strict=True):
        columns: dict[str, list[float]] = {}
        for names, head, h in zip(BRANCHES, model.fused.heads, each, strict=True):
            for name, value in zip(names, head(h).tolist(), strict=True):
                columns.setdefault(name, []).append(value)
        assert score.tolist() == pytest.approx([pool(columns[name]) for name in model.space.classes], abs=1e-5)


def untouched(task: Task) -> Task:
    return replace(task, heads=replace(task.heads, epochs=0))


def test_fine_tuning_starts_as_exactly_the_concatenated_logits(
    branched, overlapping_task: Task, new_test: Samples
) -> None:
    model, images = branched(overlapping_task), overlapping_task.images(new_test)
    started = logitcat.trained(model, untouched(overlapping_task), scratch=False)
    assert torch.equal(scores_of(started, images), scores_of(model, images))


def test_so_it_does_with_linear_heads(
    linear_branched: Callable[[Task], Classifier], overlapping_task: Task, new_test: Samples
) -> None:
    model, images = linear_branched(overlapping_task), overlapping_task.images(new_test)
    started = logitcat.trained(model, untouched(overlapping_task), scratch=False)
    assert torch.allclose(scores_of(started, images), scores_of(model, images), atol=1e-4)


def test_retraining_starts_from_nothing(
    branched: Callable[[Task], Classifier], task: Task, old_test: Samples, accuracy_of: Callable[..., float]
) -> None:
    started = logitcat.trained(branched(task), untouched(task), scratch=True)
    assert accuracy_of(started, task, old_test) < 0.5


def test_training_moves_every_head(branched: Callable[[Task], Classifier], task: Task) -> None:
    model = branched(task)
    tuned = logitcat.trained(model, task, scratch=False)
    for part, head in zip(tuned.head.parts, model.fused.heads, strict=True):
        assert part.weight.device == CPU
        assert not torch.equal(part.weight, head.weight)
