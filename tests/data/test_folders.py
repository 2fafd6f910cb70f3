"""Folders as people have them: every flaw is reported, no good image is lost, every format gives the right pixels."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import unicodedata
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from branchout.data.decode import Kind, UnreadableImage, decode, measure
from branchout.data.folders import FilePixels, Problem, Problems, scan
from branchout.data.samples import concatenate
from branchout.errors import BranchoutError


def picture(seed: int = 0, height: int = 24, width: int = 32) -> Image.Image:
    """Smooth and different for every seed."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x * 7 + seed, y * 9 + 3 * seed, x * 3 + y * 4], axis=-1).astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def jpeg(seed: int = 0) -> bytes:
    return encoded(picture(seed), "JPEG", quality=95)


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises any size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def kinds(problems: Problems) -> dict[str, set[Kind]]:
    found: dict[str, set[Kind]] = {}
    for problem in problems:
        found.setdefault(problem.path, set()).add(problem.kind)
    return found


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """Seven usable images among one of everything that goes wrong."""
    root = tmp_path / "photos"
    put(root / "cat/good.jpg", jpeg(1))
    put(root / "cat/deep/er/good.png", encoded(picture(2), "PNG"))
    put(root / "cat/no extension", encoded(picture(3), "WEBP"))
    put(root / "dog/really a png.jpg", encoded(picture(4), "PNG"))
    put(root / "dog/note.txt.gif", encoded(picture(5), "GIF"))
    put(root / "Dog/good.bmp", encoded(picture(6), "BMP"))
    put(root / "cat/truncated.jpg", jpeg(7)[:-200])
    put(root / "cat/truncated.webp", encoded(picture(7), "WEBP")[:-20])
    put(root / "cat/corrupt.png", encoded(picture(8), "PNG").replace(b"IDAT", b"IDAT" + b"junk" * 4, 1))
    put(root / "cat/zero.jpg", b"")
    put(root / "cat/page.jpg", b"<html>404 not found</html>")
    put(root / "cat/BMW.bin", b"BMW is a maker of cars, not of bitmaps")
    put(root / "cat/phone.heic", b"\0\0\0\x18ftypheic" + bytes(40))
    put(root / "cat/notes.txt", b"remember the milk")
    put(root / "cat/empty.csv", b"")
    put(root / "cat/Thumbs.db", b"\xd0\xcf\x11\xe0")
    put(root / "cat/.DS_Store", b"Bud1")
    put(root / "cat/__MACOSX/a.jpg", jpeg(9))
    put(root / ".cache/a.jpg", jpeg(9))
    put(root / "cat/bomb.png", png_claiming(60_000, 60_000))
    put(root / "cat/twin.jpg", jpeg(1))
    put(root / "dog/cat.jpg", jpeg(1))
    put(root / "stray.jpg", jpeg(10))
    put(root / "README.md", b"# photos")
    (root / "cat/gone.jpg").symlink_to(root / "nowhere.jpg")
    (root / "cat/itself.jpg").symlink_to("itself.jpg")
    (root / "cat/around").symlink_to(root / "cat", target_is_directory=True)
    (root / "up").symlink_to(root.parent, target_is_directory=True)
    os.mkfifo(root / "cat/pipe.jpg")
    return root


def test_every_flaw_is_reported_and_no_good_image_is_lost(messy: Path) -> None:
    samples, problems = scan(messy)
    assert {name: set(samples.of_classes([name]).ids) for name in samples.classes} == {
        "cat": {"cat/good.jpg", "cat/deep/er/good.png", "cat/no extension"},
        "dog": {"dog/really a png.jpg", "dog/note.txt.gif", "dog/cat.jpg"},
        "Dog": {"Dog/good.bmp"},
    }
    assert len(samples) == 7
    assert kinds(problems) == {
        "cat/truncated.jpg": {Kind.TRUNCATED},
        "cat/truncated.webp": {Kind.TRUNCATED},
        "cat/corrupt.png": {Kind.CORRUPT},
        "cat/zero.jpg": {Kind.EMPTY},
        "cat/page.jpg": {Kind.NOT_AN_IMAGE},
        "cat/BMW.bin": {Kind.NOT_AN_IMAGE},
        "cat/pipe.jpg": {Kind.NOT_AN_IMAGE},
        "cat/phone.heic": {Kind.UNSUPPORTED},
        "cat/notes.txt": {Kind.COMPANION},
        "cat/empty.csv": {Kind.COMPANION},
        "cat/Thumbs.db": {Kind.COMPANION},
        "README.md": {Kind.COMPANION},
        "cat/.DS_Store": {Kind.HIDDEN},
        "cat/__MACOSX": {Kind.HIDDEN},
        ".cache": {Kind.HIDDEN},
        "cat/bomb.png": {Kind.TOO_LARGE},
        "cat/twin.jpg": {Kind.DUPLICATE},
        "dog/cat.jpg": {Kind.CONFLICT},
        "stray.jpg": {Kind.STRAY},
        "cat/gone.jpg": {Kind.DANGLING},
        "cat/itself.jpg": {Kind.LOOP},
        "cat/around": {Kind.LOOP},
        "up": {Kind.LOOP},
        "Dog": {Kind.CASE},
    }
    assert problems.conflicts == [Problem(Kind.CONFLICT, "dog/cat.jpg", "same as cat/good.jpg")]
    assert problems.of(Kind.DUPLICATE)[0].detail == "same as cat/good.jpg"
    assert problems.of(Kind.CASE)[0].detail == "also dog"
    for index in range(len(samples)):
        assert samples.read(index).shape == (24, 32, 3)


def test_summary_counts_each_kind_and_names_a_few(messy: Path) -> None:
    lines = scan(messy)[1].summary(examples=1)
    assert any(line.startswith("2 truncated: cat/truncated.jpg (") and line.endswith(", …") for line in lines)
    assert "3 hidden" in lines
    assert f"4 {Kind.COMPANION}" in lines
    assert not Problems().summary()


def test_scanning_twice_gives_the_same_table(messy: Path) -> None:
    one, two = scan(messy)[0], scan(messy)[0]
    assert one.ids.tolist() == two.ids.tolist()
    assert one.fingerprint() == two.fingerprint()
    names = one.names.tolist()
    assert names == sorted(names)


def test_listing_goes_by_extension_and_decodes_nothing(messy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchout.data.folders.measure", lambda *_, **__: pytest.fail("decoded"))
    samples, _ = scan(messy, verify=False)
    assert "cat/truncated.jpg" in samples.ids
    assert "cat/no extension" not in samples.ids
    assert samples.pixels.shape is None
    assert samples.pixels.sizes is None  # type: ignore[attr-defined]


# The pixels' source.


def test_file_pixels_know_sizes_survive_pickling_and_notice_change(tmp_path: Path) -> None:
    put(tmp_path / "a/1.png", encoded(picture(1), "PNG"))
    put(tmp_path / "b/2.png", encoded(picture(2), "PNG"))
    samples, problems = scan(tmp_path)
    assert not problems
    pixels = pickle.loads(pickle.dumps(samples.pixels))
    assert isinstance(pixels, FilePixels)
    assert pixels.shape == (24, 32, 3)
    assert pixels.sizes is not None
    assert pixels.sizes.tolist() == [[24, 32], [24, 32]]
    assert (pixels.read(1) == np.asarray(picture(2))).all()
    before = pixels.fingerprint(np.array([0])), pixels.fingerprint(np.array([1]))
    os.utime(tmp_path / "b/2.png", ns=(1, 1))
    assert pixels.fingerprint(np.array([0])) == before[0] != before[1] != pixels.fingerprint(np.array([1]))
    put(tmp_path / "b/3.png", encoded(picture(3, height=25), "PNG"))
    assert scan(tmp_path)[0].pixels.shape is None


def test_a_portable_fingerprint_is_that_of_every_copy(tmp_path: Path) -> None:
    put(tmp_path / "here/a/1.png", encoded(picture(1), "PNG"))
    put(tmp_path / "here/b/2.png", encoded(picture(2), "PNG"))
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copyfile)
    here, there = scan(tmp_path / "here")[0], scan(tmp_path / "there")[0]
    assert here.fingerprint() != there.fingerprint()
    assert here.fingerprint(portable=True) == there.fingerprint(portable=True)
    assert here.fingerprint(portable=True) != here.select(np.array([1, 0])).fingerprint(portable=True)
    joined = [concatenate([samples, samples]).fingerprint(portable=True) for samples in (here, there)]
    assert joined[0] == joined[1]
    put(tmp_path / "there/b/2.png", encoded(picture(2, height=40), "PNG"))
    assert here.fingerprint(portable=True) != there.fingerprint(portable=True)


def test_a_file_that_breaks_after_the_scan_is_named(tmp_path: Path) -> None:
    path = put(tmp_path / "a/1.jpg", jpeg())
    samples, _ = scan(tmp_path)
    path.write_bytes(jpeg()[:300])
    with pytest.raises(UnreadableImage, match=r"a/1\.jpg: truncated"):
        samples.read(0)


def test_progress_ends_at_the_number_of_files(messy: Path) -> None:
    told: list[tuple[int, int]] = []
    scan(messy, progress=lambda done, total: told.append((done, total)))
    assert told
    assert told[-1][0] == told[-1][1] > 6


# Links, permissions and names.


def test_a_linked_class_folder_works(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere/1.jpg", jpeg())
    put(tmp_path / "root/dog/2.jpg", jpeg(2))
    (tmp_path / "root/cat").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    samples, problems = scan(tmp_path / "root")
    assert samples.ids.tolist() == ["cat/1.jpg", "dog/2.jpg"]
    assert not problems


def test_two_folders_that_link_to_each_other_end(tmp_path: Path) -> None:
    put(tmp_path / "a/1.jpg", jpeg(1))
    put(tmp_path / "b/2.jpg", jpeg(2))
    (tmp_path / "a/to b").symlink_to(tmp_path / "b", target_is_directory=True)
    (tmp_path / "b/to a").symlink_to(tmp_path / "a", target_is_directory=True)
    samples, problems = scan(tmp_path)
    assert set(samples.ids) == {"a/1.jpg", "a/to b/2.jpg", "b/2.jpg", "b/to a/1.jpg"}
    assert len(problems.of(Kind.LOOP)) == 2
    assert len(problems.conflicts) == 2


def test_what_may_not_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good.jpg", "locked.jpg", "closed/1.jpg"):
        put(tmp_path / "cat" / name, jpeg(len(name)))
    scandir, path_open = os.scandir, Path.open

    def guarded_scandir(path: Path) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    def guarded_open(self: Path, *arguments: object, **options: object) -> object:
        if self.name == "locked.jpg":
            raise PermissionError(13, "Permission denied")
        return path_open(self, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", guarded_scandir)
    monkeypatch.setattr(Path, "open", guarded_open)
    samples, problems = scan(tmp_path)
    assert samples.ids.tolist() == ["cat/good.jpg"]
    assert kinds(problems) == {"cat/closed": {Kind.UNREADABLE}, "cat/locked.jpg": {Kind.UNREADABLE}}
    assert {problem.detail for problem in problems} == {"Permission denied"}


def test_two_unicode_forms_of_one_name_are_one_class(tmp_path: Path) -> None:
    composed, decomposed = "café", unicodedata.normalize("NFD", "café")
    put(tmp_path / composed / "1.jpg", jpeg(1))
    put(tmp_path / decomposed / "1.jpg", jpeg(2))
    put(tmp_path / decomposed / "2.jpg", jpeg(3))
    samples, problems = scan(tmp_path)
    assert samples.classes == (composed,)
    assert len(set(samples.ids)) == 3
    (merged,) = problems.of(Kind.MERGED)
    assert "'caf\\xe9'" in merged.detail
    assert "'cafe\\u0301'" in merged.detail


def test_a_name_that_is_not_unicode_can_be_saved(tmp_path: Path) -> None:
    put(tmp_path / os.fsdecode(b"caf\xe9") / "1.jpg", jpeg())
    samples, _ = scan(tmp_path)
    assert samples.classes == ("caf\\xe9",)
    assert str(samples.ids[0]).encode() == b"caf\\xe9/1.jpg"
    assert samples.read(0).shape == (24, 32, 3)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("aAéÉåsßSıI\u0301\u030aﬁ", min_size=1, max_size=3), min_size=1, max_size=6, unique=True))
def test_names_merge_by_unicode_form_only(tmp_path_factory: pytest.TempPathFactory, folders: list[str]) -> None:
    root = tmp_path_factory.mktemp("names")
    for number, folder in enumerate(folders):
        put(root / folder / "1.jpg", jpeg(number))
    samples, problems = scan(root)
    composed = [unicodedata.normalize("NFC", folder) for folder in folders]
    assert samples.counts() == {name: composed.count(name) for name in sorted(set(composed))}
    assert {p.path for p in problems.of(Kind.MERGED)} == {name for name in composed if composed.count(name) > 1}
    folded = [unicodedata.normalize("NFC", name.casefold()) for name in sorted(set(composed))]
    assert len(problems.of(Kind.CASE)) == len({name for name in folded if folded.count(name) > 1})
    assert len(set(samples.ids)) == len(folders)


# When nothing can be made of it.


def test_classes_without_an_image_are_named_with_the_reasons(tmp_path: Path) -> None:
    put(tmp_path / "cat/1.jpg", jpeg())
    put(tmp_path / "dog/1.jpg", jpeg()[:-100])
    put(tmp_path / "dog/2.jpg", jpeg(2)[:-100])
    put(tmp_path / "dog/3.jpg", b"")
    (tmp_path / "emu").mkdir()
    with pytest.raises(BranchoutError) as caught:
        scan(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"classes without a usable image in {tmp_path}: 2\n")
    assert "dog: 1 empty file, 2 truncated" in message
    assert "emu: no files in it" in message
    assert "cat:" not in message


def test_only_ten_of_many_empty_classes_are_named(tmp_path: Path) -> None:
    for number in range(13):
        (tmp_path / f"class{number:02d}").mkdir()
    with pytest.raises(BranchoutError, match=r"(?s)usable image in .*: 13\n.*class09.*and 3 more") as caught:
        scan(tmp_path, verify=False)
    assert "class10" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda root: root.mkdir(), "none in it"),
        (lambda root: put(root / "1.jpg", jpeg()), "images directly in it: 1, such as 1.jpg"),
        (lambda root: put(root, b"PK"), "it is a file"),
        (lambda root: put(root.with_name("photoes") / "cat/1.jpg", jpeg()), "did you mean .*photoes"),
        (lambda root: None, "there is no such folder"),
        (
            lambda root: [put(root / split / "cat/1.jpg", jpeg()) for split in ("test", "train", "val")],
            "did you mean .*photos/train",
        ),
    ],
)
def test_another_layout_is_answered_with_the_one_expected(tmp_path: Path, make: object, expected: str) -> None:
    make(tmp_path / "photos")  # type: ignore[operator]
    with pytest.raises(BranchoutError, match=expected) as caught:
        scan(tmp_path / "photos")
    assert "photos/\n    robin/\n      one.jpg" in str(caught.value)
    assert "    thrush/\n" in str(caught.value)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    put(tmp_path / "train/steam/1.jpg", jpeg(1))
    put(tmp_path / "bus/1.jpg", jpeg(2))
    assert scan(tmp_path)[0].classes == ("bus", "train")


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
        assert measure(source) == pixels.shape
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
def test_pictures_are_turned_upright(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(), format, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert (decode(data) == expected).all()
    assert measure(data) == expected.shape
    assert expected.shape[:2] == ((32, 24) if orientation > 4 else (24, 32))


def test_broken_exif_does_not_lose_the_picture() -> None:
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
    assert measure(data) == (400, 600, 3)


def test_shrinking_leaves_other_formats_alone() -> None:
    assert decode(encoded(picture(), "PNG"), shrink=4).shape == (24, 32, 3)


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
        decode(data, max_pixels=24 * 32 - 1, shrink=1)
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
