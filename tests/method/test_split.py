"""Which images train, choose and measure: never the same ones."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from helpers import BASE, LATER, NEW, exemplars, some

from branchout import api
from branchout.data.samples import ArrayPixels, Samples, concatenate, content_hashes
from branchout.errors import BranchoutError
from branchout.labels import LabelSpace
from branchout.method.split import DataSplit


def ids(split: DataSplit) -> dict[str, set[str]]:
    roles = ("new", "memory", "dev", "test", "calibration")
    parts = {role: getattr(split, role) for role in roles}
    return {name: set() if part is None else set(part.ids.tolist()) for name, part in parts.items()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("given", ["nothing", "memory", "val", "both"])
def test_what_trains_chooses_and_reports_is_never_the_same(
    seed: int, given: str, base: api.Model, train: Samples, val: Samples
) -> None:
    memory = exemplars(train) if given in ("memory", "both") else None
    others = val.of_classes([*BASE, *NEW]) if given in ("val", "both") else None
    new = train.of_classes(NEW)
    parts = ids(DataSplit.of(base.saved.classifier.space, new, memory, others, seed))
    names = list(parts)
    for n, one in enumerate(names):
        for other in names[n + 1 :]:
            assert not parts[one] & parts[other], (one, other)
    every = set(new.ids.tolist()) | (set() if memory is None else set(memory.ids.tolist()))
    held = set() if others is None else set(others.ids.tolist())
    assert set().union(*parts.values()) == every | held  # and none is lost
    if others is not None:
        assert parts["new"] == set(new.ids.tolist())
        assert parts["dev"] | parts["calibration"] | parts["test"] == held
    assert abs(len(parts["dev"] | parts["calibration"]) - len(parts["test"])) <= 1
    assert parts["dev"]


def test_halves_hold_each_class_evenly(base: api.Model, train: Samples, val: Samples) -> None:
    space, new = base.saved.classifier.space, train.of_classes(NEW)
    split = DataSplit.of(space, new, exemplars(train), val.of_classes([*BASE, *NEW]), 0)
    assert split.dev.counts() == split.test.counts() == dict.fromkeys(sorted([*BASE, *NEW]), 4)
    held = DataSplit.of(space, new, exemplars(train), None, 0)
    assert held.new.counts() == dict.fromkeys(NEW, 16)  # a fifth of 20 is 4
    assert held.memory is not None
    assert held.memory.counts() == dict.fromkeys(BASE, 4)
    assert not np.array_equal(held.dev.ids, DataSplit.of(space, new, exemplars(train), None, 1).dev.ids)


def test_images_that_calibrate_pseudo_exemplars_do_not_choose(base: api.Model, train: Samples, val: Samples) -> None:
    space, new = base.saved.classifier.space, train.of_classes(NEW)
    everything = val.of_classes([*BASE, *NEW])
    split = DataSplit.of(space, new, None, everything, 0)
    assert split.calibration is not None
    assert split.calibration.counts() == dict.fromkeys(NEW, 2)
    assert split.dev.counts() == dict.fromkeys(BASE, 4) | dict.fromkeys(NEW, 2)
    assert split.test.counts() == dict.fromkeys(sorted([*BASE, *NEW]), 4)
    few = DataSplit.of(space, new, exemplars(train, BASE[:3]), everything, 0)  # five old classes have no images
    assert few.calibration is not None
    assert DataSplit.of(space, new, exemplars(train), everything, 0).calibration is None
    one = DataSplit.of(space, some(train, {NEW[0]: 3}), None, None, 0)  # the only held-out image chooses
    assert (len(one.dev), len(one.test)) == (1, 0)
    assert one.calibration is not None
    assert len(one.calibration) == 0


@pytest.mark.parametrize(
    ("memory", "val", "new", "chosen_on"),
    [
        (BASE, None, NEW, "held-out"),
        (None, None, NEW, "pseudo"),
        (None, [*BASE, *NEW], NEW, "dev"),
        (BASE, [*BASE, *NEW], NEW, "dev"),
        (BASE, NEW, NEW, "held-out"),  # val lacks old classes, so some of memory is held out
        (None, None, [*NEW, BASE[0]], "pseudo"),
        (BASE[:1], None, [*NEW, BASE[0]], "pseudo"),
        (BASE[:3], None, NEW, "pseudo"),  # three of eight old classes say little about the others
        (BASE[:4], None, NEW, "held-out"),
        (None, [*NEW, BASE[0]], NEW, "dev"),
    ],
)
def test_where_base_accuracy_comes_from(
    memory: Sequence[str] | None,
    val: Sequence[str] | None,
    new: Sequence[str],
    chosen_on: str,
    base: api.Model,
    pictures,
) -> None:
    train, other = pictures
    split = DataSplit.of(
        base.saved.classifier.space,
        train.of_classes(new),
        None if memory is None else exemplars(train, memory),
        None if val is None else other.of_classes(val),
        0,
    )
    assert split.chosen_on == chosen_on


def test_strangers_are_refused_by_name(base: api.Model, train: Samples, val: Samples) -> None:
    space, new = base.saved.classifier.space, train.of_classes(NEW)
    with pytest.raises(BranchoutError, match=f"--memory has classes that the base does not know: {LATER[0]}, {NEW[0]}"):
        DataSplit.of(space, new, train.of_classes([*BASE, NEW[0], LATER[0]]), None, 0)
    with pytest.raises(BranchoutError, match=f"--val has classes that are neither old nor new: {LATER[1]}"):
        DataSplit.of(space, new, None, val.of_classes([*BASE, *NEW, LATER[1]]), 0)
    with pytest.raises(BranchoutError, match=f"--val has no images of new classes, only of {BASE[0]}"):
        DataSplit.of(space, new, None, val.of_classes(BASE), 0)
    everyone = train.rename({name: f"stranger {n}" for n, name in enumerate(sorted(train.classes))})
    with pytest.raises(BranchoutError, match=r"stranger 0, .* and 9 more"):
        DataSplit.of(space, new, everyone, None, 0)


def test_classes_with_one_or_two_images(base: api.Model, train: Samples) -> None:
    space = base.saved.classifier.space
    few = some(train, {NEW[0]: 1, NEW[1]: 2, NEW[2]: 3})
    split = DataSplit.of(space, few, some(train, {BASE[0]: 2, BASE[1]: 5}), None, 0)
    assert split.new.counts() == {NEW[0]: 1, NEW[1]: 2, NEW[2]: 2}
    assert split.memory is not None
    assert split.memory.counts() == {BASE[0]: 2, BASE[1]: 4}
    assert len(split.dev) + len(split.test) == 2
    with pytest.raises(BranchoutError, match=r"too few images of new classes to hold any out.* has 2 images.*--val"):
        DataSplit.of(space, some(train, {NEW[0]: 2, NEW[1]: 1}), None, None, 0)
    with pytest.raises(BranchoutError, match="the largest class has 0 images"):
        DataSplit.of(space, train.select(np.zeros(0, dtype=np.int64)), None, None, 0)


def test_origins_are_the_branch_that_taught_the_class_first(extended: api.Model, train: Samples, val: Samples) -> None:
    split = DataSplit.of(
        extended.saved.classifier.space, train.of_classes(LATER), exemplars(train, [*BASE, *NEW]), val, 0
    )
    assert split.memory is not None
    assert set(split.new.origin.tolist()) == {2}
    for name, origin in zip(split.memory.names, split.memory.origin, strict=True):
        assert origin == (0 if name in BASE else 1)


def test_new_classes_that_few_or_no_images_measure_are_named(base: api.Model, train: Samples, val: Samples) -> None:
    space, new = base.saved.classifier.space, train.of_classes(NEW)
    partly = DataSplit.of(space, new, exemplars(train), val.of_classes([*BASE, *NEW[1:]]), 0)
    (told,) = [notice for notice in partly.notices if "--val has no images of" in notice]
    assert f"1 of {len(NEW)} new classes: {NEW[0]}" in told
    assert partly.val_given
    few = DataSplit.of(space, train.of_classes(NEW[:1]), exemplars(train), None, 0)
    assert any("4 validation images of new classes: too few" in notice for notice in few.notices)
    enough = DataSplit.of(space, new, exemplars(train), val.of_classes([*BASE, *NEW]), 0)
    assert not any("too few" in notice or "--val has no" in notice for notice in enough.notices)


def test_validation_images_that_also_train_are_left_out(base: api.Model, train: Samples, val: Samples) -> None:
    train, val = (replace(table, content=content_hashes(table)) for table in (train, val))  # as a folder's tables are
    space, new = base.saved.classifier.space, train.of_classes(NEW)
    other = val.of_classes([*BASE, *NEW])
    doubled = concatenate([other, some(train, {NEW[0]: 2, NEW[1]: 1}), some(exemplars(train), {BASE[0]: 1})])
    split = DataSplit.of(space, new, exemplars(train), doubled, 0)
    assert len(split.dev) + len(split.test) == len(other)
    (notice,) = split.notices
    assert "identical to training images" in notice
    assert "4 images" in notice
    assert DataSplit.of(space, new, exemplars(train), other, 0).notices == ()
    with pytest.raises(BranchoutError, match=rf"{len(new)} of {len(new)} validation images are identical.*--val"):
        DataSplit.of(space, new, None, new, 0)
    assert DataSplit.of(space, new, exemplars(train), None, 0).notices == ()  # held out of the same folder


def test_two_images_a_class_are_enough_to_hold_some_out(base: api.Model, train: Samples) -> None:
    space, new = base.saved.classifier.space, train.of_classes(NEW)
    split = DataSplit.of(space, new, exemplars(train, per_class=2), None, 0)
    assert split.memory is not None
    counts = split.memory.counts()
    assert set(counts) == set(BASE)  # every class keeps an image to train with
    given = [name for name in BASE if counts[name] == 1]
    assert len(given) == 3  # a fifth of 16 images, rounded
    held = concatenate([split.dev, split.test])
    assert held.of_classes(BASE).counts() == dict.fromkeys(sorted(given), 1)
    assert DataSplit.of(space, new, exemplars(train, per_class=1), None, 0).chosen_on == "pseudo"


@pytest.mark.parametrize(("classes", "held"), [(499, 0), (500, 100), (600, 120)])
def test_single_images_of_many_classes_choose_too(classes: int, held: int, train: Samples) -> None:
    """A fifth of them, if that is enough to choose an operating point; otherwise all of them train."""
    names = [f"{n:03}" for n in range(classes)]
    noise = np.random.default_rng(0).integers(256, size=(classes, 8, 8, 1), dtype=np.uint8)
    old = Samples.build(ArrayPixels(noise), names, names)
    split = DataSplit.of(LabelSpace.of(names), train.of_classes(NEW), old, None, 0)
    assert split.memory is not None
    assert len(split.memory) == classes - held
    assert concatenate([split.dev, split.test]).mask(names).sum() == held
    assert split.chosen_on == ("held-out" if held else "pseudo")
    assert (split.calibration is None) == (held > 0)  # classes that gave their only image are not lacking
    again = LabelSpace.of([*names[:-1], NEW[0]])  # a class that gets new images does not count
    shared = Samples.build(ArrayPixels(noise), [*names[:-1], NEW[0]], names)
    split = DataSplit.of(again, train.of_classes(NEW), shared, None, 0)
    assert split.chosen_on == ("held-out" if classes > 500 else "pseudo")
    assert split.memory is not None
    assert NEW[0] in split.memory.classes


def with_bursts(samples: Samples, groups: Sequence[int]) -> Samples:
    """The samples with hashes that are equal within a group and far from each other otherwise."""
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**63, (max(groups) + 1, 2), dtype=np.uint64)
    return replace(samples, image_hash=hashes[np.asarray(groups)])


@pytest.mark.parametrize("seed", range(4))
def test_near_duplicates_stay_on_one_side(seed: int, base: api.Model, train: Samples) -> None:
    space = base.saved.classifier.space
    new, memory = train.of_classes(NEW), exemplars(train, per_class=8)
    pairs = with_bursts(new, np.arange(len(new)) // 2)
    kept = with_bursts(memory, np.arange(len(memory)) // 2)
    split = DataSplit.of(space, pairs, kept, None, seed)
    group = {str(name): ("new", n // 2) for n, name in enumerate(new.ids)}
    group |= {str(name): ("memory", n // 2) for n, name in enumerate(memory.ids)}
    sides = [{group[name] for name in names} for names in ids(split).values()]
    for n, one in enumerate(sides):
        for other in sides[n + 1 :]:
            assert not one & other
    assert split.near_duplicates == len(new) + len(memory)
    assert f"{len(new)} of {len(new)} images of new classes are near-duplicates" in split.notices[0]
    assert len(split.dev) + len(split.test) >= len(NEW)


def test_without_near_duplicates_nothing_changes(base: api.Model, train: Samples) -> None:
    space, new, memory = base.saved.classifier.space, train.of_classes(NEW), exemplars(train)
    plain = DataSplit.of(space, new, memory, None, 3)
    hashed = DataSplit.of(space, with_bursts(new, range(len(new))), with_bursts(memory, range(len(memory))), None, 3)
    for part in ("new", "memory", "dev", "test"):
        assert getattr(plain, part).ids.tolist() == getattr(hashed, part).ids.tolist()
    assert hashed.notices == plain.notices == ()


def test_classes_of_one_burst_are_divided_with_a_warning(base: api.Model, train: Samples) -> None:
    new = train.of_classes(NEW)
    split = DataSplit.of(base.saved.classifier.space, with_bursts(new, new.labels), None, None, 0)
    assert len(split.dev) + len(split.test) > 0
    assert "--val" in split.notices[-1]
    assert f"{len(NEW)} of {len(NEW)} new classes" in split.notices[-1]


def test_validation_images_like_training_images_are_counted(base: api.Model, train: Samples, val: Samples) -> None:
    new, other = train.of_classes(NEW), val.of_classes([*BASE, *NEW])
    first = with_bursts(concatenate([new, other]), range(len(new) + len(other)))
    assert first.image_hash is not None
    hashes = first.image_hash.copy()
    like = len(new) + int(np.flatnonzero(other.names == NEW[0])[0])
    hashes[like] = hashes[int(np.flatnonzero(new.names == NEW[0])[0])]
    split = DataSplit.of(
        base.saved.classifier.space,
        replace(new, image_hash=hashes[: len(new)]),
        None,
        replace(other, image_hash=hashes[len(new) :]),
        0,
    )
    (notice,) = split.notices
    assert notice.startswith(f"near-duplicates of training images among the {len(other)} validation images: 1")


def test_images_held_out_from_training_are_known(train: Samples, val: Samples) -> None:
    space = LabelSpace.of(BASE)
    new, memory = train.of_classes(NEW), exemplars(train)
    split = DataSplit.of(space, new, memory, None)
    held = concatenate(split.held_out_images)
    assert len(held) == sum(split.held_out) > 0
    parts = ids(split)
    assert not (parts["new"] | parts["memory"]) & set(held.ids.tolist())
    assert DataSplit.of(space, new, memory, val.of_classes([*BASE, *NEW])).held_out_images == []
    assert DataSplit.of(space, new, memory, val.of_classes(NEW)).held_out_images == []  # some are the user's own
