"""Drawing a scenario from a dataset: which classes and samples the base and the steps get is random, by a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from branchout.data.datasets import Dataset
from branchout.data.samples import Samples
from branchout.data.scenarios import CLUSTERED, FROM_GIVEN, NAMES, Scenario, members_in_id_order, sample_digest
from branchout.errors import BranchoutError, some, unknown
from branchout.files import open_regular
from branchout.labels import Ints

Floats = npt.NDArray[np.floating]
Item = TypeVar("Item")
Shuffler = np.random.Generator | np.random.RandomState


@dataclass(frozen=True)
class TrainedBase:
    """A base that is already trained, so that only the new classes are drawn."""

    classes: tuple[str, ...]
    """In the order of its columns, which the scenario keeps."""
    sides: Mapping[str, str] = field(default_factory=dict)
    """Of classes of which it was trained on some samples only: a digit per training sample, 0 for those."""


def draw_scenario(
    name: str,
    dataset: Dataset,
    *,
    base: int | None = None,
    novel: int,
    overlap: int = 5,
    steps: int = 1,
    seed: int = 0,
    features: Floats | None = None,
    given: TrainedBase | None = None,
    published_order: bool = False,
) -> Scenario:
    """Draw a scenario: `base` classes (None: all that are left) and `novel` more at each of `steps` steps.

    `overlap` of the novel classes are base classes too, in the overlapping scenarios. Clustered scenarios need
    `features`: one row per training sample, from a network trained on all classes. With a `given` base only the novel
    classes are drawn. `published_order` shuffles classes by NumPy's older generator, as many published experiments do
    with the seed 1993; a change of style and a given base have no published order.
    """
    shared = _check_numbers(name, base, novel, overlap, steps)
    rng = np.random.default_rng(seed)
    merged: dict[str, str] = {}
    sides: Mapping[str, str] = {}
    if given is not None:
        branches, sides = _beside(given, name, dataset, base, novel, steps, rng), given.sides
    elif name == "overlap-style":
        branches, sides, merged = _style_change(dataset, base, novel, overlap, rng)
    else:
        by = np.random.RandomState(seed % 2**32) if published_order else rng
        branches = _draw_classes(name, dataset, base, novel, steps, shared, by)
        used = list(dict.fromkeys(each for names in branches for each in names))
        if name in CLUSTERED:
            sides = _cluster(dataset.train, used, features, seed)
        elif shared:
            sides = _halve(dataset.train, used, rng)
    wanted = {each for names in branches for each in names}
    used = [each for each in dataset.train.classes if merged.get(each, each) in wanted]
    unseen = sorted(set(used) - set(dataset.val.classes))
    if unseen:
        raise BranchoutError(
            f"these classes have no validation images: {some(unseen, 10)}. Without a val/ folder some images of each "
            "class are held out, which needs at least 4 images; add images, or leave these classes out"
        )
    dev_or_test = _halve(dataset.val, used, rng)
    base_classes = sorted(branches[0]) if given is None else given.classes
    return Scenario(
        name=name,
        dataset=dataset.name,
        seed=seed,
        branches=(tuple(base_classes), *(tuple(sorted(names)) for names in branches[1:])),
        dev_or_test=dev_or_test,
        merged=merged,
        sides=dict(sides),
        samples=sample_digest(dataset, dev_or_test),
    )


def _check_numbers(name: str, base: int | None, novel: int, overlap: int, steps: int) -> int:
    """Raise for numbers that the scenario cannot have; returns how many novel classes are base classes too."""
    if name not in NAMES:
        raise unknown("scenario", name, NAMES)
    for what, number in (("base", base), ("novel", novel), ("steps", steps)):
        if number is not None and number < 1:
            raise BranchoutError(f"--{what} must be at least 1, found {number}")
    if steps > 1 and name != "steps":
        raise BranchoutError(f"{steps} steps were asked for, but '{name}' has one; the scenario with many is 'steps'")
    overlapping = name.startswith("overlap")
    shared = novel if name == "overlap-full" else overlap if overlapping else 0
    if overlapping and not 1 <= shared <= novel:
        raise BranchoutError(f"--overlap must lie between 1 and the {novel} novel classes, found {shared}")
    return shared


# Which classes.


def _shuffled(items: Sequence[Item], rng: Shuffler) -> list[Item]:
    return [items[i] for i in rng.permutation(len(items))]


def _draw_classes(
    name: str, dataset: Dataset, base: int | None, novel: int, steps: int, shared: int, rng: Shuffler
) -> list[list[str]]:
    """The classes of the base and of each step; the first `shared` novel classes are base classes."""
    base_pool = novel_pool = list(dataset.train.classes)
    if "domain" in name:
        if not dataset.domains or not dataset.base_domain:
            example = '{"domains": {"class name": "domain", …}, "base_domain": "domain of the base"}'
            raise _facts_missing(dataset, "domains of its classes", example)
        base_pool = [each for each in novel_pool if dataset.domains.get(each) == dataset.base_domain]
        novel_pool = [each for each in novel_pool if each not in set(base_pool)]
    new = novel * steps - shared
    same_pool = base_pool == novel_pool
    beside = new if same_pool else 0
    if base is None:  # all that are left, but at least one
        base = max(len(base_pool) - beside, 1)
    _require("base and novel" if same_pool else "base", base_pool, base + beside, dataset)
    if not same_pool:
        _require("novel", novel_pool, new, dataset)
    _require_base(base, shared)
    order = _shuffled(base_pool, rng)
    fresh = order[base:] if same_pool else _shuffled(novel_pool, rng)
    return [order[:base], *_in_steps(order[:shared] + fresh[:new], novel, steps)]


def _in_steps(names: list[str], novel: int, steps: int) -> list[list[str]]:
    return [names[t * novel : (t + 1) * novel] for t in range(steps)]


def _beside(
    given: TrainedBase, name: str, dataset: Dataset, base: int | None, novel: int, steps: int, rng: np.random.Generator
) -> list[list[str]]:
    """New classes for a base that is already trained, drawn from those it does not know."""
    if name not in FROM_GIVEN:
        raise BranchoutError(
            f"'{name}' decides which classes and images the base is trained on, but the base given is already trained. "
            f"Scenarios that start from any base: {', '.join(FROM_GIVEN)}"
        )
    known = set(dataset.train.classes)
    absent = [each for each in given.classes if each not in known]
    if absent:
        raise BranchoutError(
            f"{len(absent):,} of the base's {len(given.classes):,} classes have no training images in "
            f"'{dataset.name}': {some(absent)}. Use the data the base was trained on, with the new classes added"
        )
    if base not in (None, len(given.classes)):
        raise BranchoutError(f"{base} base classes were asked for, but the base given has {len(given.classes)}")
    rest = sorted(known - set(given.classes))
    if novel * steps > len(rest):
        raise BranchoutError(
            f"{novel * steps} new classes were asked for, but '{dataset.name}' has {len(rest)} that the base does not "
            "know; ask for fewer with --novel-classes, or add some to the data"
        )
    return [list(given.classes), *_in_steps(_shuffled(rest, rng), novel, steps)]


def _style_change(
    dataset: Dataset, base: int | None, novel: int, overlap: int, rng: np.random.Generator
) -> tuple[list[list[str]], dict[str, str], dict[str, str]]:
    """Overlapping classes whose base samples and new samples are of different styles: branches, sides, merged."""
    merged: dict[str, str] = {}
    sides: dict[str, str] = {}
    if dataset.style_sides:
        on_side = _style_digits(dataset)
        candidates = [name for name in dataset.train.classes if {"0", "1"} <= set(on_side[name])]
        _require("overlapping", candidates, overlap, dataset)
        shared = _shuffled(candidates, rng)[:overlap]
        sides = {name: on_side[name] for name in shared}
    elif dataset.siblings:
        _require("overlapping (pairs of siblings)", dataset.siblings, overlap, dataset)
        pairs = _shuffled(dataset.siblings, rng)[:overlap]
        counts = dataset.train.counts()
        shared = [name for name, _, _ in pairs]
        for name, first, second in pairs:
            merged |= {first: name, second: name}
            sides |= {first: "0" * counts[first], second: "1" * counts[second]}
    else:
        example = '{"siblings": [["corgi", "Pembroke", "Cardigan"], …]}'
        raise _facts_missing(dataset, "styles or sibling classes", example)
    free = [name for name in dataset.train.classes if name not in sides]
    base = max(len(free) - (novel - overlap) + overlap, overlap) if base is None else base
    _require_base(base, overlap)
    _require("base and novel", free, base + novel - 2 * overlap, dataset)
    order = _shuffled(free, rng)
    split = base - overlap
    return [shared + order[:split], shared + order[split : split + novel - overlap]], sides, merged


def _facts_missing(dataset: Dataset, what: str, example: str) -> BranchoutError:
    return BranchoutError(
        f"'{dataset.name}' has no {what}. Put a classes.json into its folder, or give one with --classes where a "
        f"command takes it: {example}"
    )


def _require(what: str, pool: Sequence[object], wanted: int, dataset: Dataset) -> None:
    if wanted > len(pool):
        raise BranchoutError(f"{wanted} {what} classes were asked for, but '{dataset.name}' has {len(pool)}")


def _require_base(base: int, shared: int) -> None:
    if base < shared:
        raise BranchoutError(f"{shared} classes cannot be shared with a base of {base} classes")


# Dividing the samples of a class.


def _halve(samples: Samples, classes: Sequence[str], rng: np.random.Generator) -> dict[str, str]:
    """Two random halves of each class; of an odd number the first half gets the smaller part."""
    counts = samples.counts()
    alone = [name for name in classes if counts[name] < 2]
    if alone:
        raise BranchoutError(
            f"a class needs at least 2 training and 2 validation images to be halved: {some(alone, 10)}"
        )
    return {name: as_digits(rng.permutation(counts[name]) >= counts[name] // 2) for name in classes}


def _cluster(samples: Samples, classes: Sequence[str], features: Floats | None, seed: int) -> dict[str, str]:
    """Two clusters of each class (K-Means, K=2); which of them is the base's is drawn."""
    if features is None or len(features) != len(samples):
        found = "none were given" if features is None else f"{len(features)} rows were given"
        raise BranchoutError(
            f"samples are split by clustering their features, one row for each of {len(samples)} training samples; "
            f"{found}. Give a saved model that knows the classes with --model, or a .npy file with --features"
        )
    rng = np.random.default_rng(seed)
    members = members_in_id_order(samples)
    halves = {}
    for name in classes:
        rows = features[members[name]].astype(np.float64)
        if len(np.unique(rows, axis=0)) < 2:
            raise BranchoutError(f"the samples of class {name!r} all have the same features and cannot be clustered")
        halves[name] = as_digits(_two_means(rows, rng) == rng.integers(2))
    return halves


def _two_means(rows: Floats, rng: np.random.Generator) -> Ints:
    """The best of a few runs of K-Means with two clusters, none of them empty."""
    from scipy.cluster.vq import kmeans2  # scikit-learn's costs fifty times more for a thousand small problems

    best, least = np.zeros(len(rows), dtype=np.int64), np.inf
    while not np.isfinite(least):
        for _ in range(4):
            centres, cluster = kmeans2(rows, 2, minit="++", missing="warn", rng=rng)
            spread = ((rows - centres[cluster]) ** 2).sum()
            if spread < least and 0 < cluster.sum() < len(rows):
                best, least = cluster, spread
    return best


def _style_digits(dataset: Dataset) -> dict[str, str]:
    """A digit per training sample: 0 if its style is the base's, 1 if it is the other side's."""
    assert dataset.style_sides is not None
    first, second = dataset.style_sides
    style = dataset.train.attributes["style"]
    outside = sorted(set(style.tolist()) - first - second)
    if outside:
        raise BranchoutError(f"these styles are on neither side: {some(outside, 10)}")
    new_style = np.isin(style, sorted(second))
    return {name: as_digits(new_style[members]) for name, members in members_in_id_order(dataset.train).items()}


def as_digits(second: npt.NDArray[np.bool_]) -> str:
    return "".join("1" if value else "0" for value in second)


def read_features(path: Path) -> Floats:
    """The features of a .npy file, one row per training sample."""
    try:
        with open_regular(path) as file:
            rows = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise BranchoutError(f"{path} is not a readable .npy file of features: {error}") from None
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.dtype.kind != "f" or not np.isfinite(rows).all():
        raise BranchoutError(f"{path} is not a table of features: expected finite numbers, one row per training sample")
    return rows
