"""Near-duplicates: images of one burst are found, other images are not, and hold-outs keep a group on one side."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter

from branchout.data import datasets
from branchout.data.folders import scan
from branchout.data.glyphs import glyphs
from branchout.data.near_duplicates import count_grouped, image_hash, near_duplicates, near_training, take_groups
from branchout.data.samples import Samples, as_samples, concatenate
from tests.data.hostile import encoded, put


def photo(seed: int, side: int = 128) -> Image.Image:
    """Random smooth structure at several scales, as photographs have."""
    rng = np.random.default_rng(seed)
    image = np.zeros((side, side, 3))
    for cells in (4, 8, 16):
        coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        image += np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC)) / 3
    return Image.fromarray(image.astype(np.uint8)).filter(ImageFilter.GaussianBlur(1))


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    return Image.open(io.BytesIO(encoded(image, "JPEG", quality=quality)))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "crop": lambda image: image.crop((3, 2, image.width - 1, image.height - 2)),
    "brightness": lambda image: ImageEnhance.Brightness(image).enhance(0.75),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.3),
    "JPEG quality": lambda image: as_jpeg(image, 40),
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS),
    "all": lambda image: as_jpeg(ImageEnhance.Brightness(image.crop((2, 2, 126, 126))).enhance(1.2), 60),
}


def table(images: list[Image.Image], names: list[str]) -> Samples:
    hashes = np.stack([image_hash(np.asarray(image.convert("RGB"))) for image in images])
    same_size = np.stack([np.asarray(image.convert("RGB").resize((8, 8))) for image in images])
    return replace(as_samples(same_size, names), image_hash=hashes)


@pytest.mark.parametrize("change", CHANGES)
def test_images_of_one_burst_are_grouped_and_others_are_not(change: str) -> None:
    originals = [photo(seed) for seed in range(30)]
    changed = [CHANGES[change](image) for image in originals]
    groups = near_duplicates(table(originals + changed, ["robin"] * 60))
    assert (groups[:30] == groups[30:]).sum() >= 29
    assert len(np.unique(groups[:30])) == 30


def test_glyphs_and_noise_are_not_near_duplicates_of_each_other() -> None:
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(200)]
    assert count_grouped(near_duplicates(table(noise, ["noise"] * 200))) == (0, 0)
    drawn = glyphs(20, 1).train
    some = drawn.select(np.isin(drawn.labels, np.arange(0, len(drawn.classes), 50)))
    images = [Image.fromarray(some.read(row)[:, :, 0]) for row in range(len(some))]
    grouped, _ = count_grouped(near_duplicates(table(images, some.names.tolist())))
    assert grouped <= len(images) // 100


def test_images_of_one_colour_are_like_no_other() -> None:
    flat = [Image.new("RGB", (20, 20), (value, value, value)) for value in (0, 100, 100)]
    assert not image_hash(np.asarray(flat[0])).any()
    assert count_grouped(near_duplicates(table(flat, ["a"] * 3))) == (0, 0)


def test_groups_join_through_others_and_stay_within_a_class() -> None:
    first = photo(1, 256)
    burst = [first.crop((shift, 0, 200 + shift, 200)) for shift in range(0, 56, 4)]
    groups = near_duplicates(table(burst, ["robin"] * 14))
    assert len(set(groups.tolist())) == 1
    ends = near_duplicates(table([burst[0], burst[-1]], ["robin"] * 2))
    assert len(set(ends.tolist())) == 2  # on their own they differ too much
    two = near_duplicates(table([first, first], ["robin", "wren"]))
    assert len(set(two.tolist())) == 2


def test_frames_of_a_video_are_compared_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (image_hash(np.asarray(photo(seed))) for seed in (1, 2))
    frames = replace(as_samples(np.zeros((1500, 1, 1, 1), dtype=np.uint8), ["robin"] * 1500),
                     image_hash=np.stack([one, other] * 750))  # fmt: skip
    monkeypatch.setattr("branchout.data.near_duplicates._BLOCK", 2**14)
    near_duplicates(frames.select(np.arange(4)))  # imports
    tracemalloc.start()
    groups, near = near_duplicates(frames), near_training(frames, frames)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert groups.tolist() == [0, 1] * 750
    assert near.tolist() == list(range(1500))
    assert peak < 8 * 2**20  # all pairs take 18 MB, twice


def test_only_decoded_files_are_grouped(tmp_path: Path) -> None:
    images = np.stack([np.asarray(photo(1))] * 3)
    arrays = as_samples(images, ["a", "a", "a"])
    assert count_grouped(near_duplicates(arrays)) == (0, 0)
    for quality in (30, 60, 90):
        put(tmp_path / f"robin/{quality}.jpg", encoded(photo(1), "JPEG", quality=quality))
    assert count_grouped(near_duplicates(scan(tmp_path, verify=False)[0])) == (0, 0)
    files = scan(tmp_path)[0]
    assert count_grouped(near_duplicates(files)) == (3, 1)
    assert count_grouped(near_duplicates(concatenate([arrays, files]))) == (3, 1)


def test_training_images_are_found_among_held_out_ones() -> None:
    held = table([photo(1), photo(2), photo(3)], ["robin", "robin", "wren"])
    train = table([as_jpeg(photo(2), 50), as_jpeg(photo(3), 50), photo(9)], ["robin", "robin", "wren"])
    assert near_training(held, train).tolist() == [1]


def test_whole_groups_are_taken_in_order_until_enough() -> None:
    members = np.array([4, 2, 0, 3, 1, 5])
    alone = np.arange(6)
    assert take_groups(members, alone, 2).tolist() == [4, 2]
    assert take_groups(members, alone, 0).tolist() == []
    groups = np.array([0, 0, 0, 3, 4, 5])  # 0, 1 and 2 are one burst
    assert take_groups(members, groups, 2).tolist() == [4, 3]
    assert take_groups(members, groups, 4).tolist() == [4, 2, 0, 1]
    two_bursts = np.array([0, 0, 0, 3, 3, 3])
    assert take_groups(members, two_bursts, 1).tolist() == []  # half of the class is too much to hold out
    three_bursts = np.array([0, 0, 2, 2, 4, 4])
    assert take_groups(members, three_bursts, 1).tolist() == [4, 5]


def test_a_dataset_from_a_folder_keeps_bursts_on_one_side(tmp_path: Path) -> None:
    for scene in range(8):
        for quality in (40, 60, 80):
            put(tmp_path / f"robin/{scene}-{quality}.jpg", encoded(photo(scene), "JPEG", quality=quality))
    dataset = datasets.folder(tmp_path)
    scenes = [{name.split("/")[1][0] for name in part.ids} for part in (dataset.train, dataset.val)]
    assert scenes[1]
    assert not scenes[0] & scenes[1]
