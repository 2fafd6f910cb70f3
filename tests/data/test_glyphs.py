"""The built-in dataset: its classes, its table, and pixels that depend on nothing but their own name."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
import unicodedata
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import glyph_classes
from branchout.data import glyphs as module
from branchout.data.datasets import Dataset
from branchout.data.glyphs import SANS, SERIF, GlyphPixels, character_of, faces_of_classes, glyphs
from branchout.errors import BranchoutError

ZHE = "cyrillic capital letter zhe"
FEW = ["digit five", ZHE, "rightwards double arrow", "braille pattern dots-1235"]


@pytest.fixture(scope="module")
def full() -> Dataset:
    return glyphs()


def pixels_of(split: str = "train", per_class: int = 24, seed: int = 0, names: list[str] = FEW) -> GlyphPixels:
    return GlyphPixels(split, tuple(character_of(name) for name in names), per_class, seed)


# Classes.


def test_shipped_classes_are_what_the_installed_typefaces_give() -> None:
    """But for the few pairs that a hair's breadth in another version of the drawing library moves past the limit."""
    shipped = {character_of(name): faces for name, faces in faces_of_classes().items()}
    found = glyph_classes.find_classes()
    assert len(found.keys() ^ shipped.keys()) <= 10
    assert all(found[character] == shipped[character] for character in found.keys() & shipped.keys())


def test_no_two_classes_look_alike() -> None:
    looks = [glyph_classes.looks_of(character_of(name), faces) for name, faces in faces_of_classes().items()]
    owner = np.repeat(np.arange(len(looks)), [len(look) for look in looks])
    every = np.concatenate(looks)
    correlation = every @ every.T
    correlation[owner[:, None] == owner] = 0
    assert correlation.max() < glyph_classes.ALIKE + 0.005


def test_characters_that_look_alike_are_found_by_their_drawings() -> None:
    def alike(one: str, other: str) -> bool:
        products = glyph_classes.looks_of(one, SANS) @ glyph_classes.looks_of(other, SANS).T
        return bool(products.max() >= glyph_classes.ALIKE)

    assert alike("A", "Α")  # Latin, Greek
    assert alike("A", "А")  # Latin, Cyrillic
    assert alike("X", "x")
    assert not alike("E", "F")
    assert not alike("d", "b")
    assert "greek capital letter alpha" not in faces_of_classes()
    assert {"latin capital letter e", "latin capital letter f"} <= faces_of_classes().keys()


def test_names_are_unique_readable_and_fit_for_folders() -> None:
    names = list(faces_of_classes())
    assert len(names) >= 1100
    assert len({unicodedata.normalize("NFKC", name).casefold() for name in names}) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789 -") for name in names)
    assert all(name == name.strip() and len(name) < 100 for name in names)
    assert character_of(ZHE) == "Ж"
    assert all(unicodedata.name(character_of(name)).lower() == name for name in names)


# The table.


def test_counts_and_columns(full: Dataset) -> None:
    classes = len(faces_of_classes())
    assert set(full.train.counts().values()) == {48}
    assert set(full.val.counts().values()) == {20}
    for table, split, each in ((full.train, "train", 48), (full.val, "val", 20)):
        assert len(table) == classes * each == len(set(table.ids))
        assert list(table.classes) == sorted(faces_of_classes())
        assert (table.origin == -1).all()
        assert table.attributes.keys() == {"domain", "script", "style"}
        for index in (0, len(table) // 2, len(table) - 1):
            start, code, face, number = table.ids[index].split("/")
            assert start == split
            assert chr(int(code.removeprefix("U+"), 16)) == character_of(table.names[index])
            assert face == table.attributes["style"][index]
            assert int(number) == table.rows[index] % each
    assert "train/U+0416/" in " ".join(full.train.of_classes([ZHE]).ids)


def test_domains_leave_room_for_every_scenario(full: Dataset) -> None:
    counts = Counter(full.domains.values())
    assert counts.keys() == {"letters", "symbols"}
    assert counts[full.base_domain] >= 800 + 40
    assert min(counts.values()) >= 45
    assert len(full.domains) >= 1000  # 800 + 200, and 500 + 10 × 50
    first = dict(zip(full.train.names, full.train.attributes["domain"], strict=True))
    assert first == full.domains
    assert full.domains[ZHE] == "letters"
    assert full.domains["digit five"] == "symbols"


def test_scripts(full: Dataset) -> None:
    script = dict(zip(full.val.names, full.val.attributes["script"], strict=True))
    assert script[ZHE] == "cyrillic"
    assert script["rightwards double arrow"] == "arrows"
    assert script["digit five"] == "signs"
    assert all(count >= 5 for count in Counter(script.values()).values())


def test_every_class_has_both_styles_in_both_splits(full: Dataset) -> None:
    assert full.style_sides is not None
    first, second = full.style_sides
    assert not first & second
    for table in (full.train, full.val):
        styles = table.attributes["style"]
        assert set(styles) == first | second
        for side in (first, second):
            assert set(table.names[np.isin(styles, list(side))]) == set(table.classes)


def test_faces_are_spread_evenly(full: Dataset) -> None:
    for table in (full.train, full.val):
        used = Counter(zip(table.names, table.attributes["style"], strict=True))
        for name, faces in list(faces_of_classes().items())[::50]:
            times = [used[name, face] for face in faces]
            assert sum(times) == table.counts()[name]
            assert max(times) - min(times) <= 1


# Pixels.


def test_every_class_can_be_seen_in_both_styles(full: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its noise a sample shows ink and paper, whose least contrast is a quarter of all greys."""
    monkeypatch.setattr(module, "MOST", module.MOST * [name != "noise" for name in module.DISTORTIONS])
    table = full.train
    sans = np.isin(table.attributes["style"], SANS)
    for side in (sans, ~sans):
        _, firsts = np.unique(table.labels[side], return_index=True)
        images = np.stack([table.pixels.read(int(row)) for row in table.rows[side][firsts]])
        assert images.shape == (len(table.classes), 32, 32, 1)
        assert images.dtype == np.uint8
        assert np.ptp(images, axis=(1, 2, 3)).min() > 45


def test_no_face_draws_a_box_for_a_character_it_lacks() -> None:
    from matplotlib.ft2font import FT2Font

    carried = {face: FT2Font(module.font_file(face)).get_charmap() for face in (*SANS, *SERIF)}
    for name, faces in faces_of_classes().items():
        assert all(ord(character_of(name)) in carried[face] for face in faces)


def test_a_sample_is_the_same_in_another_process() -> None:
    code = (
        "import hashlib, sys; from branchout.data.glyphs import glyphs;"
        f"table = glyphs(3, 2, seed=7, classes={FEW!r}).train;"
        "images = b''.join(table.read(n).tobytes() for n in range(len(table)));"
        "print(hashlib.sha256(images).hexdigest(), table.fingerprint())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    table = glyphs(3, 2, seed=7, classes=FEW).train
    assert isinstance(table.pixels, GlyphPixels)
    images = b"".join(table.read(n).tobytes() for n in range(len(table)))
    assert there == [hashlib.sha256(images).hexdigest(), table.fingerprint()]


@settings(max_examples=40, deadline=None)
@given(
    names=st.permutations(FEW).flatmap(lambda names: st.integers(1, len(FEW)).map(lambda count: names[:count])),
    per_class=st.integers(1, 30),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_a_sample_depends_on_its_own_name_alone(
    names: list[str], per_class: int, seed: int, data: st.DataObject
) -> None:
    asked = pixels_of(per_class=per_class, seed=seed, names=names)
    row = data.draw(st.integers(0, len(asked) - 1))
    alone = pixels_of(per_class=row % per_class + 1, seed=seed, names=[names[row // per_class]])
    assert asked.face(row) == alone.face(row % per_class)
    assert (asked.read(row) == alone.read(row % per_class)).all()
    assert asked.fingerprint(np.array([row])) == alone.fingerprint(np.array([row % per_class]))


def test_seeds_splits_and_numbers_differ() -> None:
    pixels = [pixels_of("train"), pixels_of("val"), pixels_of("train", seed=1), pixels_of("train", seed=2**32)]
    images = np.stack([each.read(row) for each in pixels for row in range(len(each))])
    assert len({image.tobytes() for image in images}) == len(images)
    rows = np.arange(5)
    assert len({each.fingerprint(rows) for each in pixels}) == len(pixels)
    assert pixels[0].fingerprint(rows) != pixels[0].fingerprint(rows[::-1])
    assert pixels[0].fingerprint(rows) != pixels[0].fingerprint(rows + 24)


def test_pickled_pixels_are_small_and_the_same() -> None:
    pixels = pixels_of()
    drawn = pixels.read(95)
    frozen = pickle.dumps(pixels)
    assert len(frozen) < 500  # no drawings travel to a data loader's workers
    copy = pickle.loads(frozen)
    assert copy == pixels
    assert (copy.read(95) == drawn).all()
    with pytest.raises(IndexError):
        pixels.read(len(pixels))


def test_importing_and_building_the_table_loads_no_drawing_library() -> None:
    code = (
        "import sys; from branchout.data.glyphs import glyphs; glyphs(2, 2);"
        "print([name for name in ('matplotlib', 'PIL', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# What is asked for wrongly.


def test_some_classes_only() -> None:
    some = glyphs(2, 1, classes=FEW)
    assert some.train.classes == some.val.classes == tuple(sorted(FEW))
    assert set(some.domains) == set(FEW)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train_per_class": 0}, "train_per_class=0"),
        ({"val_per_class": -2}, "val_per_class=-2"),
        ({"seed": -1}, "seed=-1"),
        ({"classes": []}, "at least one class.* found 0"),
        ({"classes": ["digit five", "digit five"]}, "each class once.*digit five"),
        ({"classes": ["digit fve"]}, "'digit fve'.*did you mean .*digit five"),
    ],
)
def test_bad_arguments(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(BranchoutError, match=message):
        glyphs(**wrong)  # type: ignore[arg-type]


def test_character_of_an_unknown_name() -> None:
    with pytest.raises(BranchoutError, match="no class is called 'A'"):
        character_of("A")
