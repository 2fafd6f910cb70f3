"""AutoAugment and Cutout on batches of normalised views."""

import pytest
import torch

from branchout.baselines.auto_augment import auto_augmented, cutout
from branchout.data.preprocess import Preprocessing


def test_cutout_blackens_one_square_of_half_the_side() -> None:
    torch.manual_seed(0)
    found = cutout(torch.ones(400, 3, 32, 32))
    hidden = found[:, 0] == 0
    assert torch.equal(hidden, found[:, 2] == 0)
    rows, columns = hidden.any(2).sum(1), hidden.any(1).sum(1)
    assert torch.equal(hidden.sum((1, 2)), rows * columns)  # a rectangle
    assert rows.max() == columns.max() == 16
    assert rows.min() == columns.min() == 8  # around a pixel at the edge half of it is outside
    assert hidden.float().mean(0).min() > 0.01  # every pixel is hidden now and then


@pytest.mark.parametrize("channels", [1, 3])
def test_views_are_changed_but_stay_images(channels: int) -> None:
    torch.manual_seed(1)
    preprocessing = Preprocessing(32, channels, (0.5,) * channels, (0.25,) * channels)
    images = torch.rand(64, channels, 32, 32)
    alter = auto_augmented(preprocessing)
    found = alter(preprocessing.normalise(images.clone())) * 0.25 + 0.5
    assert found.shape == images.shape
    assert found.dtype == images.dtype
    assert found.min() > -1e-5
    assert found.max() < 1 + 1e-5
    kept = ((found - images).abs() < 1 / 255 + 1e-4).float().mean((1, 2, 3))
    assert (kept < 0.5).float().mean() > 0.3  # most sub-policies change most pixels
    torch.manual_seed(1)
    torch.rand(64, channels, 32, 32)
    assert torch.equal(alter(preprocessing.normalise(images.clone())) * 0.25 + 0.5, found)
