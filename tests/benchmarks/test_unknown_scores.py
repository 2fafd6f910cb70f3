"""Scores of images that fit no class, and the threshold of known images."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.unknown_scores import NEED_IMAGES, SCORES, KnownImages, score, score_known
from branchout.errors import BranchoutError
from branchout.evaluate.unknown import Outputs, threshold


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def around(directions: np.ndarray, per_class: int, seed: int, noise: float = 0.05) -> tuple[Outputs, np.ndarray]:
    """Images around some of eight directions of space. Logits know the first four."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(directions)), per_class)
    features = unit(directions[labels] + noise * rng.normal(size=(len(labels), 8)))
    return Outputs(10 * features[:, :4], features), labels


KNOWN, UNKNOWN = np.eye(8)[:4], np.eye(8)[4:]


@pytest.mark.parametrize("kind", list(SCORES))
def test_every_score_tells_unknown_images_from_known_ones(kind: str) -> None:
    outputs, labels = around(KNOWN, 10, seed=0)
    known = KnownImages(outputs, labels)
    held, strange = around(KNOWN, 10, seed=1)[0], around(UNKNOWN, 10, seed=2)[0]
    limit = threshold(score_known(kind, known))
    assert (score(kind, strange, known) > limit).all()
    assert (score(kind, held, known) > limit).mean() < 0.4


def test_the_scores_are_what_they_say() -> None:
    logits = np.array([[2.0, 1.0, -1.0], [800.0, 0.0, 0.0]])
    outputs = Outputs(logits, unit(np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])))
    exp = np.exp(logits[0])
    assert score("softmax", outputs) == pytest.approx([1 - exp[0] / exp.sum(), 0])
    assert score("energy", outputs) == pytest.approx([-np.log(exp.sum()), -800])
    known = KnownImages(Outputs(logits, np.eye(3)[:2]), np.array([0, 1]))
    assert score("mean", outputs, known) == pytest.approx([1 - 0.5**0.5, 0])
    assert score("knn", outputs, known) == pytest.approx([1 - 0.5**0.5, 0])


@pytest.mark.parametrize("kind", sorted(NEED_IMAGES))
def test_known_images_are_not_compared_with_themselves(kind: str) -> None:
    outputs, labels = around(KNOWN, 2, seed=0, noise=0.3)
    own = score_known(kind, KnownImages(outputs, labels))
    for row in range(len(labels)):
        others = np.arange(len(labels)) != row
        rest = KnownImages(Outputs(outputs.logits[others], outputs.features[others]), labels[others])
        alone = Outputs(outputs.logits[[row]], outputs.features[[row]])
        assert own[row] == pytest.approx(score(kind, alone, rest)[0])


def test_a_threshold_needs_two_images_of_a_class() -> None:
    outputs, labels = around(KNOWN, 1, seed=0)
    with pytest.raises(BranchoutError, match="two images"):
        score_known("knn", KnownImages(outputs, labels))
