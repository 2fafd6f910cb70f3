"""Random views against slow versions that take one pixel, one picture and one step at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchout.data.augment import Augmentation, crop, crop_boxes, cut, for_kind, mirrors, mix, recolour, shift
from branchout.data.images import ResidentImages
from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError

LUMINANCE = torch.tensor([0.299, 0.587, 0.114])
NOTHING = Augmentation((1.0, 1.0), False)
FULL = torch.tensor([[0.0, 0.0, 1.0, 1.0]])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, channels: int = 3, size: int = 12, seed: int = 0) -> Tensor:
    return torch.rand(count, channels, size, size, generator=seeded(seed))


def pastel(count: int, size: int = 6) -> Tensor:
    """Colours near the middle grey, which a moderate jitter does not clip."""
    return 0.45 + 0.1 * pictures(count, size=size)


def luminance(images: Tensor) -> Tensor:
    return (images * LUMINANCE.view(-1, 1, 1)).sum(1)


# Cropping.


def slow_crop(picture: np.ndarray, box: tuple[float, float, float, float], mirrored: bool) -> np.ndarray:
    """Every pixel looked up where it comes from, between its four neighbours; beyond the border is the border."""
    _, height, width = picture.shape
    left, top, share_x, share_y = box
    out = np.empty_like(picture)
    for row in range(height):
        for column in range(width):
            y = (top + (row + 0.5) / height * share_y) * height - 0.5
            x = (left + (column + 0.5) / width * share_x) * width - 0.5
            y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
            above, before = math.floor(y), math.floor(x)
            below, after = min(above + 1, height - 1), min(before + 1, width - 1)
            down, right = y - above, x - before
            upper = picture[:, above, before] * (1 - right) + picture[:, above, after] * right
            lower = picture[:, below, before] * (1 - right) + picture[:, below, after] * right
            out[:, row, width - 1 - column if mirrored else column] = upper * (1 - down) + lower * down
    return out


@st.composite
def boxes_inside(draw: st.DrawFn) -> tuple[float, float, float, float]:
    width, height = draw(st.floats(0.1, 1)), draw(st.floats(0.1, 1))
    return draw(st.floats(0, 1)) * (1 - width), draw(st.floats(0, 1)) * (1 - height), width, height


@settings(max_examples=25)
@given(st.lists(st.tuples(boxes_inside(), st.booleans()), min_size=1, max_size=3), st.sampled_from([(7, 9), (8, 5)]))
def test_each_image_is_cut_to_its_own_box(
    asked: list[tuple[tuple[float, float, float, float], bool]], shape: tuple[int, int]
) -> None:
    images = torch.rand(len(asked), 3, *shape, generator=seeded(1))
    boxes, mirrored = torch.tensor([box for box, _ in asked]), torch.tensor([flip for _, flip in asked])
    found = crop(images, boxes, mirrored)
    for image, view, (box, flip) in zip(images, found, asked, strict=True):
        np.testing.assert_allclose(view.numpy(), slow_crop(image.numpy(), box, flip), atol=2e-5)


@pytest.mark.parametrize(("left", "top", "width", "height"), [(4, 4, 8, 8), (2, 6, 4, 8), (6, 1, 8, 4), (3, 5, 12, 7)])
def test_a_box_of_whole_pixels_is_a_slice_scaled_up(left: int, top: int, width: int, height: int) -> None:
    size = 16
    images = pictures(2, size=size)
    box = torch.tensor([left, top, width, height]) / size
    found = crop(images, box.expand(2, 4), torch.tensor([False, False]))
    part = images[:, :, top : top + height, left : left + width]
    expected = F.interpolate(part, (size, size), mode="bilinear", align_corners=False)

    def within(length: int) -> slice:
        """Where torch does not need to look beyond the edge of the slice, as the crop may."""
        source = (np.arange(size) + 0.5) * length / size - 0.5
        inside = np.flatnonzero((source >= 0) & (source <= length - 1))
        return slice(int(inside[0]), int(inside[-1]) + 1)

    rows, columns = within(height), within(width)
    assert rows.stop - rows.start >= size // 2
    torch.testing.assert_close(found[:, :, rows, columns], expected[:, :, rows, columns], atol=1e-5, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_full_box_is_the_image_itself(channels: int) -> None:
    images = pictures(3, channels)
    torch.testing.assert_close(
        crop(images, FULL.expand(3, 4), torch.zeros(3, dtype=torch.bool)), images, atol=1e-5, rtol=0
    )


def test_mirrored_is_flipped_left_to_right_for_those_asked_only() -> None:
    images = pictures(4)
    asked = torch.tensor([True, False, True, False])
    boxes = crop_boxes(4, (0.2, 0.9), seeded(3))
    straight = crop(images, boxes, torch.zeros(4, dtype=torch.bool))
    found = crop(images, boxes, asked)
    torch.testing.assert_close(found[asked], straight[asked].flip(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(found[~asked], straight[~asked], atol=0, rtol=0)
    full = crop(images, FULL.expand(4, 4), torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(full, images.flip(3), atol=1e-5, rtol=0)


@given(st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 1000))
def test_boxes_lie_in_the_image_with_the_area_and_ratio_asked_for(one: float, other: float, seed: int) -> None:
    least, most = sorted((one, other))
    boxes = crop_boxes(200, (least, most), seeded(seed)).double()
    left, top, width, height = boxes.unbind(1)
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (left + width <= 1 + 1e-6).all()
    assert (top + height <= 1 + 1e-6).all()
    area = width * height
    free = (width < 1) & (height < 1)
    assert (area <= most + 1e-6).all()
    assert (area[free] >= least - 1e-6).all()
    ratio = width[free] / height[free]
    assert ((ratio >= 3 / 4 - 1e-5) & (ratio <= 4 / 3 + 1e-5)).all()
    assert most > 0.7 or free.all()  # sqrt(0.7 · 4/3) < 1: small areas are never clamped


def test_boxes_reach_both_ends_of_every_range() -> None:
    left, top, width, height = crop_boxes(20_000, (0.1, 0.5), seeded()).unbind(1)
    area, ratio = width * height, width / height
    for values, low, high in (
        (area, 0.1, 0.5),
        (ratio.log(), math.log(3 / 4), math.log(4 / 3)),
        (left / (1 - width), 0.0, 1.0),
        (top / (1 - height), 0.0, 1.0),
    ):
        shares = torch.histc((values - low) / (high - low), bins=4, min=0, max=1) / 20_000
        torch.testing.assert_close(shares, torch.full((4,), 0.25), atol=0.02, rtol=0)


# Shifting.


def slow_shift(picture: np.ndarray, left: int, top: int, pad: int, mirrored: bool) -> np.ndarray:
    """A slice of the padded picture; beyond its edges it is black."""
    padded = np.pad(picture, ((0, 0), (pad, pad), (pad, pad)))
    part = padded[:, top : top + picture.shape[1], left : left + picture.shape[2]]
    return part[:, :, ::-1] if mirrored else part


@settings(max_examples=25)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans()), min_size=1, max_size=4),
    st.sampled_from([(1, 7, 9), (3, 8, 5)]),
)
def test_each_padded_image_is_cut_at_its_own_place_and_no_pixel_is_mixed(
    pad: int, asked: list[tuple[int, int, bool]], shape: tuple[int, int, int]
) -> None:
    images = torch.rand(len(asked), *shape, generator=seeded(1))
    places = torch.tensor([(left % (2 * pad + 1), top % (2 * pad + 1)) for left, top, _ in asked])
    found = shift(images, places, pad, torch.tensor([flip for _, _, flip in asked]))
    for image, view, (left, top), (_, _, flip) in zip(images, found, places.tolist(), asked, strict=True):
        np.testing.assert_array_equal(view.numpy(), slow_shift(image.numpy(), left, top, pad, flip))


def test_padded_images_are_cut_everywhere_equally_often_and_half_are_mirrored() -> None:
    picture = torch.arange(81.0).view(1, 1, 9, 9)
    found = cut(picture.expand(9000, -1, -1, -1), Augmentation((1.0, 1.0), True, pad=1), seeded())
    views = {
        slow_shift(picture[0].numpy(), left, top, 1, flip).tobytes(): 0
        for left in range(3)
        for top in range(3)
        for flip in (False, True)
    }
    assert len(views) == 18
    for view in found:
        views[view.numpy().tobytes()] += 1  # any other view is an error
    assert min(views.values()) > 400
    assert sum(views.values()) == 9000


def test_without_padding_crops_are_scaled_as_ever() -> None:
    images, photo = pictures(5), for_kind("photo", 32)
    generator = seeded(2)
    boxes = crop_boxes(5, photo.area, generator)
    assert torch.equal(cut(images, photo, seeded(2)), crop(images, boxes, mirrors(5, photo, generator)))


# Colour.


def slow_recolour(picture: Tensor, light: float, contrast: float, saturation: float, turn: float) -> Tensor:
    """One picture, one step at a time, as the names of the steps say; clipped at the end."""
    picture = picture.double()
    weights = LUMINANCE.double().view(-1, 1, 1)

    def grey(p: Tensor) -> Tensor:
        return (p * weights).sum(0, keepdim=True) if len(p) == 3 else p

    picture = picture * light
    picture = contrast * picture + (1 - contrast) * grey(picture).mean()
    if len(picture) == 3:
        picture = saturation * picture + (1 - saturation) * grey(picture)
        red, green, blue = picture
        y = 0.299 * red + 0.587 * green + 0.114 * blue
        i = 0.595716 * red - 0.274453 * green - 0.321263 * blue
        q = 0.211456 * red - 0.522591 * green + 0.311135 * blue
        colour = torch.complex(i, q) * complex(math.cos(turn), math.sin(turn))
        i, q = colour.real, colour.imag
        picture = torch.stack(  # the inverse as it is printed in every table of colour spaces
            [y + 0.9563 * i + 0.6210 * q, y - 0.2721 * i - 0.6474 * q, y - 1.1070 * i + 1.7046 * q]
        )
    return picture.clamp(0, 1).float()


@given(
    st.tuples(st.floats(0, 0.9), st.floats(0, 0.9), st.floats(0, 0.9), st.floats(0, 0.5)),
    st.sampled_from([1, 3]),
    st.integers(0, 1000),
)
def test_the_jitter_is_its_steps_one_after_the_other(
    strengths: tuple[float, float, float, float], channels: int, seed: int
) -> None:
    images = pictures(3, channels, size=5, seed=seed)
    found = recolour(images, Augmentation((1, 1), False, *strengths), seeded(seed))
    draws = torch.rand(3, 4, generator=seeded(seed)) * 2 - 1
    for image, view, draw in zip(images, found, draws, strict=True):
        light, contrast, saturation, turn = (float(d) * s for d, s in zip(draw, strengths, strict=True))
        expected = slow_recolour(image, 1 + light, 1 + contrast, 1 + saturation, 2 * math.pi * turn)
        torch.testing.assert_close(view, expected, atol=2e-3, rtol=0)  # the printed inverse has four digits


@pytest.mark.parametrize("channels", [1, 3])
def test_strengths_of_zero_leave_a_image_as_it_is(channels: int) -> None:
    images = pictures(4, channels)
    before = images.clone()
    torch.testing.assert_close(recolour(images, NOTHING, seeded()), images, atol=1e-5, rtol=0)
    assert torch.equal(images, before)


@pytest.mark.parametrize("channels", [1, 3])
def test_brightness_alone_multiplies_and_clips(channels: int) -> None:
    images = pictures(300, channels, size=4)
    images[:, :, 0, 0] = 0.25  # never clipped: it tells by how much a picture was multiplied
    images[:, :, 3, 3] = 1.0
    found = recolour(images, Augmentation((1, 1), False, brightness=0.6), seeded())
    factors = found[:, :1, :1, :1] / 0.25
    assert 0.4 <= factors.min() < 0.5
    assert 1.5 < factors.max() <= 1.6
    assert (found == 1).any()
    torch.testing.assert_close(found, (images * factors).clamp(0, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_contrast_alone_keeps_the_mean_brightness_and_scales_what_departs_from_it(channels: int) -> None:
    images = 0.45 + 0.1 * pictures(50, channels)
    found = recolour(images, Augmentation((1, 1), False, contrast=0.5), seeded())
    grey = (lambda x: luminance(x)) if channels == 3 else (lambda x: x[:, 0])
    means = grey(images).mean((1, 2))
    torch.testing.assert_close(grey(found).mean((1, 2)), means, atol=1e-5, rtol=0)
    shift = means.view(-1, 1, 1, 1)
    factors = ((found - shift) / (images - shift)).flatten(1)
    away = ((images - shift).abs() > 0.02).flatten(1)
    for factor, clear in zip(factors, away, strict=True):
        torch.testing.assert_close(factor[clear], factor[clear].median().expand(int(clear.sum())), atol=1e-2, rtol=0)
        assert 0.5 <= factor[clear].median() <= 1.5


def test_saturation_at_nothing_is_grey_of_the_same_luminance() -> None:
    image = pictures(1)
    draw = torch.rand(1, 4, generator=seeded(5))[0, 2] * 2 - 1
    found = recolour(image, Augmentation((1, 1), False, saturation=float(-1 / draw)), seeded(5))  # 1 + s·draw = 0
    torch.testing.assert_close(found, luminance(image)[:, None].expand_as(image), atol=1e-5, rtol=0)


def test_saturation_moves_colours_to_or_from_their_grey() -> None:
    images = pastel(40)
    found = recolour(images, Augmentation((1, 1), False, saturation=0.8), seeded())
    torch.testing.assert_close(luminance(found), luminance(images), atol=1e-5, rtol=0)
    before, after = (x - luminance(x)[:, None] for x in (images, found))
    factors = (before * after).sum((1, 2, 3)) / (before * before).sum((1, 2, 3))
    assert factors.min() < 0.5
    assert factors.max() > 1.5
    torch.testing.assert_close(after, before * factors.view(-1, 1, 1, 1), atol=1e-5, rtol=0)


def test_a_turn_of_hue_moves_colours_but_neither_luminance_nor_greys() -> None:
    images = pastel(40)
    found = recolour(images, Augmentation((1, 1), False, hue=0.5), seeded())
    assert ((found > 0) & (found < 1)).all()  # nothing clips
    torch.testing.assert_close(luminance(found), luminance(images), atol=1e-5, rtol=0)
    moved = (found - images).abs().amax((1, 2, 3))
    assert (moved > 1e-3).float().mean() > 0.9
    grey = pictures(5, channels=1).expand(-1, 3, -1, -1)
    torch.testing.assert_close(
        recolour(grey, Augmentation((1, 1), False, hue=0.5), seeded()), grey.contiguous(), atol=1e-5, rtol=0
    )


def test_a_view_stays_between_black_and_white() -> None:
    found = recolour(pictures(20), Augmentation((1, 1), False, 0.9, 0.9, 0.9, 0.5), seeded())
    assert found.min() == 0
    assert found.max() == 1


# Randomness.


@pytest.mark.parametrize("channels", [1, 3])
def test_equal_images_in_a_batch_get_different_views(channels: int) -> None:
    twins = pictures(1, channels).expand(8, -1, -1, -1)
    photo = for_kind("photo", 32)
    views = [
        crop(twins, crop_boxes(8, photo.area, seeded()), torch.zeros(8, dtype=torch.bool)),
        recolour(twins, photo, seeded()),
    ]
    for found in views:
        apart = (found[:, None] - found[None]).abs().amax((2, 3, 4)) > 1e-3
        assert (apart | torch.eye(8, dtype=torch.bool)).all()


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    images, photo = pictures(5), for_kind("photo", 224)

    def drawn(seed: int) -> Tensor:
        generator = seeded(seed)
        boxes = crop_boxes(5, photo.area, generator)
        return recolour(crop(images, boxes, mirrors(5, photo, generator)), photo, generator)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.allclose(drawn(1), drawn(2), atol=1e-3)


def test_half_of_the_photographs_are_mirrored_and_no_glyph_is() -> None:
    assert abs(mirrors(10_000, for_kind("photo", 64), seeded()).float().mean() - 0.5) < 0.02
    assert not mirrors(10_000, for_kind("glyph", 32), seeded()).any()


# What each kind of picture bears.


def test_the_papers_augmentation_is_for_large_photographs_and_a_milder_one_for_small() -> None:
    assert for_kind("photo", 224) == Augmentation((0.08, 1.0), True, 0.4, 0.4, 0.4, 0.2)
    assert for_kind("photo", 97) == for_kind("photo", 224)
    small = for_kind("photo", 96)
    assert small == for_kind("photo", 32)
    assert small.flip
    assert small.area[0] > 0.08
    for field in ("brightness", "contrast", "saturation", "hue"):
        assert 0 < getattr(small, field) < getattr(for_kind("photo", 224), field)


@pytest.mark.parametrize("size", [32, 224])
def test_a_glyph_is_neither_mirrored_nor_discoloured(size: int) -> None:
    glyph = for_kind("glyph", size)
    assert not glyph.flip
    assert glyph.saturation == glyph.hue == 0
    assert glyph.area[0] >= 0.5
    images = pastel(30)
    found = recolour(images, glyph, seeded())
    assert not torch.allclose(found, images, atol=1e-2)  # light and contrast do change
    before, after = (x - luminance(x)[:, None] for x in (images, found))
    gain = (before * after).sum((1, 2, 3), keepdim=True) / (before * before).sum((1, 2, 3), keepdim=True)
    torch.testing.assert_close(after, gain * before, atol=1e-5, rtol=0)  # every colour keeps its hue
    greys = recolour(pictures(30, channels=1), glyph, seeded())
    assert greys.shape == (30, 1, 12, 12)


@pytest.mark.parametrize("few", [False, True])
def test_the_literatures_augmentation_has_a_name(few: bool) -> None:
    padded = for_kind("photo", 32, few=few, named="padded")
    assert padded == Augmentation((1.0, 1.0), True, brightness=63 / 255, pad=4)
    assert not for_kind("glyph", 32, few=few, named="padded").flip
    with pytest.raises(BranchoutError, match="no augmentation is called 'wild'; known are: padded"):
        for_kind("photo", 32, few=few, named="wild")


def test_an_unknown_kind_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(BranchoutError, match="'sketch'; known are: photo, glyph"):
        for_kind("sketch", 64)


# Mixing.


def test_views_are_mixed_with_others_as_sums_and_by_rectangles() -> None:
    count, size = 4000, 32
    values = torch.arange(count, dtype=torch.float64)
    images = values.view(-1, 1, 1, 1).expand(-1, 3, size, size)
    found = mix(images, replace(NOTHING, mixed=True), seeded())
    assert torch.equal(found, mix(images, replace(NOTHING, mixed=True), seeded()))
    assert torch.equal(found, found[:, :1].expand_as(found))  # all colours alike
    flat = found[:, 0].flatten(1)
    summed = flat.amax(1) == flat.amin(1)
    own = flat == values[:, None]
    by_rectangle = ~summed
    assert by_rectangle.float().mean() == pytest.approx(0.45, abs=0.03)  # half, less those that cover all or nothing
    for image in flat[by_rectangle][:200]:
        assert len(image.unique()) == 2
    taken = ~own.view(count, size, size)[by_rectangle]
    rows, columns = taken.any(2).sum(1), taken.any(1).sum(1)
    assert torch.equal(rows * columns, taken.sum((1, 2)))  # a rectangle
    assert taken.double().mean().item() == pytest.approx(0.5, abs=0.03)
    assert (flat.mean(1) - values).mean().abs() < 20  # partners are drawn from all of them
    assert (flat.mean(1) - values).abs().mean() > count / 10


def test_without_mixing_views_stay_as_they_are() -> None:
    images = torch.rand(5, 3, 4, 4)
    assert mix(images, NOTHING, seeded()) is images


def test_training_views_are_mixed_where_asked() -> None:
    pixels = torch.zeros(64, 3, 8, 8, dtype=torch.uint8)
    pixels[32:] = 255
    how = Preprocessing(8, 3, (0.0,) * 3, (1.0,) * 3)
    images = ResidentImages(pixels, how, torch.device("cpu"))
    order = [np.arange(64)]
    (plain,), (mixed,) = (list(images.views(order, replace(NOTHING, mixed=each), 0)) for each in (False, True))
    assert set(plain.unique().tolist()) == {0.0, 1.0}
    assert len(mixed.unique()) > 10
