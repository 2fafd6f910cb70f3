"""What the network sees, against torchvision, Pillow and resampling written out."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from torchvision import transforms

from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MODES = {"bilinear": transforms.InterpolationMode.BILINEAR, "bicubic": transforms.InterpolationMode.BICUBIC}


def colour(size: int, **settings: Any) -> Preprocessing:
    return Preprocessing(size, 3, MEAN, STD, **settings)


def grey(size: int, **settings: Any) -> Preprocessing:
    return Preprocessing(size, 1, (0.5,), (0.25,), **settings)


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


sides = st.integers(3, 50)


@given(
    sides, sides, st.integers(4, 32), st.sampled_from([1.0, 0.9, 0.875, 0.5]), st.sampled_from(sorted(MODES)), st.data()
)
def test_the_plain_image_is_torchvisions_resize_and_centre_crop(
    height: int, width: int, size: int, crop: float, interpolation: str, data: st.DataObject
) -> None:
    image = picture(height, width, seed=data.draw(st.integers(0, 9)))
    reference = transforms.Compose(
        [
            transforms.Resize(int(size / crop), MODES[interpolation]),
            transforms.CenterCrop(size),
            transforms.PILToTensor(),
        ]
    )
    found = colour(size, crop=crop, interpolation=interpolation).prepare(image)
    assert found.dtype == torch.uint8
    assert found.is_contiguous()
    assert torch.equal(found, reference(Image.fromarray(image)))


def test_a_image_of_the_right_size_passes_untouched() -> None:
    image = picture(8, 8)
    found = colour(8).prepare(image)
    assert np.array_equal(found.permute(1, 2, 0).numpy(), image)
    kept = found.clone()
    image[:] = 0
    assert torch.equal(found, kept)  # and shares no memory with its source


def test_the_sides_of_a_wide_image_are_cut_off_and_the_middle_is_not_stretched() -> None:
    image = np.zeros((10, 30, 3), dtype=np.uint8)
    image[:, 10:20] = (10, 200, 30)
    found = colour(10).prepare(image)
    assert (found.permute(1, 2, 0) == torch.tensor([10, 200, 30])).all()


# Boxes.


def slow_resample(image: np.ndarray, start: float, length: float, size: int) -> np.ndarray:
    """Rows start … start + length of an image, `size` of them: weighted by a triangle as wide as the step."""
    step = length / size
    reach = max(step, 1.0)
    out = []
    for place in range(size):
        middle = start + (place + 0.5) * step
        weights = np.array([max(0.0, 1 - abs(row + 0.5 - middle) / reach) for row in range(len(image))])
        out.append(np.tensordot(weights / weights.sum(), image.astype(float), axes=1))
    return np.array(out)


@given(sides, sides, st.integers(2, 24), st.tuples(*[st.floats(0, 1)] * 2), st.tuples(*[st.floats(0.3, 1)] * 2))
def test_a_box_is_that_part_of_the_image_at_the_networks_size(
    height: int, width: int, size: int, place: tuple[float, float], shares: tuple[float, float]
) -> None:
    image = picture(height, width)
    left, top = (1 - shares[0]) * place[0], (1 - shares[1]) * place[1]
    found = colour(size).prepare(image, (left, top, *shares)).permute(1, 2, 0).numpy().astype(float)
    columns = slow_resample(image.transpose(1, 0, 2), left * width, shares[0] * width, size).transpose(1, 0, 2)
    expected = slow_resample(columns, top * height, shares[1] * height, size)
    assert np.abs(found - expected).max() <= 1.51  # Pillow rounds after each direction


def test_a_box_ignores_the_centre_crop() -> None:
    image = picture(20, 32)
    box = (0.25, 0.5, 0.5, 0.25)
    assert torch.equal(colour(8, crop=0.5).prepare(image, box), colour(8).prepare(image, box))


@pytest.mark.parametrize("interpolation", sorted(MODES))
def test_the_full_box_is_the_whole_image_resized(interpolation: str) -> None:
    image = picture(20, 32)
    how = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[interpolation]
    expected = np.asarray(Image.fromarray(image).resize((8, 8), how))
    found = colour(8, interpolation=interpolation).prepare(image, (0, 0, 1, 1))
    assert np.array_equal(found.permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("box", [(0.3, 0.3, 0.7000001, 0.7000001), (0.0, 0.0, 1.0000001, 1.0)])
def test_a_box_that_rounding_pushes_out_of_the_image_is_no_error(box: tuple[float, ...]) -> None:
    assert colour(8).prepare(picture(11, 13), box).shape == (3, 8, 8)


# Colour.


@pytest.mark.parametrize("box", [None, (0.1, 0.2, 0.5, 0.6)])
def test_a_grey_image_in_colour_has_three_equal_channels(box: tuple[float, ...] | None) -> None:
    image = picture(12, 9, channels=1)
    found = colour(6).prepare(image, box)
    assert found.shape == (3, 6, 6)
    assert torch.equal(found, grey(6).prepare(image, box).expand(3, 6, 6))
    assert torch.equal(found, colour(6).prepare(image[:, :, 0], box))  # height × width will do


def test_a_coloured_image_in_grey_is_its_luminance() -> None:
    image = picture(7, 7)
    found = grey(7).prepare(image)
    assert found.shape == (1, 7, 7)
    assert np.abs(found[0].numpy() - image @ np.array([0.299, 0.587, 0.114])).max() <= 0.51


def test_a_fourth_channel_is_dropped() -> None:
    image = picture(5, 5, channels=4)
    assert np.array_equal(colour(5).prepare(image).permute(1, 2, 0).numpy(), image[:, :, :3])


def test_images_of_other_numbers_are_refused() -> None:
    with pytest.raises(BranchoutError, match=r"8-bit \(uint8\), not float32"):
        colour(4).prepare(np.zeros((4, 4, 3), dtype=np.float32))


# Normalisation.


def test_normalise_takes_bytes_or_fractions() -> None:
    batch = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = (batch.numpy().transpose(0, 2, 3, 1) / 255 - np.array(MEAN)) / np.array(STD)
    for given_as in (batch, batch.float() / 255):
        before = given_as.clone()
        found = colour(6).normalise(given_as)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)
        assert torch.equal(given_as, before)


def test_two_networks_normalise_each_in_their_own_way() -> None:
    batch = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)
    assert grey(2).normalise(batch).flatten().tolist() == [2.0] * 4
    assert Preprocessing(2, 1, (0.0,), (0.5,)).normalise(batch).flatten().tolist() == [2.0] * 4
    assert Preprocessing(2, 1, (0.0,), (1.0,)).normalise(batch).flatten().tolist() == [1.0] * 4


# Settings.


@given(
    st.integers(1, 512),
    st.sampled_from([1, 3]),
    st.sampled_from(sorted(MODES)),
    st.floats(0.01, 1.0),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_settings_survive_a_json_file(
    size: int, channels: int, interpolation: str, crop: float, mean: float, std: float
) -> None:
    settings = Preprocessing(size, channels, (mean,) * channels, (std,) * channels, interpolation, crop)
    again = Preprocessing(**json.loads(json.dumps(asdict(settings))))
    assert again == settings
    assert hash(again) == hash(settings)
    assert repr(again) == repr(settings)  # the name of a cached file depends on it


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"channels": 4, "mean": (0.5,) * 4, "std": (0.5,) * 4}, "channels"),
        ({"channels": 1}, "each of 1 channels"),
        ({"mean": (0.5, 0.5)}, "mean"),
        ({"std": (0.5,)}, "std"),
        ({"std": (0.5, 0.5, 0.0)}, "std positive"),
        ({"interpolation": "nearest"}, "interpolation"),
        ({"size": 0}, "size"),
        ({"crop": 0.0}, "crop"),
        ({"crop": 1.01}, "crop"),
    ],
)
def test_bad_settings_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Preprocessing(**{**asdict(colour(32)), **change})


@pytest.mark.parametrize("shape", [(1, 200_000), (200_000, 1)])
def test_a_very_long_image_is_seen_in_its_middle_without_growing(shape: tuple[int, int]) -> None:
    image = np.zeros((*shape, 3), dtype=np.uint8)
    middle = shape[0] // 2 - 30, shape[1] // 2 - 30
    image[max(middle[0], 0) : middle[0] + 60 if shape[0] > 1 else 1, max(middle[1], 0) : middle[1] + 60] = 200
    seen = Preprocessing(32, 3, (0.5,) * 3, (0.5,) * 3).prepare(image)
    assert seen.shape == (3, 32, 32)
    assert (seen == 200).all()


def test_images_of_ordinary_shape_are_not_shortened() -> None:
    image = np.random.default_rng(0).integers(0, 256, (20, 20 * 16, 3), dtype=np.uint8)
    whole = Preprocessing(10, 3, (0.5,) * 3, (0.5,) * 3).prepare(image)
    resized = Image.fromarray(image).resize((160, 10), Image.Resampling.BILINEAR).crop((75, 0, 85, 10))
    assert np.array_equal(whole.permute(1, 2, 0).numpy(), np.array(resized))
