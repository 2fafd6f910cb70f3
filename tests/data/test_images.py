"""Pictures in batches: the order they come in, the cache on disk, and the two ways to hold them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from branchout.data import augment
from branchout.data import images as batches
from branchout.data.augment import Augmentation, for_kind
from branchout.data.decode import Kind, UnreadableImage
from branchout.data.images import (
    Gallery,
    ResidentImages,
    StreamedImages,
    class_balanced,
    decoded,
    in_order,
    on_device,
    open_images,
    shuffled,
)
from branchout.data.preprocess import Preprocessing
from branchout.data.samples import ArrayPixels, Image, Samples, concatenate, digest
from branchout.data.verify import FilePixels
from branchout.labels import Ints

CPU = torch.device("cpu")
COLOUR = Preprocessing(8, 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
GREY = Preprocessing(4, 1, (0.5,), (0.5,))


class Watched:
    """Pictures of many shapes that count how often they are read."""

    shape = None

    def __init__(self, count: int = 7, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.images = [rng.integers(0, 256, (9 + i % 3, 12 - i % 4, 3), dtype=np.uint8) for i in range(count)]
        self.reads = 0

    def __len__(self) -> int:
        return len(self.images)

    def read(self, row: int) -> Image:
        self.reads += 1
        return self.images[row]

    def fingerprint(self, rows: Ints, *, portable: bool = False) -> str:
        return digest(*(self.images[row].tobytes() for row in rows))


def samples_of(pixels: Any) -> Samples:
    return Samples.build(
        pixels, ["x" if i % 2 else "y" for i in range(len(pixels))], [str(i) for i in range(len(pixels))]
    )


def by_hand(samples: Samples, preprocessing: Preprocessing) -> np.ndarray:
    return np.stack([preprocessing.prepare(samples.read(i)).numpy() for i in range(len(samples))])


# The order.


@given(st.integers(0, 60), st.integers(1, 20))
def test_in_order_is_every_position_once_in_order(count: int, size: int) -> None:
    found = in_order(count, size)
    assert [int(i) for batch in found for i in batch] == list(range(count))
    assert all(len(batch) == size for batch in found[:-1])
    assert all(1 <= len(batch) <= size for batch in found)


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 99))
def test_shuffled_is_every_position_once_and_the_seed_repeats_it(count: int, size: int, seed: int) -> None:
    found = shuffled(count, size, seed)
    assert sorted(int(i) for batch in found for i in batch) == list(range(count))
    assert [len(batch) for batch in found] == [len(batch) for batch in in_order(count, size)]
    again = shuffled(count, size, seed)
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))


def test_shuffled_is_shuffled_and_differs_by_seed() -> None:
    orders = {tuple(np.concatenate(shuffled(50, 8, seed)).tolist()) for seed in range(20)}
    assert len(orders) == 20
    assert tuple(range(50)) not in orders


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 99))
def test_a_small_last_batch_can_be_dropped_unless_it_is_the_only_one(count: int, size: int, seed: int) -> None:
    whole, kept = shuffled(count, size, seed), shuffled(count, size, seed, drop_last=True)
    if 0 < count < size:
        assert len(kept) == 1
        assert len(kept[0]) == count
    else:
        assert [len(batch) for batch in kept] == [size] * (count // size)
    assert all(np.array_equal(one, other) for one, other in zip(whole, kept, strict=False))


@given(
    st.lists(st.sampled_from([0, 1, 2, 5]), min_size=1, max_size=30),
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(0, 9),
)
def test_balanced_batches_have_as_many_of_every_class_and_repeat_only_if_they_must(
    labels: list[int], per_class: int, size: int, seed: int
) -> None:
    found = class_balanced(np.array(labels), per_class, size, seed)
    assert all(len(batch) == size for batch in found[:-1])
    assert 1 <= len(found[-1]) <= size
    uses = Counter(int(i) for batch in found for i in batch)
    for label in set(labels):
        members = [i for i, other in enumerate(labels) if other == label]
        times = [uses.pop(i, 0) for i in members]
        assert sum(times) == per_class
        assert max(times) - min(times) <= 1  # so nothing repeats before all were seen
    assert not uses
    again = class_balanced(np.array(labels), per_class, size, seed)
    assert np.array_equal(np.concatenate(found), np.concatenate(again))


def test_balanced_batches_mix_the_classes_and_draw_others_by_seed() -> None:
    labels = np.repeat([0, 1], 100)
    drawn = [np.concatenate(class_balanced(labels, 10, 5, seed)) for seed in range(5)]
    assert all(0 < labels[order[:10]].sum() < 10 for order in drawn)
    assert len({tuple(sorted(order.tolist())) for order in drawn}) == 5


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=5))
def test_batches_on_the_device_are_the_same_batches(lists: list[list[int]]) -> None:
    found = on_device([np.array(batch, dtype=np.int64) for batch in lists], CPU)
    assert [batch.tolist() for batch in found] == lists
    assert all(batch.dtype == torch.int64 and batch.device == CPU for batch in found)


# The cache.


def test_images_are_decoded_as_they_are_prepared_one_by_one() -> None:
    samples = samples_of(Watched())
    found = decoded(samples, COLOUR, None)
    assert found.dtype == np.uint8
    assert np.array_equal(found, by_hand(samples, COLOUR))
    backwards = samples.select(np.arange(6, -1, -1))
    assert np.array_equal(decoded(backwards, COLOUR, None), found[::-1])


def test_what_was_decoded_before_is_not_read_again(tmp_path: Path) -> None:
    pixels = Watched()
    first = decoded(samples_of(pixels), COLOUR, tmp_path)
    assert pixels.reads == 7
    second = decoded(samples_of(pixels), COLOUR, tmp_path)
    assert pixels.reads == 7
    assert np.array_equal(first, second)
    twin = Watched()  # the same pictures, opened by another process
    assert np.array_equal(decoded(samples_of(twin), COLOUR, tmp_path), first)
    assert twin.reads == 0


def test_what_is_read_from_the_cache_can_be_written_to_without_changing_it(tmp_path: Path) -> None:
    samples = samples_of(Watched())
    first = decoded(samples, COLOUR, tmp_path).copy()
    tensor = torch.from_numpy(decoded(samples, COLOUR, tmp_path))
    tensor.zero_()
    assert np.array_equal(decoded(samples, COLOUR, tmp_path), first)


def test_other_pixels_order_labels_or_settings_make_another_file(tmp_path: Path) -> None:
    samples = samples_of(Watched())
    swapped = samples.select(np.array([2, 1, 0, 3, 4, 5, 6]))  # two pictures of one class
    every = [
        (samples, COLOUR),
        (samples_of(Watched(seed=1)), COLOUR),
        (swapped, COLOUR),
        (samples.rename({"x": "z"}), COLOUR),
        (samples.select(np.arange(6)), COLOUR),
        (samples, Preprocessing(8, 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), crop=0.5)),
        (samples, Preprocessing(8, 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic")),
        (samples, GREY),
    ]
    for number, (table, preprocessing) in enumerate(every):
        decoded(table, preprocessing, tmp_path)
        assert len(list(tmp_path.rglob("*.npy"))) == number + 1
    for table, preprocessing in every:
        assert np.array_equal(decoded(table, preprocessing, tmp_path), by_hand(table, preprocessing))
    assert len(list(tmp_path.rglob("*"))) == 1 + len(every)  # one folder, and nothing half-written


def test_images_swapped_between_two_sources_are_not_confused(tmp_path: Path) -> None:
    one, other = (Samples.build(Watched(1, seed), ["x"], [str(seed)]) for seed in (1, 2))
    joined = concatenate([one, other])
    for table in (joined, joined.select(np.array([1, 0]))):
        assert np.array_equal(decoded(table, COLOUR, tmp_path), by_hand(table, COLOUR))


def test_a_file_that_changed_is_decoded_again(tmp_path: Path) -> None:
    def paint(value: int) -> None:
        Pillow.new("RGB", (8, 8), (value, value, value)).save(tmp_path / "one.png")

    paint(10)
    table = Samples.build(FilePixels(tmp_path, np.array([b"one.png"])), ["x"], ["one"])
    assert (decoded(table, COLOUR, tmp_path / "cache") == 10).all()
    paint(200)
    os.utime(tmp_path / "one.png", ns=(1, 1))  # a clock too coarse to tell the two is not what is tested
    assert (decoded(table, COLOUR, tmp_path / "cache") == 200).all()


@pytest.mark.parametrize("bytes_kept", [0, 3, 20, 200, -1])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, bytes_kept: int) -> None:
    pixels = Watched()
    samples = samples_of(pixels)
    expected = decoded(samples, COLOUR, tmp_path).copy()
    (file,) = tmp_path.rglob("*.npy")
    whole = file.read_bytes()
    file.write_bytes(whole[:bytes_kept])
    assert np.array_equal(decoded(samples, COLOUR, tmp_path), expected)
    assert pixels.reads == 14
    assert file.read_bytes() == whole  # mended
    assert np.array_equal(decoded(samples, COLOUR, tmp_path), expected)
    assert pixels.reads == 14


def test_a_cache_of_another_shape_is_made_anew(tmp_path: Path) -> None:
    samples = samples_of(Watched())
    expected = decoded(samples, COLOUR, tmp_path).copy()
    (file,) = tmp_path.rglob("*.npy")
    np.save(file, expected[:3])
    assert np.array_equal(decoded(samples, COLOUR, tmp_path), expected)


def test_what_a_killed_process_left_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = samples_of(Watched())
    whole = np.save

    def half(file: Any, array: np.ndarray) -> None:
        whole(file, array[: len(array) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", half)
    with pytest.raises(KeyboardInterrupt):
        decoded(samples, COLOUR, tmp_path)
    monkeypatch.undo()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    for _ in range(2):
        assert np.array_equal(decoded(samples, COLOUR, tmp_path), by_hand(samples, COLOUR))


def test_no_images_at_all_are_an_empty_array(tmp_path: Path) -> None:
    none = samples_of(Watched()).select(np.zeros(7, dtype=bool))
    for _ in range(2):
        assert decoded(none, COLOUR, tmp_path).shape == (0, 3, 8, 8)
    assert list(open_images(none, COLOUR, CPU).plain(in_order(0, 4))) == []


def test_workers_decode_the_same_array(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 4 * 512 + 100  # as many as it takes to start workers
    pixels = ArrayPixels(np.random.default_rng(0).integers(0, 256, (count, 5, 3, 1), dtype=np.uint8))
    samples = samples_of(pixels)
    started = []
    load = batches.load

    def watched(*given_to: Any) -> Any:
        started.append(given_to[3])
        return load(*given_to)

    monkeypatch.setattr(batches, "load", watched)
    found = []
    for workers in (0, 2):
        monkeypatch.setattr(batches, "cores", lambda workers=workers: workers)
        found.append(decoded(samples, GREY, None))
    assert started == [0, 2]
    assert np.array_equal(*found)
    some = [0, 511, 512, 2047, 2048, count - 1]
    assert np.array_equal(found[0][some], by_hand(samples.select(np.array(some)), GREY))


class Broken(Watched):
    def read(self, row: int) -> Image:
        if row == 5:
            raise UnreadableImage(Kind.TRUNCATED, "half of it", "cat/five.jpg")
        return super().read(row)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_named_with_and_without_workers(workers: int) -> None:
    images = StreamedImages(samples_of(Broken()), COLOUR, CPU, workers)
    with pytest.raises(UnreadableImage, match=r"^cat/five\.jpg: truncated \(half of it\)$") as caught:
        list(images.plain(in_order(7, 2)))
    assert caught.value.kind is Kind.TRUNCATED


# Resident and streamed.


def resident(samples: Samples, preprocessing: Preprocessing = COLOUR) -> ResidentImages:
    return ResidentImages(torch.from_numpy(decoded(samples, preprocessing, None)), preprocessing, CPU)


def test_both_kinds_show_the_network_the_same_plain_images() -> None:
    samples = samples_of(Watched())
    order = shuffled(7, 3, seed=1)
    streamed = StreamedImages(samples, COLOUR, CPU, workers=0)
    assert len(streamed) == len(resident(samples)) == 7
    found = list(zip(resident(samples).plain(order), streamed.plain(order), strict=True))
    assert len(found) == len(order)
    for positions, (one, other) in zip(order, found, strict=True):
        assert torch.equal(one, other)
        by_one = torch.from_numpy(by_hand(samples.select(positions), COLOUR))
        torch.testing.assert_close(one, COLOUR.normalise(by_one), atol=1e-6, rtol=0)


def test_workers_share_a_large_batch_without_changing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = StreamedImages(samples_of(Watched()), COLOUR, CPU, workers=0)
    order = [np.array([6, 0, 3, 3, 1]), np.zeros(0, dtype=np.int64), np.array([5])]
    whole = list(streamed.plain(order))
    monkeypatch.setattr(batches, "DECODED_AT_ONCE", 2)
    parts = list(streamed.plain(order))
    assert [len(batch) for batch in parts] == [5, 0, 1]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_views_repeat_with_the_seed_and_differ_without(kind: str) -> None:
    samples = samples_of(Watched())
    images = resident(samples) if kind == "resident" else StreamedImages(samples, COLOUR, CPU, workers=0)
    order = in_order(7, 3)
    photo = for_kind("photo", 224)
    first, again, other = (torch.cat(list(images.views(order, photo, seed))) for seed in (1, 1, 2))
    assert first.shape == (7, 3, 8, 8)
    assert torch.equal(first, again)
    assert ((first - other).abs().amax((1, 2, 3)) > 1e-2).all()


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_equal_images_get_different_views_in_one_batch_and_in_the_next(kind: str) -> None:
    samples = samples_of(Watched()).select(np.zeros(6, dtype=np.int64))
    images = resident(samples) if kind == "resident" else StreamedImages(samples, COLOUR, CPU, workers=0)
    views = torch.cat(list(images.views(in_order(6, 3), for_kind("photo", 224), seed=0)))
    apart = (views[:, None] - views[None]).abs().amax((2, 3, 4)) > 1e-2
    assert (apart | torch.eye(6, dtype=torch.bool)).all()


def test_streamed_views_do_not_depend_on_the_number_of_workers() -> None:
    samples = samples_of(Watched())
    order = shuffled(7, 2, seed=3)
    alone, helped = (
        list(StreamedImages(samples, COLOUR, CPU, workers).views(order, for_kind("photo", 224), seed=5))
        for workers in (0, 2)
    )
    assert len(alone) == len(order)
    assert all(torch.equal(one, other) for one, other in zip(alone, helped, strict=True))


def test_a_streamed_view_is_its_box_of_the_full_image_and_maybe_mirrored() -> None:
    samples = samples_of(Watched())
    colourless = Augmentation((0.2, 0.8), flip=True)
    (views,) = StreamedImages(samples, COLOUR, CPU, workers=0).views(in_order(7, 7), colourless, seed=4)
    boxes = augment.crop_boxes(7, colourless.area, torch.Generator().manual_seed(4)).tolist()
    flips = []
    for position, (view, box) in enumerate(zip(views, boxes, strict=True)):
        straight = COLOUR.normalise(COLOUR.prepare(samples.read(position), box)[None])[0]
        options = [torch.allclose(view, option, atol=1e-4) for option in (straight, straight.flip(2))]
        assert any(options)
        flips.append(options[1])
    assert set(flips) == {False, True}


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_a_padded_view_is_made_of_pixels_of_the_plain_image(kind: str) -> None:
    samples = samples_of(Watched())
    images = resident(samples) if kind == "resident" else StreamedImages(samples, COLOUR, CPU, workers=0)
    (views,) = images.views(in_order(7, 7), Augmentation((1.0, 1.0), flip=True, pad=1), seed=4)
    (plain,) = images.plain(in_order(7, 7))
    size = plain.shape[2]
    moved = 0
    framed = COLOUR.normalise(torch.zeros(1, 3, size + 2, size + 2)).repeat(7, 1, 1, 1)  # black
    framed[:, :, 1:-1, 1:-1] = plain
    for view, picture in zip(views, framed, strict=True):
        parts = [picture[:, top : top + size, left : left + size] for top in range(3) for left in range(3)]
        assert any(torch.allclose(view, each, atol=1e-5) for part in parts for each in (part, part.flip(2)))
        moved += not torch.allclose(view, parts[4], atol=1e-5)
    assert moved


def test_a_resident_view_without_freedom_is_the_plain_image() -> None:
    images = resident(samples_of(Watched()))
    barely = Augmentation((2.0, 2.0), flip=False)  # twice the picture, which every box is clamped to
    (view,), (plain,) = images.views(in_order(7, 7), barely, seed=0), images.plain(in_order(7, 7))
    torch.testing.assert_close(view, plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_grey_images_have_views_too(kind: str) -> None:
    samples = samples_of(Watched())
    images = resident(samples, GREY) if kind == "resident" else StreamedImages(samples, GREY, CPU, workers=0)
    views = torch.cat(list(images.views(in_order(7, 4), for_kind("glyph", 4), seed=0)))
    assert views.shape == (7, 1, 4, 4)
    assert views.abs().max() <= 1  # 0 … 1, less 0.5, over 0.5


def test_small_inputs_stay_in_memory_and_large_ones_are_streamed(tmp_path: Path) -> None:
    samples = samples_of(Watched(2))

    def sized(size: int) -> Preprocessing:
        return Preprocessing(size, 1, (0.5,), (0.5,))

    small = open_images(samples, sized(128), CPU, cache=tmp_path)
    assert isinstance(small, ResidentImages)
    assert len(list(tmp_path.rglob("*.npy"))) == 1
    large = open_images(samples, sized(129), CPU, cache=tmp_path)
    assert isinstance(large, StreamedImages)
    assert large.workers == batches.cores() >= 1
    assert len(list(tmp_path.rglob("*.npy"))) == 1
    for images, size in ((small, 128), (large, 129)):
        assert [batch.shape for batch in images.plain(in_order(2, 1))] == [(1, 1, size, size)] * 2


def test_a_gallery_gives_each_table_its_own_images() -> None:
    tables = [samples_of(Watched(9, seed=1)), samples_of(Watched(5, seed=2))]
    first = tables[0].select(np.array([7, 2, 2, 4]))
    mixed = concatenate([tables[1].select(np.array([3, 0])), tables[0].select(np.array([4, 8, 7]))])
    mixed = mixed.select(np.array([4, 0, 2, 1, 3]))  # sources alternate
    gallery = Gallery(COLOUR, CPU)
    for table in (first, mixed, tables[0]):
        held = gallery.images(table)
        assert isinstance(held, ResidentImages)
        assert np.array_equal(held.pixels.numpy(), by_hand(table, COLOUR))


def test_a_gallery_decodes_each_image_once() -> None:
    sources = [Watched(9, seed=1), Watched(5, seed=2)]
    tables = [samples_of(pixels) for pixels in sources]
    gallery = Gallery(COLOUR, CPU)
    gallery.images(tables[0].select(np.array([7, 2])))
    assert [pixels.reads for pixels in sources] == [2, 0]
    for table in (concatenate(tables), tables[0], tables[1]):
        gallery.images(table)
    assert [pixels.reads for pixels in sources] == [9, 5]


def test_decoded_images_beyond_the_memory_limit_are_the_same_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path))
    pixels = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), dtype=np.uint8)
    samples = Samples.build(ArrayPixels(pixels), ["a"] * 9, [str(n) for n in range(9)])
    in_memory, on_disk = (decoded(samples, COLOUR, None, limit) for limit in (10**6, 100))
    assert isinstance(on_disk, np.memmap)
    assert not isinstance(in_memory, np.memmap)
    assert np.array_equal(in_memory, on_disk)
    assert not list(tmp_path.iterdir())
