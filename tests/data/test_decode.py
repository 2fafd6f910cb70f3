"""Decoding: every format gives the right pixels, every broken file a reason."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from branchout.data.decode import Kind, UnreadableImage, decode, looks_like_image, measure
from tests.data.hostile import encoded, images, jpeg, large_png, picture, png, png_claiming, put

# Decoding: the right pixels from every format.


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "GIF", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_formats_without_loss_give_the_pixels_back(format: str, mode: str, tmp_path: Path) -> None:
    image = picture().convert(mode)
    if format == "GIF" and mode == "RGB":
        image = image.quantize(64).convert("RGB")
    data = encoded(image, format, **({"lossless": True} if format == "WEBP" else {}))
    expected = np.asarray(image.convert("RGB"))
    for source in (data, put(tmp_path / "x", data), str(tmp_path / "x"), io.BytesIO(data)):
        pixels = decode(source)
        assert pixels.dtype == np.uint8
        assert pixels.shape[2] in (1, 3)
        assert (pixels == expected).all()
        assert measure(source)[0] == pixels.shape
    if mode != "RGB" and format in {"PNG", "TIFF"}:
        assert pixels.shape == (24, 32, 1)


def test_jpeg_is_close_and_grey_stays_grey() -> None:
    assert np.abs(decode(jpeg()).astype(int) - np.asarray(picture())).mean() < 4
    assert decode(encoded(picture().convert("L"), "JPEG")).shape == (24, 32, 1)


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for format in ("GIF", "WEBP", "TIFF"):
        options = {"lossless": True} if format == "WEBP" else {}
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert decode(data)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(format: str) -> None:
    ramp = np.linspace(0, 65_535, 256 * 4).astype(np.uint16).reshape(4, 256)
    pixels = decode(encoded(Image.fromarray(ramp), format))
    assert pixels.shape == (4, 256, 1)
    assert (pixels[:, :, 0] == np.rint(ramp / 257)).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 0.5, 1]], dtype=np.float32), [0, 128, 255]),
        (np.array([[-10, 0, 10]], dtype=np.float32), [0, 128, 255]),
        (np.array([[0, np.nan, 1]], dtype=np.float32), [0, 0, 255]),
        (np.array([[0, 65_535, 257]], dtype=np.int32), [0, 255, 1]),
        (np.array([[0, 1_000_000, 500_000]], dtype=np.int32), [0, 255, 128]),
    ],
)
def test_fractions_and_long_integers_fill_the_range(values: np.ndarray, expected: list[int]) -> None:
    assert decode(encoded(Image.fromarray(values), "TIFF"))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_cmyk_becomes_rgb(format: str) -> None:
    inks = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # red
    assert np.abs(decode(encoded(inks, format)).astype(int) - [255, 0, 0]).max() <= 2


def test_transparency_is_laid_over_white() -> None:
    half = Image.new("RGBA", (2, 1))
    half.putdata([(255, 0, 0, 128), (0, 0, 0, 0)])
    for format in ("PNG", "TIFF"):
        assert decode(encoded(half, format))[0].tolist() == [[255, 127, 127], [255, 255, 255]]
    grey = Image.new("LA", (1, 1), (0, 51))
    assert decode(encoded(grey, "PNG")).tolist() == [[[204]]]


def test_palettes_with_transparency() -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    image.putdata([0, 1, 2])
    assert decode(encoded(image, "PNG"))[0].tolist() == [[10, 20, 30], [40, 50, 60], [70, 80, 90]]
    for format in ("PNG", "GIF"):
        pixels = decode(encoded(image, format, transparency=1))
        assert pixels[0].tolist() == [[10, 20, 30], [255, 255, 255], [70, 80, 90]]
    several = decode(encoded(image, "PNG", transparency=bytes([255, 0, 51])))
    assert several[0].tolist() == [[10, 20, 30], [255, 255, 255], [218, 220, 222]]


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(), format, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert (decode(data) == expected).all()
    assert measure(data)[0] == expected.shape
    assert expected.shape[:2] == ((32, 24) if orientation > 4 else (24, 32))


def test_broken_exif_does_not_lose_the_image() -> None:
    data = encoded(picture(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\0\x01")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert decode(data).shape == (24, 32, 3)


@pytest.mark.parametrize("shrink", [1, 50, 100, 199, 200, 300, 1000])
def test_a_shrunk_jpeg_is_never_below_the_size_asked(shrink: int) -> None:
    data = encoded(picture(height=400, width=600), "JPEG")
    height, width, _ = decode(data, shrink=shrink).shape
    assert min(height, width) >= min(shrink, 400)
    assert height < 2 * max(shrink, 50) or height == 400
    assert measure(data)[0] == (400, 600, 3)
    assert decode(encoded(picture(), "PNG"), shrink=4).shape == (24, 32, 3)


def test_large_images_are_decoded_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    images = {
        "JPEG": picture(height=400, width=600),
        "PNG": picture(height=400, width=600).quantize(8),
        "WEBP": picture(height=400, width=600).convert("RGBA"),
        "TIFF": Image.fromarray(np.full((400, 600), 0x8000, dtype=np.uint16)),
        "BMP": picture(height=400, width=600).convert("1"),
    }
    whole = {format: decode(encoded(image, format)) for format, image in images.items()}
    monkeypatch.setattr("branchout.data.decode.LARGE", 60_000)
    for format, image in images.items():
        data = encoded(image, format, **({"exif": upside_down()} if format == "JPEG" else {}))
        pixels = decode(data)
        assert pixels.shape == (200, 300, whole[format].shape[2])
        assert measure(data)[0] == whole[format].shape
        expected = whole[format][::-1, ::-1] if format == "JPEG" else whole[format]
        assert abs(pixels.mean((0, 1)) - expected.mean((0, 1))).max() < 3
        assert abs(pixels[:100].mean((0, 1)) - expected[:200].mean((0, 1))).max() < 3


def upside_down() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 3
    return exif


# Decoding: what is refused.


@pytest.mark.parametrize("options", [{}, {"progressive": True}], ids=["baseline", "progressive"])
def test_a_jpeg_cut_anywhere_is_noticed(options: dict[str, bool]) -> None:
    data = encoded(picture(height=64, width=64), "JPEG", **options)
    for end in range(len(data) // 3, len(data) - 4, 7):
        for read in (decode, measure):
            with pytest.raises(UnreadableImage) as caught:
                read(data[:end])
            assert caught.value.kind in {Kind.TRUNCATED, Kind.CORRUPT}
    assert caught.value.kind == Kind.TRUNCATED


def test_bombs_are_refused_by_their_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "bomb.png", png_claiming(60_000, 60_000))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("decoded"))
    with pytest.raises(
        UnreadableImage, match=r"bomb\.png: too large \(60,000 × 60,000 pixels; the limit is 100 million"
    ):
        decode(path)


def test_the_pixel_limit_is_ours_alone() -> None:
    limit = Image.MAX_IMAGE_PIXELS
    data = encoded(picture(), "PNG")
    assert decode(data, max_pixels=24 * 32).shape == (24, 32, 3)
    with pytest.raises(UnreadableImage) as caught:
        decode(data, max_pixels=24 * 32 - 1)
    assert caught.value.kind == Kind.TOO_LARGE
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow would warn from 89 million on
        with pytest.raises(UnreadableImage) as caught:
            decode(png_claiming(9_900, 9_900))
    assert caught.value.kind != Kind.TOO_LARGE
    assert limit == Image.MAX_IMAGE_PIXELS


def test_the_reason_crosses_processes() -> None:
    with pytest.raises(UnreadableImage) as caught:
        decode(b"")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.kind, str(again)) == (Kind.EMPTY, str(caught.value))


def test_missing_files_and_folders_are_unreadable(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.jpg"):
        with pytest.raises(UnreadableImage) as caught:
            decode(path)
        assert caught.value.kind == Kind.UNREADABLE


SEEDS = [
    encoded(picture(), "JPEG"),
    encoded(picture(), "PNG"),
    encoded(picture(), "GIF"),
    encoded(picture(), "BMP"),
    encoded(picture(), "TIFF", compression="tiff_lzw"),
    encoded(picture(), "WEBP"),
    b"",
]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=8),
    st.floats(0.3, 1),
    st.binary(max_size=64),
)
def test_whatever_the_bytes_only_one_kind_of_error(
    seed: bytes, changes: list[tuple[float, int]], keep: float, tail: bytes
) -> None:
    data = bytearray(seed[: int(len(seed) * keep)])
    for place, value in changes:
        if data:
            data[int(place * len(data))] = value
    try:
        pixels = decode(bytes(data) + tail, max_pixels=1_000_000)
    except UnreadableImage as error:
        assert isinstance(error.kind, Kind)  # noqa: PT017
    else:
        assert pixels.dtype == np.uint8
        assert pixels.ndim == 3
        assert pixels.shape[2] in (1, 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "data", "kind"), [(name, *rest) for name, rest in images().items()])
def test_hostile_images(name: str, data: bytes, kind: Kind | None) -> None:
    for read in (decode, measure):
        if kind is None:
            read(data)
            continue
        with pytest.raises(UnreadableImage) as caught:
            read(data)
        assert caught.value.kind == kind


MEMORY = """
import sys
from pathlib import Path
from branchout.data.decode import decode, measure
for name in sys.argv[1:]:
    assert decode(name).size < 50_000_000
status = Path("/proc/self/status").read_text()
print(status.split("VmHWM:")[1].split()[0])
"""


def test_the_largest_images_take_less_than_a_gigabyte(tmp_path: Path) -> None:
    files = [
        put(tmp_path / "palette.png", large_png(33_000, 3_000)),
        put(tmp_path / "rgba.png", png(11_000, 9_000, bytes(11_000 * 4 + 1) * 9_000, colour=6)),
        put(tmp_path / "sixteen.png", png(11_000, 9_000, bytes(11_000 * 2 + 1) * 9_000, depth=16, colour=0)),
    ]
    found = subprocess.run([sys.executable, "-c", MEMORY, *files], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 700_000  # kB; an RGBA image of 99 megapixels alone takes 400,000


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    for path in (tmp_path / "pipe.jpg", Path("/dev/zero")):
        assert not looks_like_image(path)
        with pytest.raises(UnreadableImage, match="not a regular file"):
            decode(path)
