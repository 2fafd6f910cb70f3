"""DER adds extractors, never touches old ones, and learns its last head on balanced data."""

from dataclasses import replace

import pytest
import torch
from helpers import same, snapshot

from branchout.baselines import der, whole_network
from branchout.training.optimisation import Optimisation


@pytest.fixture(scope="module")
def learned(classifier, task) -> der.Extractors:
    return der.learn(classifier, replace(task, network=replace(task.network, epochs=4)))


def test_it_learns_and_remembers(learned, task, accuracy_of, old_test, new_test) -> None:
    assert accuracy_of(learned, task, new_test) > 0.8
    assert accuracy_of(learned, task, old_test) > 0.8


def test_the_old_extractor_is_the_base_to_the_bit(learned, classifier) -> None:
    assert same(snapshot(learned.backbones[0]), snapshot(classifier.backbone))
    assert not same(snapshot(learned.backbones[1]), snapshot(classifier.backbone))


def test_features_are_those_of_all_extractors_side_by_side(learned, task, new_test) -> None:
    together = whole_network.plain_outputs(learned.features, task, new_test)
    for number, backbone in enumerate(learned.backbones):
        h = whole_network.plain_outputs(backbone, task, new_test)
        part = together[:, number * h.shape[1] : (number + 1) * h.shape[1]]
        assert torch.allclose(part, 4 * h / h.norm(dim=1, keepdim=True), atol=1e-4)
    assert together.shape[1] == learned.head.in_features


def test_a_second_step_adds_a_third_extractor(classifier, task, next_task) -> None:
    task = replace(task, network=Optimisation(epochs=1, lr=0.05, batch=32), views=1)
    first = der.learn(classifier, task)
    before = [snapshot(backbone) for backbone in first.backbones]
    second = der.learn(first, next_task(task))
    assert len(second.backbones) == 3
    assert all(same(old, snapshot(new)) for old, new in zip(before, second.backbones, strict=False))
    assert second.head.weight.shape == (19, 3 * classifier.backbone.features)
    assert not any(p.requires_grad for backbone in list(second.backbones)[:2] for p in backbone.parameters())


def test_the_last_stage_changes_the_head_alone(learned, task) -> None:
    backbones, head = snapshot(learned.backbones), learned.head.weight.clone()
    learned.head.requires_grad_(True)
    der.relearn_head(learned, replace(task, seed=1))
    assert same(backbones, snapshot(learned.backbones))
    assert not torch.equal(head, learned.head.weight)
