"""Rainbow Memory mixes labels as it mixes pictures, and keeps the sure and the unsure alike."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from branchout.baselines import rainbow, whole_network
from branchout.baselines.networks import Network
from branchout.errors import DoesNotApply


@pytest.fixture(scope="module")
def learned(classifier, task) -> Network:
    return rainbow.learn(classifier, replace(task, network=replace(task.network, epochs=4)))


def test_it_learns_and_remembers(learned, task, accuracy_of, old_test, new_test) -> None:
    assert accuracy_of(learned, task, new_test) > 0.7
    assert accuracy_of(learned, task, old_test) > 0.7


def test_labels_are_shared_as_the_area_is() -> None:
    rng = np.random.default_rng(0)
    target = torch.arange(6)
    pictures = target.float().view(-1, 1, 1, 1).expand(-1, 3, 8, 12).clone()  # each picture is its label
    shares = []
    for _ in range(30):
        mixed, own, pasted, share = rainbow.cutmix(pictures, target, rng)
        assert torch.equal(own, target)
        for n in range(6):
            assert (mixed[n] == own[n]).float().mean().item() == pytest.approx(share)
            assert (mixed[n] == pasted[n]).float().mean().item() == pytest.approx(1 - share)
            assert own[n] != pasted[n]
        shares.append(share)
    assert torch.equal(pictures[3], torch.full((3, 8, 12), 3.0))
    assert min(shares) < 0.5 < max(shares)


def test_what_is_pasted_is_one_box() -> None:
    pictures = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(-1, 1, 9, 9).clone()
    mixed, *_ = rainbow.cutmix(pictures, torch.tensor([0, 1]), np.random.default_rng(4))
    inside = mixed[0, 0] == 1
    assert 0 < inside.sum() < 81
    rows, columns = inside.any(1), inside.any(0)
    assert torch.equal(inside, rows[:, None] & columns[None, :])


def test_its_own_memory_is_spread_over_uncertainty(classifier, task, monkeypatch) -> None:
    monkeypatch.setattr(rainbow, "COPIES", 6)
    network = Network.of(classifier).eval()
    task = replace(task, everything=task.everything.of_classes(task.space.branches[0][:4]))
    earlier = task.everything.select(task.everything.origin == 0)
    found = rainbow.kept(network, task)
    assert found.counts() == dict.fromkeys(earlier.classes, task.per_class)
    answers = whole_network.augmented_outputs(
        lambda pictures: network(pictures).argmax(1), task, earlier, rainbow.COPIES
    ).numpy()
    for name in earlier.classes:
        members = np.flatnonzero(earlier.names == name)
        doubts = [1 - np.bincount(answers[:, n]).max() / rainbow.COPIES for n in members]
        every = len(members) / task.per_class
        order = np.argsort(doubts, kind="stable")
        expected = [members[order[int(n * every)]] for n in range(task.per_class)]
        assert found.of_classes([name]).ids.tolist() == earlier.ids[expected].tolist()


def test_what_it_would_have_kept_of_an_earlier_step_is_not_made_up(classifier, task) -> None:
    later = replace(task, space=task.space.extend(["one more"]))
    with pytest.raises(DoesNotApply, match="one step only; use rainbow"):
        rainbow.kept(Network.of(classifier), later)
