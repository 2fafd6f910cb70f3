"""Tables of samples against plain lists of rows: whatever is done to a table, every sample keeps its own pixels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchout.data.samples import UNASSIGNED, ArrayPixels, Image, JoinedPixels, Samples, concatenate
from branchout.errors import BranchoutError
from branchout.labels import Ints

Row = tuple[bytes, str, str, int, str]
"""Pixels, class name, id, origin and style: all that a sample is."""


def pictures(count: int, *, first: int = 0, height: int = 2, width: int = 3, channels: int = 1) -> ArrayPixels:
    """Every picture is different from every other with another `first` + number."""
    numbers = np.arange(first, first + count, dtype=np.uint8)[:, None, None, None]
    return ArrayPixels(np.broadcast_to(numbers, (count, height, width, channels)).copy())


def table(names: list[str], *, first: int = 0, pixels: ArrayPixels | None = None) -> Samples:
    return Samples.build(
        pixels or pictures(len(names), first=first),
        names,
        [f"{name}/{first + i}" for i, name in enumerate(names)],
        attributes={"style": [f"style {i % 2}" for i in range(len(names))]},
    )


def as_rows(samples: Samples) -> list[Row]:
    """The table read sample by sample."""
    styles = samples.attributes.get("style", np.full(len(samples), "", dtype=np.str_))
    return [
        (
            samples.read(i).tobytes(),
            samples.classes[samples.labels[i]],
            str(samples.ids[i]),
            int(samples.origin[i]),
            str(styles[i]),
        )
        for i in range(len(samples))
    ]


def require_sound(samples: Samples) -> None:
    """Classes are sorted, distinct, and each has a sample."""
    assert list(samples.classes) == sorted(set(samples.classes))
    assert {samples.classes[label] for label in samples.labels} == set(samples.classes)
    assert samples.names.tolist() == [samples.classes[label] for label in samples.labels]
    assert samples.counts() == {name: samples.names.tolist().count(name) for name in samples.classes}


names_of_classes = st.lists(st.sampled_from(["ant", "bee", "cat", "dog", "eel"]), min_size=1, max_size=12)


@given(names_of_classes)
def test_a_table_holds_what_it_was_built_from(names: list[str]) -> None:
    samples = table(names)
    require_sound(samples)
    expected = [(bytes([i] * 6), name, f"{name}/{i}", UNASSIGNED, f"style {i % 2}") for i, name in enumerate(names)]
    assert as_rows(samples) == expected


@given(names_of_classes, st.data())
def test_a_selection_is_the_rows_named_and_no_empty_class(names: list[str], data: st.DataObject) -> None:
    samples = table(names)
    rows = as_rows(samples)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names))), dtype=bool)
    masked = samples.select(mask)
    require_sound(masked)
    assert as_rows(masked) == [row for row, chosen in zip(rows, mask, strict=True) if chosen]
    positions = data.draw(st.lists(st.integers(0, len(names) - 1), max_size=15))
    picked = samples.select(np.array(positions, dtype=np.int64))
    require_sound(picked)
    assert as_rows(picked) == [rows[i] for i in positions]
    again = data.draw(st.lists(st.integers(0, len(positions) - 1), max_size=5)) if positions else []
    assert as_rows(picked.select(np.array(again, dtype=np.int64))) == [rows[positions[i]] for i in again]
    assert as_rows(samples) == rows  # the table itself stays as it was


@given(names_of_classes, st.sets(st.sampled_from(["ant", "bee", "cat", "elsewhere"])))
def test_samples_of_some_classes_in_table_order(names: list[str], wanted: set[str]) -> None:
    samples = table(names)
    chosen = samples.of_classes(sorted(wanted))
    require_sound(chosen)
    assert as_rows(chosen) == [row for row in as_rows(samples) if row[1] in wanted]


@given(
    names_of_classes,
    st.dictionaries(st.sampled_from(["ant", "bee", "cat", "elsewhere"]), st.sampled_from(["dog", "ant", "Zebra", "a"])),
)
def test_new_names_move_no_sample_and_one_name_is_one_class(names: list[str], new: dict[str, str]) -> None:
    samples = table(names)
    renamed = samples.rename(new)
    require_sound(renamed)
    expected = [(p, new.get(name, name), i, origin, style) for p, name, i, origin, style in as_rows(samples)]
    assert as_rows(renamed) == expected


def test_swapped_names_are_swapped() -> None:
    swapped = table(["ant", "bee", "ant"]).rename({"ant": "bee", "bee": "ant"})
    assert swapped.names.tolist() == ["bee", "ant", "bee"]


def test_an_origin_is_given_to_all_or_to_each() -> None:
    samples = table(["ant", "bee", "ant"])
    assert samples.origin.tolist() == [UNASSIGNED] * 3
    assert samples.with_origin(2).origin.tolist() == [2, 2, 2]
    each = np.array([0, 1, 2])
    placed = samples.with_origin(each)
    each[:] = 9
    assert placed.origin.tolist() == [0, 1, 2]  # a copy
    assert samples.origin.tolist() == [UNASSIGNED] * 3
    assert [row[:3] for row in as_rows(placed)] == [row[:3] for row in as_rows(samples)]


@given(st.lists(names_of_classes, min_size=1, max_size=4), st.booleans(), st.randoms(use_true_random=False))
def test_one_table_after_the_other_with_pixels_shared_or_not(
    lists: list[list[str]], shared: bool, random: object
) -> None:
    pixels = pictures(60)
    starts = np.cumsum([0, *map(len, lists)])
    tables = []
    for step, names in enumerate(lists):
        order = list(range(len(names)))
        random.shuffle(order)  # type: ignore[attr-defined]
        whole = table(names, first=int(starts[step]))
        if shared:
            rows = np.arange(len(names)) + starts[step]
            whole = Samples.build(pixels, names, whole.ids, rows=rows, attributes=whole.attributes)
        tables.append(whole.select(np.array(order)).with_origin(step))
    joined = concatenate(tables)
    require_sound(joined)
    assert as_rows(joined) == [row for part in tables for row in as_rows(part)]
    if shared:
        assert joined.pixels is pixels
    assert as_rows(concatenate([joined, tables[0]])) == as_rows(joined) + as_rows(tables[0])  # joins can be joined


def test_tables_of_other_shapes_and_other_attributes_can_be_joined() -> None:
    grey = table(["ant", "bee"])
    colour = Samples.build(
        pictures(2, first=50, height=4, channels=3), ["cat", "ant"], ["c", "a"], attributes={"domain": ["x", "y"]}
    )
    joined = concatenate([grey, colour, grey.select(np.zeros(2, dtype=bool))])
    assert joined.attributes["style"].tolist() == ["style 0", "style 1", "", ""]
    assert joined.attributes["domain"].tolist() == ["", "", "x", "y"]
    assert [joined.read(i).shape for i in range(4)] == [(2, 3, 1)] * 2 + [(4, 3, 3)] * 2
    assert [int(joined.read(i).max()) for i in range(4)] == [0, 1, 50, 51]
    assert joined.pixels.shape is None


def test_one_table_joined_is_itself() -> None:
    only = table(["ant", "bee"])
    assert concatenate([only]) is only


def test_an_empty_table_answers_too() -> None:
    none = table(["ant"]).select(np.array([False]))
    assert len(none) == 0
    assert none.classes == ()
    assert none.names.tolist() == []
    assert none.counts() == {}
    assert len(none.of_classes(["ant"])) == len(none.rename({"ant": "bee"})) == len(none.with_origin(1)) == 0
    assert as_rows(concatenate([none, table(["bee"])])) == as_rows(table(["bee"]))


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(BranchoutError, match=r"differ in length: \[2, 3\]"):
        Samples.build(pictures(3), ["ant", "bee", "ant"], ["one", "two"])
    with pytest.raises(BranchoutError, match="differ in length"):
        Samples.build(pictures(1), ["ant"], ["one"], attributes={"style": ["a", "b"]})


@pytest.mark.parametrize(
    "images", [np.zeros((2, 3, 3), dtype=np.uint8), np.zeros((2, 3, 3, 1), dtype=np.float32)], ids=["flat", "floats"]
)
def test_arrays_that_are_no_images_are_refused(images: np.ndarray) -> None:
    with pytest.raises(BranchoutError, match=r"uint8 array of shape \(number, height, width, channels\)"):
        ArrayPixels(images)


# Sources end to end.


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
def test_joined_pixels_read_each_row_from_its_own_part(lengths: list[int]) -> None:
    starts = np.cumsum([0, *lengths])
    joined = JoinedPixels(tuple(pictures(n, first=int(s)) for n, s in zip(lengths, starts, strict=False)))
    assert len(joined) == sum(lengths)
    assert joined.shape == (2, 3, 1)
    assert [int(joined.read(row).max()) for row in range(len(joined))] == list(range(sum(lengths)))


def test_joined_pixels_share_a_shape_only_if_all_parts_do() -> None:
    assert JoinedPixels((pictures(1), pictures(1, height=5))).shape is None


class Unread:
    """A source whose fingerprint names the rows asked for."""

    shape = None

    def __len__(self) -> int:
        return 3

    def read(self, row: int) -> Image:
        raise AssertionError("nobody asked for pixels")

    def fingerprint(self, rows: Ints, *, portable: bool = False) -> str:
        return ",".join(map(str, rows))


def test_a_fingerprint_of_joined_pixels_differs_for_every_choice_and_order_of_rows() -> None:
    joined = JoinedPixels((Unread(), Unread()))
    choices = [np.array(c, dtype=np.int64) for n in range(4) for c in itertools.permutations(range(6), n)]
    assert len({joined.fingerprint(choice) for choice in choices}) == len(choices)
    assert joined.fingerprint(choices[-1]) == joined.fingerprint(choices[-1].copy())


# Fingerprints.


def test_a_fingerprint_is_the_same_for_the_same_table() -> None:
    assert table(["ant", "bee"]).fingerprint() == table(["ant", "bee"]).fingerprint()
    everything = np.arange(2)
    assert table(["ant", "bee"]).select(everything).fingerprint() == table(["ant", "bee"]).fingerprint()


def test_a_fingerprint_changes_with_pixels_order_labels_and_number() -> None:
    samples = table(["ant", "bee", "ant"])
    touched = samples.pixels.images.copy()  # type: ignore[attr-defined]
    touched[1, 0, 0, 0] ^= 1
    others = [
        table(["ant", "bee", "ant"], pixels=ArrayPixels(touched)),  # one bit of one picture
        samples.select(np.array([2, 1, 0])),  # the same labels, other pictures
        samples.select(np.array([1, 0, 2])),
        table(["bee", "ant", "bee"]),
        samples.rename({"bee": "cat"}),
        samples.rename({"bee": "ant"}),
        samples.select(np.array([0, 1])),
        samples.select(np.array([0, 1, 2, 2])),
    ]
    prints = [samples.fingerprint(), *(other.fingerprint() for other in others)]
    assert len(set(prints)) == len(prints)


def test_a_fingerprint_ignores_rows_that_the_table_does_not_use() -> None:
    few, many = table(["ant", "bee"]), table(["ant", "bee", "cat"])
    assert many.select(np.array([0, 1])).fingerprint() == few.fingerprint()


def test_the_same_bytes_in_another_shape_are_other_pixels() -> None:
    upright = ArrayPixels(np.arange(12, dtype=np.uint8).reshape(2, 3, 2, 1))
    lying = ArrayPixels(upright.images.reshape(2, 2, 3, 1))
    assert table(["ant", "bee"], pixels=upright).fingerprint() != table(["ant", "bee"], pixels=lying).fingerprint()


def test_two_images_of_one_class_swapped_between_two_sources_are_noticed() -> None:
    joined = concatenate([table(["ant"]), table(["ant"], first=7)])
    assert joined.fingerprint() != joined.select(np.array([1, 0])).fingerprint()
