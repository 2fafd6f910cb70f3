"""FeCAM against textbook formulas written out."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from branchout.baselines import fecam
from branchout.baselines.class_features import new_groups, plain
from branchout.baselines.networks import scores_of
from branchout.baselines.task import Task
from branchout.data.samples import Samples
from branchout.model.classifier import Classifier


def slow_shape(cloud: np.ndarray) -> np.ndarray:
    """Covariance, shrunk with γ₁ = γ₂ = 1, as correlations; entry by entry."""
    return slow_shape_of(np.cov(cloud.T))


def slow_shape_of(sigma: np.ndarray) -> np.ndarray:
    k = len(sigma)
    on = np.mean([sigma[i, i] for i in range(k)])
    off = np.mean([sigma[i, j] for i in range(k) for j in range(k) if i != j])
    shrunk = np.array([[sigma[i, j] + (on if i == j else off) for j in range(k)] for i in range(k)])
    return np.array([[shrunk[i, j] / np.sqrt(shrunk[i, i] * shrunk[j, j]) for j in range(k)] for i in range(k)])


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_shrinking_and_correlations_are_the_papers() -> None:
    cloud = np.random.default_rng(0).normal(size=(9, 5))
    shape = fecam.correlations(fecam.shrunk(fecam.covariance(torch.from_numpy(cloud))))
    assert shape.numpy() == pytest.approx(slow_shape(cloud))
    assert shape.diagonal().numpy() == pytest.approx(np.ones(5))


def test_distances_are_mahalanobis() -> None:
    rng = np.random.default_rng(0)
    x, means = rng.normal(size=(6, 5)), rng.normal(size=(3, 5))
    shapes = [slow_shape(rng.normal(size=(9, 5))) for _ in means]
    inverses = np.stack([np.linalg.inv(shape) for shape in shapes])
    found = fecam.squared_distances(*(torch.from_numpy(array) for array in (x, means, inverses)))
    for row, point in zip(found, x, strict=True):
        slow = [(point - m) @ np.linalg.solve(shape, point - m) for m, shape in zip(means, shapes, strict=True)]
        assert row.numpy() == pytest.approx(np.array(slow))


@pytest.mark.parametrize("few", [0, 1000], ids=["a shape for each class", "one for all"])
def test_scores_from_pictures_are_minus_the_distance_to_the_nearest_cloud(
    few: int,
    classifier: Classifier,
    overlapping_task: Task,
    new_look_test: Samples,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fecam, "FEW", few)
    task = overlapping_task
    scores = scores_of(fecam.learn(classifier, task), task.images(new_look_test)).numpy()
    describe = plain(classifier, task)
    clouds = [np.sqrt(group.double().numpy()) for group in new_groups(task, describe, first=True)]
    sigmas = [np.cov(cloud.T) for cloud in clouds]
    if few:
        sigmas = [np.mean(sigmas, axis=0)] * len(clouds)
    inverses = [np.linalg.inv(slow_shape_of(sigma)) for sigma in sigmas]
    noise = [
        np.trace(inverse @ sigma) / len(cloud) / (cloud.mean(0) ** 2).sum()
        for inverse, sigma, cloud in zip(inverses, sigmas, clouds, strict=True)
    ]
    for h, score in list(zip(describe(new_look_test).double().numpy(), scores, strict=True))[:4]:
        distances: dict[int, list[float]] = {}
        for column, number in enumerate(task.space.class_of_column.tolist()):
            apart = unit(np.sqrt(h)) - unit(clouds[column].mean(0))
            distances.setdefault(number, []).append(apart @ inverses[column] @ apart - noise[column])
        assert score == pytest.approx(np.array([-min(distances[n]) for n in range(len(distances))]), rel=1e-3)


def test_classes_of_few_images_are_as_near_as_those_of_many() -> None:
    rng = np.random.default_rng(0)
    clouds = [torch.from_numpy(5 + rng.normal(size=(n, 20))) for n in [10] * 100 + [1000] * 3]
    means = torch.stack([cloud.mean(0) for cloud in clouds])
    sigma = torch.stack([fecam.covariance(cloud) for cloud in clouds]).mean(0)
    precision = torch.linalg.inv(fecam.correlations(fecam.shrunk(sigma))).expand(len(clouds), -1, -1)
    x = torch.nn.functional.normalize(torch.from_numpy(5 + rng.normal(size=(200, 20))), dim=1)
    distances = fecam.squared_distances(x, torch.nn.functional.normalize(means, dim=1), precision)
    noise = fecam.mean_noise(clouds, means, [sigma], precision)
    few, many = (distances - noise).mean(0)[:100].mean(), (distances - noise).mean(0)[100:].mean()
    assert few.item() == pytest.approx(many.item(), rel=0.03)
    assert distances.mean(0)[:100].mean() > 1.05 * distances.mean(0)[100:].mean()


def test_a_class_of_one_image_has_a_distance() -> None:
    shape = fecam.correlations(fecam.shrunk(fecam.covariance(torch.rand(1, 5))))
    assert torch.allclose(shape, torch.eye(5))


def test_negative_features_are_not_transformed() -> None:
    h = torch.tensor([[4.0, -1.0]])
    assert torch.equal(fecam.transformed(h, tukey=False), h)
    assert torch.equal(fecam.transformed(h.abs(), tukey=True), torch.tensor([[2.0, 1.0]]))


@pytest.mark.parametrize("few", [0, 1000], ids=["a shape for each class", "one for all"])
def test_earlier_clouds_stay(
    few: int,
    classifier: Classifier,
    task: Task,
    next_task: Callable[[Task], Task],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fecam, "FEW", few)
    first = fecam.learn(classifier, task)
    second = fecam.learn(first, next_task(task))
    known = len(first.head.means)
    assert torch.equal(second.head.precisions[:known], first.head.precisions)
    assert (len(second.head.precisions.unique(dim=0)) == 1) == bool(few)
    assert second.head.tukey
    assert first.head.tukey


@pytest.mark.parametrize(("few", "shapes"), [(0, 16), (1000, 1)], ids=["a shape for each class", "one for all"])
def test_what_it_takes_to_answer_is_means_and_shapes(
    few: int, shapes: int, classifier: Classifier, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fecam, "FEW", few)
    k = classifier.backbone.features
    head = fecam.learn(classifier, task).head
    assert head.stored() == 16 * k + 16 + shapes * k * k
    assert len(head.precisions.unique(dim=0)) == shapes
