"""Work on a device with too little memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers import BASE, CPU, untrained
from torch import Tensor

from branchout import api
from branchout.data.samples import Samples
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier
from branchout.serve.engine import Engine, Question
from branchout.training.out_of_memory import in_parts


def test_a_batch_too_large_for_the_device_is_computed_in_parts() -> None:
    sizes: list[int] = []

    def work(batch: Tensor) -> list[Tensor]:
        sizes.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError
        return [2 * batch, batch.sum(1)]

    batch = torch.arange(20.0).view(10, 2)
    doubled, sums = in_parts(work, batch)
    assert torch.equal(doubled, 2 * batch)
    assert torch.equal(sums, batch.sum(1))
    assert sizes == [10, 5, 3, 2, 5, 3, 2]


def test_grid_points_are_joined_along_their_own_dimension() -> None:
    def work(grid: Sequence[tuple[float, float]]) -> list[Tensor]:
        if len(grid) > 2:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 8.93 GB)")
        return [torch.tensor(grid).sum(1).expand(3, -1)]

    points = [(0.0, float(n)) for n in range(7)]
    (found,) = in_parts(work, points, dim=1)
    assert torch.equal(found, torch.arange(7.0).expand(3, -1))


def test_other_errors_are_not_answered_by_smaller_parts() -> None:
    sizes: list[int] = []

    def work(batch: Tensor) -> list[Tensor]:
        sizes.append(len(batch))
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        in_parts(work, torch.zeros(4, 1))
    assert sizes == [4]


@pytest.mark.parametrize("flip", [False, True])
def test_prediction_evaluation_and_the_server_answer_in_parts(
    flip: bool, val: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = untrained(BASE)
    classifier.kind = "photo"  # characters are not mirrored
    model = api.Model(SavedModel(classifier, (), ({},)), None, CPU)
    some = val.of_classes(BASE).select(np.arange(9))
    pictures = [some.read(n) for n in range(9)]
    prepared = [model.classifier.preprocessing.prepare(picture) for picture in pictures]

    def answers() -> list[list[float]]:
        engine = Engine(model)
        served = engine.answer([Question(pixels, 1, flip, engine.points.current) for pixels in prepared])
        predicted = model.predict(pictures, top=1, flip=flip)
        probabilities = [probability for ((_, probability),) in predicted]
        columns = model.evaluate(some, flip=flip).columns
        return [probabilities, columns.flatten().tolist(), [each["answers"][0]["probability"] for each in served]]

    whole, sizes = answers(), []
    features = Classifier.features

    def with_little_memory(self: Classifier, images: Tensor) -> list[Tensor]:
        sizes.append(len(images))
        if len(images) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return features(self, images)

    monkeypatch.setattr(Classifier, "features", with_little_memory)
    for found, expected in zip(answers(), whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert max(sizes) == 9


def test_a_single_image_that_does_not_fit_is_an_error() -> None:
    def work(batch: Tensor) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        in_parts(work, torch.zeros(4, 1))
