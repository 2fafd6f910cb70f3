"""The paper's scenarios (section 5.1): which classes and which samples the base and each step are given.

A scenario is a plan, not data: class names and, where a class is shared out, one digit per sample. It applies to any
dataset with the same samples, and travels as one JSON file so that others can use the very same split.

- `disjoint`, `disjoint-domain`: base classes and other, novel classes, the latter from another domain;
- `steps`: base classes, then T steps of n classes each;
- `overlap-{random,domain}-{shuffled,clustered}`: some novel classes are base classes too. *Every* class is halved, at
  random or by K-Means, and the base uses first halves, the step second halves;
- `overlap-style`: overlapping classes look different on the two sides: two sibling classes merged into one, or one
  class in two sets of styles;
- `overlap-full`: all novel classes are base classes; halved by K-Means as in the paper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from branchout.data.dataset import Dataset
from branchout.data.samples import UNASSIGNED, Samples, concatenate, digest
from branchout.errors import BranchoutError, unknown
from branchout.labels import LabelSpace, branch_name

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]

NAMES = (
    "disjoint",
    "disjoint-domain",
    "steps",
    "overlap-random-shuffled",
    "overlap-random-clustered",
    "overlap-domain-shuffled",
    "overlap-domain-clustered",
    "overlap-style",
    "overlap-full",
)
CLUSTERED = ("overlap-random-clustered", "overlap-domain-clustered", "overlap-full")
FROM_GIVEN = ("disjoint", "steps")
"""Those that need nothing special of the base: whatever classes it has, the new ones are others."""
FORMAT = "branchout-scenario-1"


@dataclass(frozen=True)
class Given:
    """A base that is trained already, so that only the new classes are left to draw."""

    classes: tuple[str, ...]
    """In the order of its answers, which the scenario keeps."""
    sides: Mapping[str, str] = field(default_factory=dict)
    """Of classes of which it has seen only some samples: a digit per training sample, 0 if it was seen."""


@dataclass(frozen=True)
class Scenario:
    """Which classes and samples each branch is given, and which validation images choose (dev) or report (test)."""

    name: str
    dataset: str
    seed: int
    branches: tuple[tuple[str, ...], ...]
    """Class names of the base and of every step."""
    dev_or_test: Mapping[str, str]
    """Dataset class → a digit per validation sample in the order of their ids: 0 is dev, 1 is test."""
    merged: Mapping[str, str] = field(default_factory=dict)
    """Dataset class → the class it has become part of."""
    sides: Mapping[str, str] = field(default_factory=dict)
    """Dataset class → a digit per training sample in the order of their ids: 0 goes to the base, 1 to a step."""
    samples: str = ""
    """A digest of the sample ids the digits refer to."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """Of a clustered scenario: how the network was trained whose features decided, if that is known."""

    @property
    def space(self) -> LabelSpace:
        return LabelSpace(self.branches)

    # Applying the plan to the dataset's samples.

    def train(self, dataset: Dataset) -> Samples:
        """The training samples in use, each with its origin and, if merged, its new class name."""
        self._check(dataset)
        side = digits(dataset.train, self.sides, default=-1)
        merged = dataset.train.rename(self.merged)
        given = []
        for origin, classes in enumerate(self.branches):
            of_branch = np.isin(merged.labels, [i for i, name in enumerate(merged.classes) if name in set(classes)])
            on_side = (side == -1) | (side == (0 if origin == 0 else 1))
            given.append(merged.select(of_branch & on_side).placed(origin))
        return concatenate(given)

    def dev(self, dataset: Dataset, step: int | None = None) -> Samples:
        """Validation images to choose with, of the classes known after `step` steps (all of them by default)."""
        return self._half(dataset, 0, step)

    def test(self, dataset: Dataset, step: int | None = None) -> Samples:
        """Validation images to report on, never those of `dev`."""
        return self._half(dataset, 1, step)

    def _half(self, dataset: Dataset, digit: int, step: int | None) -> Samples:
        self._check(dataset)
        half = dataset.val.select(digits(dataset.val, self.dev_or_test, default=-1) == digit).rename(self.merged)
        space = self.space if step is None else self.space.upto(step)
        return half.of_classes(space.classes).placed(UNASSIGNED)

    def _check(self, dataset: Dataset) -> None:
        found = sample_digest(dataset, self.dev_or_test)
        if found != self.samples:
            raise BranchoutError(
                f"this scenario was made from other samples: it names {len(self.dev_or_test)} classes of "
                f"'{self.dataset}', and the samples of those classes in '{dataset.name}' are not the same. "
                "Use the dataset it was made from, with the same number of samples a class, or build it anew."
            )

    # The file.

    def save(self, path: Path) -> None:
        plan = {"format": FORMAT, **asdict(self)}
        if not self.network:
            del plan["network"]
        try:
            path.write_text(json.dumps(plan, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise BranchoutError(f"the scenario could not be written to {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> Scenario:
        try:
            plan = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BranchoutError(
                f"no scenario file {path}; make one with: branchout scenario NAME DATA --out {path}"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BranchoutError(f"{path} is not a scenario file: {error}") from None
        if not isinstance(plan, dict) or plan.pop("format", None) != FORMAT:
            raise BranchoutError(f"{path} is not a scenario file: expected the format '{FORMAT}'")
        expected = {part.name for part in fields(cls)}
        if {*plan, "network"} != expected:
            wrong = sorted({*plan, "network"} ^ expected)
            raise BranchoutError(f"{path}: missing or unknown entries: {', '.join(wrong)}")
        return cls(**{**plan, "branches": tuple(tuple(names) for names in plan["branches"])})

    def __str__(self) -> str:
        parts = " + ".join(f"{len(names)}" for names in self.branches)
        shared = self.space.overlap
        return f"{self.name} on {self.dataset}: {parts} classes" + (f", {len(shared)} of them shared" if shared else "")


def build(
    name: str,
    dataset: Dataset,
    *,
    base: int | None = None,
    novel: int,
    overlap: int = 5,
    steps: int = 1,
    seed: int = 0,
    features: Floats | None = None,
    given: Given | None = None,
) -> Scenario:
    """Draw a scenario: `base` classes (None: all that are left) and `novel` more at each of `steps` steps.

    `overlap` of the novel classes are base classes too, in the overlapping scenarios. Clustered scenarios need
    `features`: one row per training sample, from a network trained on all classes. With a `given` base only the novel
    classes are drawn.
    """
    if name not in NAMES:
        raise unknown("scenario", name, NAMES)
    for what, number in (("base", base), ("novel", novel), ("steps", steps)):
        if number is not None and number < 1:
            raise BranchoutError(f"--{what} must be at least 1, found {number}")
    if steps > 1 and name != "steps":
        raise BranchoutError(f"{steps} steps were asked for, and '{name}' has one; the scenario with many is 'steps'")
    rng = np.random.default_rng(seed)
    if given is not None:
        return _beside(given, name, dataset, base, novel, steps, seed, rng)
    if name == "overlap-style":
        return _style_change(dataset, base, novel, overlap, seed, rng)

    overlapping = name.startswith("overlap")
    shared = novel if name == "overlap-full" else overlap if overlapping else 0
    if overlapping and not 1 <= shared <= novel:
        raise BranchoutError(f"--overlap must lie between 1 and the {novel} novel classes, found {shared}")
    base_pool, novel_pool = _pools(dataset, by_domain="domain" in name)
    new = novel * steps - shared
    same_pool = base_pool == novel_pool
    if base is None:  # all that are left, but at least one
        base = max(len(base_pool) - (new if same_pool else 0), 1)
    _enough("base and novel" if same_pool else "base", base_pool, base + (new if same_pool else 0), dataset)
    if not same_pool:
        _enough("novel", novel_pool, new, dataset)
    if overlapping and shared > base:
        raise BranchoutError(f"{shared} classes cannot be shared with a base of {base} classes")

    order = [base_pool[i] for i in rng.permutation(len(base_pool))]
    base_classes = order[:base]
    fresh = order[base:] if same_pool else [novel_pool[i] for i in rng.permutation(len(novel_pool))]
    taught = base_classes[:shared] + fresh[:new]
    branches = [base_classes, *(taught[t * novel : (t + 1) * novel] for t in range(steps))]
    sides: dict[str, str] = {}
    if overlapping:
        used = list(dict.fromkeys([*base_classes, *taught]))
        sides = _cluster(dataset.train, used, features, seed) if name in CLUSTERED else _halve(dataset.train, used, rng)
    return _plan(name, dataset, seed, branches, rng, sides=sides)


def _beside(
    given: Given,
    name: str,
    dataset: Dataset,
    base: int | None,
    novel: int,
    steps: int,
    seed: int,
    rng: np.random.Generator,
) -> Scenario:
    """New classes for a base that is there already, drawn from those it does not know."""
    if name not in FROM_GIVEN:
        raise BranchoutError(
            f"'{name}' decides which classes and images the base is trained on, and the base that was given has been "
            f"trained. Scenarios that start from any base: {', '.join(FROM_GIVEN)}"
        )
    known = set(dataset.train.classes)
    absent = [each for each in given.classes if each not in known]
    if absent:
        shown = ", ".join(absent[:5]) + (", …" if len(absent) > 5 else "")
        raise BranchoutError(
            f"{len(absent):,} of the base's {len(given.classes):,} classes have no training images in "
            f"'{dataset.name}': {shown}. Give the data the base was trained on, new classes included"
        )
    if base not in (None, len(given.classes)):
        raise BranchoutError(f"{base} base classes were asked for, and the base given has {len(given.classes)}")
    rest = sorted(known - set(given.classes))
    if novel * steps > len(rest):
        raise BranchoutError(
            f"{novel * steps} new classes were asked for, and '{dataset.name}' has {len(rest)} that the base does not "
            "know; ask for fewer with --novel-classes, or add some to the data"
        )
    order = [rest[i] for i in rng.permutation(len(rest))]
    taught = [order[t * novel : (t + 1) * novel] for t in range(steps)]
    plan = _plan(name, dataset, seed, [given.classes, *taught], rng, sides=given.sides)
    return replace(plan, branches=(given.classes, *plan.branches[1:]))


def _pools(dataset: Dataset, *, by_domain: bool) -> tuple[list[str], list[str]]:
    """The classes a base and a step may be given: the same pool, or one domain against all others."""
    classes = list(dataset.train.classes)
    if not by_domain:
        return classes, classes
    if not dataset.domains or not dataset.base_domain:
        raise BranchoutError(
            f"'{dataset.name}' does not say which domain a class belongs to. Put a classes.json into its folder, "
            "or give one with --classes where a command takes it: "
            '{"domains": {"class name": "domain", …}, "base_domain": "domain of the base"}'
        )
    inside = [name for name in classes if dataset.domains.get(name) == dataset.base_domain]
    return inside, [name for name in classes if name not in set(inside)]


def _enough(what: str, pool: Sequence[str], wanted: int, dataset: Dataset) -> None:
    if wanted > len(pool):
        raise BranchoutError(
            f"{wanted} {what} classes were asked for, and '{dataset.name}' has {len(pool)} to draw from"
        )


def _style_change(
    dataset: Dataset, base: int | None, novel: int, overlap: int, seed: int, rng: np.random.Generator
) -> Scenario:
    """Overlapping classes whose base samples and new samples are of different styles."""
    if not 1 <= overlap <= novel:
        raise BranchoutError(f"--overlap must lie between 1 and the {novel} novel classes, found {overlap}")
    classes = list(dataset.train.classes)
    merged: dict[str, str] = {}
    sides: dict[str, str] = {}
    if dataset.style_sides:
        on_side = _style_digits(dataset)
        candidates = [name for name in classes if {"0", "1"} <= set(on_side[name])]
        _enough("overlapping", candidates, overlap, dataset)
        shared = [candidates[i] for i in rng.permutation(len(candidates))[:overlap]]
        sides = {name: on_side[name] for name in shared}
        taken = set(shared)
    elif dataset.siblings:
        _enough("overlapping (pairs of siblings)", [pair[0] for pair in dataset.siblings], overlap, dataset)
        pairs = [dataset.siblings[i] for i in rng.permutation(len(dataset.siblings))[:overlap]]
        counts = dataset.train.counts()
        shared = [name for name, _, _ in pairs]
        for name, first, second in pairs:
            merged |= {first: name, second: name}
            sides |= {first: "0" * counts[first], second: "1" * counts[second]}
        taken = set(merged)
    else:
        raise BranchoutError(
            f"'{dataset.name}' names neither styles nor sibling classes. Put a classes.json into its folder, "
            "or give one with --classes where a command takes it: "
            '{"siblings": [["corgi", "Pembroke", "Cardigan"], …]}'
        )
    free = [name for name in classes if name not in taken]
    base = max(len(free) - (novel - overlap) + overlap, overlap) if base is None else base
    if base < overlap:
        raise BranchoutError(f"{overlap} classes cannot be shared with a base of {base} classes")
    _enough("base and novel", free, base + novel - 2 * overlap, dataset)
    order = [free[i] for i in rng.permutation(len(free))]
    split = base - overlap
    branches = [shared + order[:split], shared + order[split : split + novel - overlap]]
    return _plan("overlap-style", dataset, seed, branches, rng, merged=merged, sides=sides)


def _plan(
    name: str,
    dataset: Dataset,
    seed: int,
    branches: Sequence[Sequence[str]],
    rng: np.random.Generator,
    *,
    merged: Mapping[str, str] | None = None,
    sides: Mapping[str, str] | None = None,
) -> Scenario:
    merged = dict(merged or {})
    wanted = {name for names in branches for name in names}
    used = [name for name in dataset.train.classes if merged.get(name, name) in wanted]
    unseen = sorted(set(used) - set(dataset.val.classes))
    if unseen:
        raise BranchoutError(
            f"these classes have no validation images: {', '.join(unseen[:10])}. Without a val/ folder some images of "
            "each class are held out, which takes at least 4; add images, or leave these classes out"
        )
    dev_or_test = _halve(dataset.val, used, rng)
    return Scenario(
        name=name,
        dataset=dataset.name,
        seed=seed,
        branches=tuple(tuple(sorted(names)) for names in branches),
        dev_or_test=dev_or_test,
        merged=merged,
        sides=dict(sides or {}),
        samples=sample_digest(dataset, dev_or_test),
    )


# Sharing out the samples of a class. Digits are written in the order of the sample ids, so that they mean the same
# samples whatever order a folder was read in.


def digits(samples: Samples, written: Mapping[str, str], default: int) -> Ints:
    """The digit of every sample; `default` for samples of classes that have none."""
    out = np.full(len(samples), default, dtype=np.int64)
    by_label = _members_in_id_order(samples)
    for name, text in written.items():
        if name in by_label:
            out[by_label[name]] = np.frombuffer(text.encode(), dtype=np.uint8) - ord("0")
    return out


def sample_digest(dataset: Dataset, classes: Mapping[str, str]) -> str:
    """Identifies the training and validation samples of these classes, wherever they lie."""
    parts: list[str] = []
    for table in (dataset.train, dataset.val):
        members = _members_in_id_order(table)
        parts += [digest(name, *table.ids[members[name]].tolist()) for name in sorted(classes) if name in members]
    return digest(*parts)


def _members_in_id_order(samples: Samples) -> dict[str, Ints]:
    """Every class's positions, sorted by id; one sort for all classes."""
    order = np.lexsort((samples.ids, samples.labels))
    ends = np.cumsum(np.bincount(samples.labels, minlength=len(samples.classes)))[:-1]
    return dict(zip(samples.classes, np.split(order, ends), strict=True))


def _halve(samples: Samples, classes: Sequence[str], rng: np.random.Generator) -> dict[str, str]:
    """Two random halves of each class; of an odd number the first half gets the smaller part."""
    counts = samples.counts()
    alone = [name for name in classes if counts[name] < 2]
    if alone:
        raise BranchoutError(
            f"a class needs at least 2 training and 2 validation images to be halved: {', '.join(alone[:10])}"
        )
    halves = {}
    for name in classes:
        count = counts[name]
        halves[name] = _text(rng.permutation(count) >= count // 2)
    return halves


def _cluster(samples: Samples, classes: Sequence[str], features: Floats | None, seed: int) -> dict[str, str]:
    """Two clusters of each class (K-Means, K=2); which of them is the base's is drawn."""
    if features is None or len(features) != len(samples):
        found = "none were given" if features is None else f"{len(features)} rows were given"
        raise BranchoutError(
            f"samples are split by clustering their features, one row for each of {len(samples)} training samples; "
            f"{found}. Give a saved model that knows the classes with --model, or a .npy file with --features"
        )
    rng = np.random.default_rng(seed)
    members = _members_in_id_order(samples)
    halves = {}
    for name in classes:
        rows = features[members[name]].astype(np.float64)
        if len(np.unique(rows, axis=0)) < 2:
            raise BranchoutError(f"the samples of class {name!r} all have the same features and cannot be clustered")
        halves[name] = _text(_two_means(rows, rng) == rng.integers(2))
    return halves


def _two_means(rows: Floats, rng: np.random.Generator, starts: int = 4) -> Ints:
    """The best of a few runs of K-Means with two clusters, none of them empty."""
    from scipy.cluster.vq import kmeans2  # scikit-learn's costs fifty times more for a thousand small problems

    best, least = np.zeros(len(rows), dtype=np.int64), np.inf
    while not np.isfinite(least):
        for _ in range(starts):
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
        raise BranchoutError(f"these styles are on neither side: {', '.join(outside[:10])}")
    new_style = np.isin(style, sorted(second))
    return {name: _text(new_style[members]) for name, members in _members_in_id_order(dataset.train).items()}


def _text(second: npt.NDArray[np.bool_]) -> str:
    return "".join("1" if value else "0" for value in second)


def describe(scenario: Scenario, dataset: Dataset) -> list[tuple[str, int, int]]:
    """Rows of (split, classes, images) for a table a person reads."""
    train = scenario.train(dataset)
    rows = []
    for number, names in enumerate(scenario.branches):
        rows.append((branch_name(number), len(names), int((train.origin == number).sum())))
    rows.append(("dev", len(scenario.space.classes), len(scenario.dev(dataset))))
    rows.append(("test", len(scenario.space.classes), len(scenario.test(dataset))))
    return rows
