"""What every method on frozen features must be able to do: learn, meet old classes in a new look, take a second step,
start from a linear head, and leave what it was given as it was."""

from collections.abc import Callable

import pytest
import torch
from helpers import same, snapshot
from torch import nn

from branchout.baselines import classifier_alignment, featcat, fecam, logitcat, ncm, pretrained, ranpac, routing
from branchout.baselines.networks import scores_of
from branchout.baselines.task import Baseline, Task
from branchout.data.samples import Samples
from branchout.model.classifier import Classifier

FILES = (pretrained, routing, featcat, logitcat, ncm, ranpac, fecam, classifier_alignment)
"""APER needs a vision transformer and has tests of its own."""
BASELINES = [method for file in FILES for method in file.BASELINES]
every_method = pytest.mark.parametrize("method", BASELINES, ids=lambda method: method.name)
every_honest_method = pytest.mark.parametrize(
    "method", [method for method in BASELINES if not method.oracle], ids=lambda method: method.name
)

Branched = Callable[[Task], Classifier]
Measure = Callable[[nn.Module, Task, Samples], float]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranpac, "WIDTH", 300)
    monkeypatch.setattr(classifier_alignment, "DRAWN", 32)


def right_scores(scorer: nn.Module, task: Task, samples: Samples) -> bool:
    scores = scores_of(scorer, task.images(samples))
    return scores.shape == (len(samples), len(task.space.classes)) and bool(torch.isfinite(scores).all())


@every_method
def test_it_learns_and_forgets_little(
    method: Baseline,
    classifier: Classifier,
    branched: Branched,
    task: Task,
    accuracy_of: Measure,
    old_test: Samples,
    new_test: Samples,
) -> None:
    before = branched(task) if method.on == "features" else classifier
    held = snapshot(before)
    scorer = method.learn(before, task)
    assert right_scores(scorer, task, new_test)
    assert accuracy_of(scorer, task, old_test) > 0.75
    if method.name != "pretrained":
        assert accuracy_of(scorer, task, new_test) > 0.75
    assert same(held, snapshot(before))


@every_method
def test_new_looks_then_a_second_step(
    method: Baseline,
    classifier: Classifier,
    branched: Branched,
    overlapping_task: Task,
    next_task: Callable[[Task], Task],
    accuracy_of: Measure,
    old_test: Samples,
    new_test: Samples,
    new_look_test: Samples,
    later_test: Samples,
) -> None:
    first = method.learn(branched(overlapping_task) if method.on == "features" else classifier, overlapping_task)
    assert right_scores(first, overlapping_task, new_look_test)
    known = accuracy_of(first, overlapping_task, new_look_test)
    task = next_task(overlapping_task)
    held = snapshot(first)
    second = method.learn(branched(task) if method.on == "features" else first, task)
    assert right_scores(second, task, later_test)
    assert same(held, snapshot(first))
    assert accuracy_of(second, task, old_test) > 0.6
    if method.name == "pretrained":
        assert known == 0  # the looks are new indeed: what was learned of them, the others learned from this step
    else:
        assert known > 0.5
        assert accuracy_of(second, task, new_test) > 0.6
        assert accuracy_of(second, task, later_test) > 0.6


@every_honest_method
def test_a_base_with_a_linear_head(
    method: Baseline,
    linear_classifier: Classifier,
    linear_branched: Branched,
    task: Task,
    accuracy_of: Measure,
    old_test: Samples,
    new_test: Samples,
) -> None:
    scorer = method.learn(linear_branched(task) if method.on == "features" else linear_classifier, task)
    assert right_scores(scorer, task, new_test)
    assert accuracy_of(scorer, task, old_test) > 0.6
    if method.name != "pretrained":
        assert accuracy_of(scorer, task, new_test) > 0.75


@every_honest_method
def test_the_same_seed_gives_the_same_scores(
    method: Baseline, classifier: Classifier, branched: Branched, task: Task, new_test: Samples
) -> None:
    before = branched(task) if method.on == "features" else classifier
    one, other = (scores_of(method.learn(before, task), task.images(new_test)) for _ in range(2))
    assert torch.equal(one, other)
