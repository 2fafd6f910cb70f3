"""Settings that depend on the number of images."""

import pytest

from branchout.training.optimisation import Optimisation, scale_to_dataset


@pytest.mark.parametrize(
    ("images", "batch"),
    [(1, 1), (10, 10), (16, 16), (100, 16), (160, 16), (170, 17), (1000, 100), (2560, 256), (9999, 256)],
)
def test_few_images_mean_small_batches_and_a_rate_to_match(images: int, batch: int) -> None:
    found = scale_to_dataset(Optimisation(30, lr=0.1, batch=256, nesterov=True), images)
    assert found == Optimisation(30, lr=pytest.approx(0.1 * batch / 256), batch=batch, nesterov=True)
