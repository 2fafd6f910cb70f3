"""Joint learning sees everything and takes nothing from the model before but its shape."""

from dataclasses import replace

import pytest
import torch
from helpers import ARCH, BASE, same, snapshot, untrained

from branchout.baselines import joint
from branchout.errors import BranchoutError
from branchout.labels import LabelSpace
from branchout.training.optimisation import Optimisation


def test_it_learns_old_and_new(task, accuracy_of) -> None:
    old, new = task.space.branches[0][:3], task.space.branches[1][2:]
    task = replace(
        task,
        space=LabelSpace.of(old, new),
        everything=task.everything.of_classes([*old, *new]),
        pretraining=Optimisation(epochs=25, lr=0.02, batch=20, nesterov=True, schedule="cosine"),
    )
    model = joint.learn(untrained(BASE), task)
    assert model.space.classes == (*old, *new)
    assert model.arch == ARCH
    seen = task.everything
    assert accuracy_of(model, task, seen.of_classes(new)) > 0.7
    assert accuracy_of(model, task, seen.of_classes(old)) > 0.7


def test_weights_before_do_not_matter(task) -> None:
    names = task.space.branches[0][:4]
    task = replace(
        task,
        space=LabelSpace.of(names[:3], names[3:]),
        everything=task.everything.of_classes(names),
        pretraining=Optimisation(epochs=1, lr=0.05, batch=32),
    )
    one, other = (joint.learn(untrained(BASE, seed=seed), task) for seed in (0, 1))
    assert same(snapshot(one), snapshot(other))
    again = joint.learn(one, task)  # as at a second step
    assert same(snapshot(one), snapshot(again))
    assert torch.equal(one.base_head.weight, again.base_head.weight)


def test_the_network_ends_as_the_base_does_and_sees_what_the_task_says(task, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(joint, "pretrain", lambda *words, **options: asked.append(options))
    model = untrained(BASE)
    joint.learn(model, task)
    model.arch = {**ARCH, "last_relu": False}
    joint.learn(model, replace(task, augmented="padded"))
    assert [(each["last_relu"], each["augmentation"].pad) for each in asked] == [(True, 0), (False, 4)]


def test_without_all_images_it_says_so(task) -> None:
    with pytest.raises(BranchoutError, match="everything"):
        joint.learn(untrained(BASE), replace(task, everything=None))


def test_networks_of_others_are_not_trained_from_scratch(task) -> None:
    model = untrained(BASE)
    model.arch = {"family": "timm", "name": "convnext_atto", "num_classes": 8}
    with pytest.raises(BranchoutError, match="convnext_atto"):
        joint.learn(model, task)
