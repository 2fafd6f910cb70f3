"""The images of an extension, split by their role (paper, section 5.1, "Learning").

Images that train are never dev or test images. With `--val`, its dev half chooses the operating point and its test half
measures it. Without, a few images are held out: both halves choose, and each is measured at the point that the other
chooses. So too where `--val` has no old classes: kept images are then held out beside it.

Symbols: D_n → `DataSplit.new` · the exemplars E → `DataSplit.memory` · the validation set → `dev` and `test`
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from branchout.data.near_duplicates import count_grouped, near_duplicates, near_training, take_groups
from branchout.data.samples import Samples, concatenate, find_identical
from branchout.errors import LIST_CLASSES, BranchoutError, did_you_mean, some
from branchout.labels import LabelSpace
from branchout.method.recipes import ENOUGH_OLD, HELD_OUT
from branchout.units import count

IMAGES_OF_OLD_CLASSES = (
    "With images of most old classes in --val, or three of each in --memory, those images choose the operating point "
    "and measure the accuracy on old classes"
)
"""What to do where pseudo-exemplars choose the operating point."""


FEW_NEW = 5
"""With fewer validation images of new classes, accuracy on them says little."""


@dataclass(frozen=True)
class DataSplit:
    """Which images train, which choose the operating point, which measure the result."""

    new: Samples
    memory: Samples | None
    dev: Samples
    """The images that choose the operating point."""
    test: Samples
    """Held-out test images. With old classes in `--val` they are used for nothing but measurement."""
    chosen_on: str
    """The images that the operating point is chosen on: a key of `goals.CHOSEN_ON`."""
    unmeasured: str = ""
    """Why the accuracy on old classes cannot be measured; empty where it can."""
    calibration: Samples | None = None
    """New images that calibrate pseudo-exemplars, where old classes have no images; they do not train."""
    notices: tuple[str, ...] = ()
    """Sentences about images that were left out or are near-duplicates of others."""
    near_duplicates: int = 0
    """Images that were kept on one side of a hold-out together with near-duplicates of them."""
    held_out: tuple[int, int] = (0, 0)
    """How many of the new and of the kept images were held out from training."""
    val_given: bool = False
    """Whether there were validation images; they never train, and class means leave them out, too."""

    @property
    def held_out_images(self) -> list[Samples]:
        """The images that were held out from training; none where validation images were given."""
        parts = [part for part in (self.dev, self.test, self.calibration) if part is not None]
        return [] if self.val_given else parts

    @property
    def halves_cross(self) -> bool:
        """Whether both halves choose where the recipe has a dial: images held out from training are few. Validation
        images that were given choose with one half and measure with the other."""
        return self.chosen_on == "held-out" and len(self.test) > 0

    def classes_that_choose(self, space: LabelSpace, *, dial: bool) -> list[str]:
        """The classes of the images that choose the operating point; `space` is the label space before this step."""
        names = set(self.dev.classes)
        if self.halves_cross and dial:
            names |= set(self.test.classes)
        return sorted(names | set(space.classes) if self.chosen_on == "pseudo" else names)

    @classmethod
    def of(
        cls,
        space: LabelSpace,
        new: Samples,
        memory: Samples | None,
        val: Samples | None,
        seed: int = 0,
        new_classes: str = "new classes",
    ) -> DataSplit:
        """Halve validation images into dev and test; without any, hold out some of the new and kept images.

        `space` is the label space before this step; `new_classes` is what messages call the classes of `new`.
        """
        check_classes(space, new, memory, val, new_classes)
        rng = np.random.default_rng(seed)
        old = set(space.classes) - set(new.classes) or set(space.classes)  # if all get new images, these measure them
        lacking = memory is None or not old <= set(memory.classes)
        chosen_on = "dev"
        notices: list[str] = []
        grouped = 0
        given = len(new), 0 if memory is None else len(memory)
        _warn_of_two_classes(new, memory, notices, new_classes)
        if val is None:
            grouped += _count(new, f"images of {new_classes}", notices)
            new, held = _hold_out_new(new, seed, rng, notices, new_classes)
            chosen_on = "held-out"
        else:
            held = val
            missing = sorted(set(new.classes) - set(val.classes))
            if missing:
                notices.append(
                    f"--val has no images of {len(missing):,} of {len(new.classes):,} {new_classes}: {some(missing)}. "
                    "They neither choose the operating point nor are they measured"
                )
        if memory is not None and (val is None or not set(held.classes) & old):
            grouped += _count(memory, "images of --memory", notices)
            memory, held_old = _hold_out(memory, rng, old=old)
            held = concatenate([held, held_old]) if len(held_old) else held
            chosen_on = "held-out"
        held_out = given[0] - len(new), given[1] - (0 if memory is None else len(memory))
        held = _without_training_images(held, new, memory, notices, new_classes)
        of_new = int(held.mask(new.classes).sum())
        if of_new < FEW_NEW:
            notices.append(
                f"{count(of_new, 'validation image')} of {new_classes}: too few to choose the operating point well, "
                "and accuracy on them says little. Add images, or pass more with --val"
            )
        if val is not None:
            _warn_of_near_duplicates(held, new, memory, notices)
        of_old = int(held.mask(old).sum())
        covered = len(set(held.classes) & old)
        # A few held-out images of a few old classes say little about the others. Images of --val are taken as given.
        unmeasured = ""
        if not covered or (chosen_on == "held-out" and 2 * covered < len(old) and of_old < ENOUGH_OLD):
            chosen_on = "pseudo"
            few = f"{'only ' if covered else ''}{covered:,} of {count(len(old), 'old class', 'old classes')}"
            unmeasured = f"{few}{without_new_images(space, new)} {'has' if len(old) == 1 else 'have'} validation images"
        dev, test = _halve(held, new.classes, rng)
        calibration = None
        if chosen_on == "pseudo" or lacking:
            dev, calibration = _take_calibration(dev, new.classes, rng)
        if memory is not None:
            memory = _with_origin(memory, space)
        new = new.with_origin(len(space.branches))
        return cls(
            new, memory, dev, test, chosen_on, unmeasured, calibration, tuple(notices), grouped, held_out,
            val is not None,
        )  # fmt: skip


def without_new_images(space: LabelSpace, new: Samples) -> str:
    """What to add to "old classes" where some of them, but not all, have new images, which measure other things."""
    old = set(space.classes)
    return " without new images" if set() < old & set(new.classes) < old else ""


def check_classes(
    space: LabelSpace, new: Samples, memory: Samples | None, val: Samples | None, new_classes: str = "new classes"
) -> None:
    """Refuse images of classes that do not belong where they are."""
    known = set(space.classes)
    unknown = [] if memory is None else sorted(set(memory.classes) - known)
    if unknown:
        raise BranchoutError(
            f"--memory has classes that the base does not know: {some(unknown)}. It must hold images of old classes, "
            f"in folders named as the base's {len(known):,} classes. Put new classes into the folder of new images."
            + did_you_mean(unknown, space.classes)
            + LIST_CLASSES
        )
    if memory is not None and not len(memory):
        raise BranchoutError("--memory has no images. Add some, or leave --memory out.")
    if val is None:
        return
    unknown = sorted(set(val.classes) - known - set(new.classes))
    if unknown:
        raise BranchoutError(
            f"--val has classes that are neither old nor new: {some(unknown)}. Rename or remove them."
            + did_you_mean(unknown, [*space.classes, *new.classes])
        )
    if not set(val.classes) & set(new.classes):
        found = f", only of {some(val.classes)}" if val.classes else ""
        raise BranchoutError(f"--val has no images of {new_classes}{found}. Add some, or leave --val out.")


def _count(samples: Samples, what: str, notices: list[str]) -> int:
    """How many images have near-duplicates in their class, with a notice if there are any."""
    images, groups = count_grouped(near_duplicates(samples))
    if images:
        notices.append(
            f"{images:,} of {len(samples):,} {what} are near-duplicates of others of their class ({groups:,} "
            f"group{'s' if groups > 1 else ''}); the images of a group are all held out or all used for training"
        )
    return images


def _warn_of_two_classes(new: Samples, memory: Samples | None, notices: list[str], new_classes: str) -> None:
    """Name images that are in both folders, under the names of two classes."""
    pairs = [] if memory is None else find_identical(new, memory)
    both = [
        f"{new.ids[n]} = {memory.ids[m]}"
        for n, m in pairs
        if memory is not None and new.classes[new.labels[n]] != memory.classes[memory.labels[m]]
    ]
    if both:
        notices.append(
            f"{count(len(both), 'image')} of {new_classes} {'is' if len(both) == 1 else 'are'} in --memory as another "
            f"class too: {some(both)}. Delete one of each pair"
        )


def _hold_out_new(
    new: Samples, seed: int, rng: np.random.Generator, notices: list[str], new_classes: str
) -> tuple[Samples, Samples]:
    """New images to train with, and those held out; images of one group are divided only if too few are left."""
    images = np.bincount(new.labels)
    enough = int((images >= 3).sum())
    if not enough:
        raise BranchoutError(
            f"There are too few images of {new_classes} to hold any out: the largest class has "
            f"{count(int(images.max(initial=0)), 'image')}, and three are needed. Add images, or pass validation "
            "images with --val."
        )
    train, held = _hold_out(new, rng)
    if 2 * len(held.classes) < enough:
        notices.append(
            f"in {enough - len(held.classes):,} of {enough:,} {new_classes} nearly all images are near-duplicates of "
            f"one another, so near-duplicates of training images had to be held out: accuracies on {new_classes} are "
            "too high. Pass other photos with --val"
        )
        return _hold_out(new, np.random.default_rng(seed), grouped=False)
    return train, held


def _hold_out(
    samples: Samples, rng: np.random.Generator, *, old: Collection[str] = (), grouped: bool = True
) -> tuple[Samples, Samples]:
    """A fifth of each class, at least one image where it has three or more; near-duplicates stay together.

    `old` has the names of the old classes, where `samples` are kept images. Then a fifth of the images of all classes
    with two is held out too: one image each, of classes drawn at random. Of the `old` classes with a single image a
    fifth is held out, if they are so many that these images can choose an operating point. A class drawn has no image
    to train with then, but a point that no old image has chosen is worse.
    """
    groups = near_duplicates(samples) if grouped else np.arange(len(samples))
    held = np.zeros(len(samples), dtype=bool)
    of_one: list[int] = []
    of_two: list[np.ndarray] = []
    for label, name in enumerate(samples.classes):
        members = rng.permutation(np.flatnonzero(samples.labels == label))
        count = max(1, round(HELD_OUT * len(members))) if len(members) >= 3 else 0
        held[take_groups(members, groups, count)] = True
        of_one += members.tolist() if len(members) == 1 and name in old else []
        of_two += [members] if len(members) == 2 and len(np.unique(groups[members])) == 2 else []
    if old and of_two:
        drawn = rng.permutation(len(of_two))[: round(2 * HELD_OUT * len(of_two))]
        held[[of_two[n][0] for n in drawn]] = True
    if HELD_OUT * len(of_one) >= ENOUGH_OLD:
        held[rng.permutation(of_one)[: round(HELD_OUT * len(of_one))]] = True
    return samples.select(~held), samples.select(held)


def _without_training_images(
    held: Samples, new: Samples, memory: Samples | None, notices: list[str], new_classes: str
) -> Samples:
    """Validation images without those whose bytes are also in training, with a notice about them."""
    same = {n for part in (new, memory) if part is not None for n, _ in find_identical(held, part)}
    if not same:
        return held
    kept = np.array([n not in same for n in range(len(held))])
    example = held.ids[min(same)]
    if not set(held.select(kept).classes) & set(new.classes):
        raise BranchoutError(
            f"{len(same):,} of {len(held):,} validation images are identical to training images (such as {example}), "
            f"and no others of {new_classes} are left. Pass other images with --val, or leave it out."
        )
    notices.append(
        f"identical to training images, and so left out of validation: {count(len(same), 'image')}, such as {example}"
    )
    return held.select(kept)


def _warn_of_near_duplicates(held: Samples, new: Samples, memory: Samples | None, notices: list[str]) -> None:
    near = np.unique(np.concatenate([near_training(held, part) for part in (new, memory) if part is not None]))
    if len(near):
        notices.append(
            f"near-duplicates of training images among the {len(held):,} validation images: {len(near):,} (such as "
            f"{held.ids[near[0]]}); the accuracies measured on them may be too high"
        )


def _halve(held: Samples, new: Collection[str], rng: np.random.Generator) -> tuple[Samples, Samples]:
    """Dev and test. New and old images are halved separately, each beginning with dev, which must have both."""
    is_new = held.mask(new)
    first = np.zeros(len(held), dtype=bool)
    groups = near_duplicates(held)
    for part in (np.flatnonzero(is_new), np.flatnonzero(~is_new)):
        first[part] = _half(held.labels[part], groups[part], rng)
    return held.select(first), held.select(~first)


def _half(labels: np.ndarray, groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A mask of half the images of each class. The odd image of a class goes to either side in turn, from class to
    class, first to the one marked. Images of one group are on the side of the first of them.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    leaders = order[np.sort(np.unique(groups[order], return_index=True)[1])]
    return np.isin(groups, groups[leaders[::2]])


def _take_calibration(dev: Samples, new: Collection[str], rng: np.random.Generator) -> tuple[Samples, Samples]:
    """Half of the dev images of new classes calibrate pseudo-exemplars; all others still choose."""
    part = np.flatnonzero(dev.mask(new))
    chooses = np.ones(len(dev), dtype=bool)
    chooses[part] = _half(dev.labels[part], near_duplicates(dev)[part], rng)
    return dev.select(chooses), dev.select(~chooses)


def _with_origin(memory: Samples, space: LabelSpace) -> Samples:
    """Images that have an origin keep it; those of a folder belong to the branch that first learned their class."""
    first = {name: d for d in reversed(range(len(space.branches))) for name in space.branches[d]}
    by_class = np.array([first[name] for name in memory.classes])[memory.labels]
    known = (memory.origin >= 0) & (memory.origin < len(space.branches))
    return memory.with_origin(np.where(known, memory.origin, by_class))
