"""The energy of images that fit no class, the threshold of known images, and groups by look."""

from __future__ import annotations

import numpy as np
import pytest

from branchout.evaluate.unknown import energy, group, threshold


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_the_energy_is_low_where_a_logit_is_large() -> None:
    logits = np.array([[2.0, 1.0, -1.0], [800.0, 0.0, 0.0]])
    assert energy(logits) == pytest.approx([-np.log(np.exp(logits[0]).sum()), -800])


def test_the_threshold_lets_few_known_images_exceed_it() -> None:
    scores = np.arange(100.0)
    assert (scores > threshold(scores)).sum() == 10


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_images_that_look_alike_are_one_group(classes: int) -> None:
    labels = np.repeat(np.arange(classes), 5)
    features = unit(np.eye(8)[labels] + 0.05 * np.random.default_rng(3).normal(size=(len(labels), 8)))
    order = np.random.default_rng(4).permutation(len(labels))
    groups = group(features[order])
    pairs = {(label, number) for label, number in zip(labels[order], groups, strict=True)}
    assert len(pairs) == classes
    assert len({number for _, number in pairs}) == classes
    firsts = [int(np.flatnonzero(groups == number)[0]) for number in range(classes)]
    assert firsts == sorted(firsts)


def test_few_or_identical_images_have_groups_too() -> None:
    assert group(np.zeros((0, 4))).tolist() == []
    assert group(np.eye(4)[:2]).tolist() == [0, 1]
    assert len(group(np.tile(np.eye(4)[:1], (5, 1)))) == 5
    assert len(group(unit(np.random.default_rng(0).normal(size=(300, 4))))) == 300
