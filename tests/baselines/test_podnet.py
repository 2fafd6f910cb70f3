"""PODNet's two distillation terms, its head of proxies and its loss, each against a slow version."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from branchout.baselines import podnet
from branchout.baselines.networks import scores_of
from branchout.baselines.podnet import PROXIES, LocalSimilarity, PodNetwork
from branchout.data.memory import keep


@pytest.fixture(scope="module")
def learned(classifier, task) -> PodNetwork:
    return podnet.learn(classifier, replace(task, network=replace(task.network, epochs=3)))


def test_it_learns_and_remembers(learned, task, accuracy_of, old_test, new_test) -> None:
    assert accuracy_of(learned, task, new_test) > 0.8
    assert accuracy_of(learned, task, old_test) > 0.8


def _slow_pod(ours: Tensor, theirs: Tensor) -> float:
    """One stage: a vector of sums for each picture, channel by channel."""
    distances = []
    for picture in range(len(ours)):
        vectors = []
        for x in (ours[picture], theirs[picture]):
            rows = [float((x[c, i] ** 2).sum()) for c in range(x.shape[0]) for i in range(x.shape[1])]
            columns = [float((x[c, :, j] ** 2).sum()) for c in range(x.shape[0]) for j in range(x.shape[2])]
            vector = np.array(rows + columns)
            vectors.append(vector / math.sqrt((vector**2).sum()))
        distances.append(math.sqrt(((vectors[0] - vectors[1]) ** 2).sum()))
    return float(np.mean(distances))


def test_pod_spatial_against_loops() -> None:
    maps = [torch.randn(3, 4, 5, 6), torch.randn(3, 8, 2, 3)]
    old = [torch.randn(3, 4, 5, 6), torch.randn(3, 8, 2, 3)]
    expected = np.mean([_slow_pod(a, b) for a, b in zip(maps, old, strict=True)])
    assert podnet.pod_spatial(maps, old).item() == pytest.approx(expected, rel=1e-5)


def test_pod_allows_pixels_to_move_within_rows_and_columns() -> None:
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 0, 0] = x[0, 0, 1, 1] = 1
    moved = torch.zeros(1, 1, 4, 4)
    moved[0, 0, 0, 1] = moved[0, 0, 1, 0] = 1
    assert podnet.pod_spatial([x], [moved]).item() == 0
    elsewhere = x.roll(1, 3)
    assert podnet.pod_spatial([x], [elsewhere]).item() > 0.1


def test_a_student_like_its_teacher_gets_no_gradient() -> None:
    x, h = torch.randn(2, 3, 4, 4, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    loss = podnet.pod_spatial([x], [x.detach()]) + podnet.pod_flat(h, 2 * h.detach())
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert x.grad.abs().max() == 0
    assert h.grad.abs().max() < 1e-6


def test_loss_against_a_loop() -> None:
    scores, target = torch.randn(6, 5) * 3, torch.tensor([0, 1, 2, 3, 4, 0])
    losses = []
    for row, label in zip(scores.double(), target.tolist(), strict=True):
        row = row - row.max()
        others = sum(math.exp(row[c]) for c in range(5) if c != label)
        losses.append(-math.log(math.exp(row[label]) / (1 + others)))
    assert podnet.nca(scores, target).item() == pytest.approx(np.mean(losses), rel=1e-5)


def test_scores_against_a_loop() -> None:
    proxies, h = torch.randn(3, 4, 6), torch.randn(2, 6)
    scores = LocalSimilarity(proxies, 16.0)(h)
    for n in range(2):
        for c in range(3):
            cosines = [float(torch.cosine_similarity(h[n], proxies[c, p], dim=0)) for p in range(4)]
            closeness = [
                -float((normalize(h[n], dim=0) - normalize(proxies[c, p], dim=0)).square().sum()) for p in range(4)
            ]
            weights = np.exp(closeness) / np.exp(closeness).sum()
            assert scores[n, c].item() == pytest.approx(16 * float(weights @ cosines), abs=1e-4)


def test_old_proxies_get_no_gradient() -> None:
    head = LocalSimilarity(torch.randn(3, 4, 6), 16.0)
    podnet.nca(head(torch.randn(5, 6), torch.tensor([False, False, True])), torch.tensor([0, 1, 2, 0, 1])).backward()
    moved = head.proxies.grad.abs().sum((1, 2))
    assert moved[:2].tolist() == [0, 0]
    assert moved[2] > 0


def test_a_base_opened_as_proxies_answers_as_before(classifier, task, old_test) -> None:
    images = task.images(old_test)
    opened = podnet._as_podnet(classifier)
    assert torch.allclose(scores_of(opened, images), scores_of(classifier, images), atol=1e-3)


def test_every_stage_but_the_stem_is_watched(classifier) -> None:
    pictures = torch.randn(2, 1, 32, 32)
    opened = podnet._as_podnet(classifier).eval()
    maps, h = opened.maps_and_features(pictures)
    assert [tuple(x.shape[2:]) for x in maps] == [(32, 32), (16, 16), (8, 8), (4, 4)]
    assert torch.allclose(h, classifier.features(pictures)[0], atol=1e-5)
    assert torch.allclose(maps[-1].mean((2, 3)), h, atol=1e-5)


def test_new_proxies_are_centres_of_their_images(classifier, overlapping_task) -> None:
    task = overlapping_task
    teacher = podnet._as_podnet(classifier).eval()
    old = teacher.head.proxies.detach()
    proxies = podnet.imprinted(teacher, task)
    assert proxies.shape == (16, PROXIES, classifier.backbone.features)
    again = task.labels(task.new.of_classes(["ampersand"]))[0]
    alone = [c for c in range(12) if c not in set(task.labels(task.new).tolist())]
    assert torch.allclose(proxies[alone], old[alone])
    assert torch.allclose(proxies[again, : PROXIES // 2], old[again, : PROXIES // 2])
    assert not torch.allclose(proxies[again, PROXIES // 2 :], old[again, PROXIES // 2 :])
    # Imprinted classes are recognised before any training.
    opened = PodNetwork(teacher.backbone, LocalSimilarity(proxies, 16.0))
    answers = scores_of(opened, task.images(task.new)).argmax(1).numpy()
    assert (answers == task.labels(task.new)).mean() > 0.7


def test_few_images_are_proxies_themselves_and_no_two_proxies_the_same() -> None:
    rows = np.random.default_rng(0).normal(size=(3, 4))
    centres = podnet._centres(rows, 7, np.random.default_rng(0))
    assert np.array_equal(centres[:3], rows)
    assert centres == pytest.approx(rows[[0, 1, 2, 0, 1, 2, 0]], abs=0.5)
    assert len(np.unique(centres.round(6), axis=0)) == 7


@pytest.mark.parametrize("exemplars", [20, 5, 1, 0])
def test_proxies_of_the_base_differ_around_its_rows(exemplars, classifier, task, accuracy_of, old_test) -> None:
    known = task.everything.select(task.everything.origin == 0)
    task = replace(task, memory=keep(known, per_class=exemplars, seed=3) if exemplars else known.select([]))
    opened = podnet._as_podnet(classifier).eval()
    rows = opened.head.proxies.detach()[:, 0]
    proxies = podnet.spread_proxies(opened, task)
    assert proxies.shape == (12, PROXIES, classifier.backbone.features)
    apart = torch.cdist(proxies, proxies)[:, ~torch.eye(PROXIES, dtype=torch.bool)]
    assert apart.min() > 0.01
    assert torch.cosine_similarity(proxies.mean(1), rows).min() > 0.98
    with torch.no_grad():
        opened.head.proxies.copy_(proxies)
    assert accuracy_of(opened, task, old_test) > 0.95


def test_proxies_of_the_base_go_their_own_ways_and_the_last_epochs_leave_the_scale(classifier, task) -> None:
    short = replace(task, network=replace(task.network, epochs=1))
    scales = []

    def noted(network, *rest):
        scales.append(network.head.eta.item())
        start = network.head.proxies.detach().clone()
        tune(network, *rest)
        scales.append(network.head.eta.item())
        moved = (network.head.proxies - start).detach()[:12]
        assert moved.norm(dim=2).min() > 0
        assert torch.cdist(moved, moved)[:, ~torch.eye(PROXIES, dtype=torch.bool)].min() > 0

    tune = podnet.tune_head
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(podnet, "tune_head", noted)
        learned = podnet.learn(classifier, short)
    assert scales[0] == scales[1] != 16  # trained with the network, and then no more
    assert torch.cdist(learned.head.proxies, learned.head.proxies)[:, ~torch.eye(PROXIES, dtype=torch.bool)].min() > 0


def test_training_the_network_leaves_proxies_of_old_classes_as_they_are(classifier, task) -> None:
    """Weight decay would shorten them: their gradient is 0, and the optimiser has them all the same."""
    decayed = replace(task, network=replace(task.network, epochs=1, weight_decay=0.01))
    first = podnet.imprinted
    started = []

    def imprinted(*args):
        started.append(first(*args))
        return started[-1].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(podnet, "imprinted", imprinted)
        patch.setattr(podnet, "tune_head", lambda *args: None)
        learned = podnet.learn(classifier, decayed)
    old = len(classifier.space.classes)
    assert torch.equal(learned.head.proxies[:old], started[0][:old])
    assert not torch.equal(learned.head.proxies[old:], started[0][old:])
