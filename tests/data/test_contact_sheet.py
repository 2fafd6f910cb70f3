"""The contact sheet, read back from its file: size, pictures in their places, names that fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from branchout.data.contact_sheet import contact_sheet
from branchout.data.samples import ArrayPixels, Samples
from branchout.errors import BranchoutError

WHITE = (255, 255, 255)


def hue(number: int) -> tuple[int, int, int]:
    return 40 + 20 * number, 200 - 15 * number, 90


def plain_colours(counts: dict[str, int], height: int = 6, width: int = 6) -> Samples:
    """Class number n, in order of name, is all of hue(n)."""
    names = [name for name in sorted(counts) for _ in range(counts[name])]
    colours = [hue(n) for n, name in enumerate(sorted(counts)) for _ in range(counts[name])]
    images = np.broadcast_to(np.array(colours, dtype=np.uint8)[:, None, None], (len(names), height, width, 3))
    return Samples.build(ArrayPixels(images.copy()), names, [str(i) for i in range(len(names))])


def drawn(path: Path) -> np.ndarray:
    with Image.open(path) as sheet:
        assert sheet.mode == "RGB"
        return np.asarray(sheet)


def cell(row: int, column: int, place: int, each: int = 5) -> tuple[slice, slice]:
    """Where a picture is: 64 pixels wide, 4 apart, 20 below the top of its name, 8 in from the edge."""
    top = 8 + row * (20 + 64 + 12) + 20
    left = 8 + column * (each * 68 + 16) + place * 68
    return slice(top, top + 64), slice(left, left + 64)


@pytest.mark.parametrize(
    ("classes", "each", "width", "height"),
    [(1, 5, 356 + 8, 96 + 8), (3, 5, 3 * 356 + 8, 96 + 8), (4, 2, 4 * 152 + 8, 96 + 8), (9, 1, 4 * 84 + 8, 3 * 96 + 8)],
)
def test_the_sheet_is_as_large_as_its_images_need(
    tmp_path: Path, classes: int, each: int, width: int, height: int
) -> None:
    samples = plain_colours({f"class {n}": 6 for n in range(classes)})
    assert contact_sheet(samples, tmp_path / "sheet.png", each=each) == classes
    assert drawn(tmp_path / "sheet.png").shape == (height, width, 3)


def test_every_class_has_its_own_images_under_its_own_name(tmp_path: Path) -> None:
    samples = plain_colours({f"class {n}": n + 1 for n in range(6)})
    contact_sheet(samples, tmp_path / "sheet.png")
    sheet = drawn(tmp_path / "sheet.png")
    for number in range(6):
        row, column = divmod(number, 4)
        for place in range(5):
            expected = hue(number) if place <= number else WHITE  # a small class leaves room
            assert (sheet[cell(row, column, place)] == expected).all(), (number, place)
        rows, columns = cell(row, column, 0)
        caption = sheet[rows.start - 20 : rows.start, columns]
        assert (caption < 128).any()  # there is a name
        assert (sheet[rows.start - 1, columns] == WHITE).all()  # and it does not touch the picture


def test_more_classes_than_asked_for_are_spread_evenly(tmp_path: Path) -> None:
    samples = plain_colours({f"class {n}": 1 for n in range(9)})
    assert contact_sheet(samples, tmp_path / "sheet.png", classes=3, each=1) == 3
    sheet = drawn(tmp_path / "sheet.png")
    for place, number in enumerate((0, 4, 8)):
        assert (sheet[cell(0, place, 0, each=1)] == hue(number)).all()


def test_the_samples_of_a_large_class_are_spread_evenly(tmp_path: Path) -> None:
    images = np.zeros((9, 4, 4, 1), dtype=np.uint8) + np.arange(9, dtype=np.uint8)[:, None, None, None] * 20
    samples = Samples.build(ArrayPixels(images), ["grey"] * 9, list("abcdefghi"))
    contact_sheet(samples, tmp_path / "sheet.png", each=3)
    sheet = drawn(tmp_path / "sheet.png")
    for place, number in enumerate((0, 4, 8)):
        assert (sheet[cell(0, 0, place, each=3)] == 20 * number).all()  # grey pictures are drawn as grey


@pytest.mark.parametrize(("height", "width"), [(20, 60), (60, 20), (100, 300)])
def test_the_middle_of_a_image_that_is_not_square_is_shown(tmp_path: Path, height: int, width: int) -> None:
    side = min(height, width)
    image = np.full((height, width, 3), (255, 0, 0), dtype=np.uint8)
    top, left = (height - side) // 2, (width - side) // 2
    image[top : top + side, left : left + side] = (0, 200, 0)
    contact_sheet(Samples.build(ArrayPixels(image[None]), ["x"], ["1"]), tmp_path / "sheet.png")
    assert (drawn(tmp_path / "sheet.png")[cell(0, 0, 0)] == (0, 200, 0)).all()


def test_a_long_name_does_not_run_into_the_next_column(tmp_path: Path) -> None:
    names = {"a " + "very long name " * 20: 1, "b" + "W" * 300: 1, "c": 1}
    contact_sheet(plain_colours(names), tmp_path / "sheet.png", each=2)
    sheet = drawn(tmp_path / "sheet.png")
    for column in range(2):
        last, following = cell(0, column, 1, each=2)[1], cell(0, column + 1, 0, each=2)[1]
        assert (sheet[:28, following.start - 8 : following.start] == WHITE).all()
        assert (sheet[:28, last.start : last.stop] < 128).any()  # the name goes on as long as there is room


@pytest.mark.parametrize("name", ["two\nlines", "tab\tbed", "日本 ☃ É", "[bold]"])
def test_names_that_are_hard_to_draw_are_no_failure(tmp_path: Path, name: str) -> None:
    assert contact_sheet(plain_colours({name: 1, "z": 1}), tmp_path / "sheet.png") == 2
    assert (drawn(tmp_path / "sheet.png")[cell(0, 1, 0)] == hue(1)).all()


@pytest.mark.parametrize("name", ["sheet.jpg", "sheet.webp", "sheet.PNG"])
def test_the_extension_names_the_format(tmp_path: Path, name: str) -> None:
    contact_sheet(plain_colours({"x": 1}), tmp_path / name)
    middle = drawn(tmp_path / name)[cell(0, 0, 0)][16:-16, 16:-16].astype(int)
    assert np.abs(middle - hue(0)).max() <= 8  # JPEG and WebP are not exact, least of all near an edge


@pytest.mark.parametrize("name", ["sheet.nonsense", "sheet", "sheet.psd", "folder.png", "file/sheet.png"])
def test_a_sheet_that_cannot_be_written_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        BranchoutError, match=r"cannot be written in this format.*Try: --sheet sheet\.png|could not be written"
    ):
        contact_sheet(plain_colours({"x": 1}), tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder.png"]
