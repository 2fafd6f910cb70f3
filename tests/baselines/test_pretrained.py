"""The base model alone."""

import torch
from helpers import fixed_batch, logits, untrained

from branchout.baselines import pretrained
from branchout.baselines.task import Task
from branchout.labels import LabelSpace


def test_base_logits_stay_and_new_classes_come_last(task: Task) -> None:
    model = untrained(task.space.branches[0])
    scorer = pretrained.learn(model, task)
    scores = scorer(fixed_batch())
    known = len(model.space.classes)
    assert torch.allclose(scores[:, :known], logits(model, fixed_batch()), atol=1e-5)
    assert scores.shape[1] == len(task.space.classes)
    assert (scores[:, known:] < scores[:, :known].amin(1, keepdim=True)).all()


def test_a_second_step_adds_more_that_it_does_not_know(task: Task) -> None:
    model = untrained(task.space.branches[0])
    first = pretrained.learn(model, task)
    second = pretrained.Padded(first.model, len(LabelSpace.of(*task.space.branches, ["one more"]).classes))
    assert torch.equal(first(fixed_batch()), second(fixed_batch())[:, :-1])
