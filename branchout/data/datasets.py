"""Datasets: the type, what is known of its classes, and any folder of class folders as a dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from branchout.data.near_duplicates import near_duplicates, take_groups
from branchout.data.samples import Samples, digest
from branchout.errors import BranchoutError, some, unknown
from branchout.files import read_json
from branchout.units import count

FACTS = "classes.json"
"""What a dataset's folder may say of its classes."""
_FACTS_EXAMPLE = """{"domains": {"class name": "domain", …}, "base_domain": "the base's domain",
 "siblings": [["name of both together", "one class", "another class"], …]}"""

HELD_OUT = 0.2
"""The share of each class that is held out where a folder has no validation images."""
_TRAIN, _VAL = ("train", "training"), ("val", "valid", "validation", "test")
_OWN = "your own images: a folder with one folder per class, or with train/ and val/ that hold one folder per class"


@dataclass(frozen=True)
class Dataset:
    """Training samples to learn from and validation samples to choose and to report on."""

    name: str
    train: Samples
    val: Samples
    kind: str = "photo"
    """What the images are, which decides their augmentation: `photo` or `glyph`."""
    domains: Mapping[str, str] = field(default_factory=dict)
    """Class name → domain, such as animate or inanimate, or a group of scripts."""
    base_domain: str = ""
    """The domain the base model is trained on when a scenario changes the domain."""
    siblings: tuple[tuple[str, str, str], ...] = ()
    """(name of the merged class, first sibling, second sibling): pairs that a style change can merge."""
    style_sides: tuple[frozenset[str], frozenset[str]] | None = None
    """Two disjoint sets of styles, where a class occurs in several: a style change gives the base the first."""


def resolve(text: str, *, problems: list[str] | None = None, classes_from: str | None = None) -> Dataset:
    """The dataset of a name or folder: `glyphs`, which is built in, or a folder whose layout tells which dataset it is.

    What was wrong with the files of an ordinary folder is added to `problems`; those of published datasets are only
    listed. `classes_from` says how nested class folders are read, as in `folders.scan`.
    """
    from branchout.data import published_datasets
    from branchout.data.tar_shards import are_shards

    if text == "glyphs":
        from branchout.data.glyphs import glyphs

        return glyphs()
    root = Path(text).expanduser()
    if are_shards(root):
        return folder(root, problems=problems)
    if root.is_file():
        raise BranchoutError(f"{root} is a file; a dataset is a folder with one folder per class, or 'glyphs'")
    if not root.is_dir():
        layouts = "\n".join(f"  {layout}" for layout in (*published_datasets.LAYOUTS, _OWN))
        raise BranchoutError(
            f"no dataset {text!r}: it is not built in, and there is no folder {root.absolute()}\n"
            "Built in: glyphs\n"
            f"Any other dataset is given by its folder:\n{layouts}"
        )
    return published_datasets.open_published(root) or folder(root, problems=problems, classes_from=classes_from)


def folder(
    root: str | os.PathLike[str],
    *,
    problems: list[str] | None = None,
    classes_from: str | None = None,
) -> Dataset:
    """A folder of class folders. `train/` and `val/` (or `test/`) in it are used as they are.

    Without them a part of each class is held out as `val`: at least one image where a class has two.
    `classes.json` beside the class folders may give their domains and siblings. What was wrong with the files is added
    to `problems`.
    """
    root = Path(root)
    splits = {path.name.lower(): path.name for path in sorted(root.iterdir()) if path.is_dir()} if root.is_dir() else {}
    train_name, val_name = (next((splits[n] for n in names if n in splits), "") for names in (_TRAIN, _VAL))
    if train_name and val_name and all(any(root.glob(f"{name}/[!.]*/")) for name in (train_name, val_name)):
        train, val = (below(name, _scan(root / name, problems, classes_from)) for name in (train_name, val_name))
        require_known(root, train, val)
    else:
        train, val = _hold_out(_scan(root, problems, classes_from))
    dataset = Dataset(root.absolute().name, train, val)
    return with_facts(dataset, root / FACTS, partial=True) if _has_facts(root / FACTS) else dataset


def _has_facts(path: Path) -> bool:
    """Whether a file of that name is for us: other programs write such files too."""
    with suppress(BranchoutError):
        found = read_json(path)
        if isinstance(found, dict):
            return isinstance(found.get("domains"), dict) or isinstance(found.get("siblings"), list)
    return False


def with_facts(dataset: Dataset, path: Path, *, partial: bool = False) -> Dataset:
    """The dataset with domains and siblings of its classes from the user's own JSON file.

    With `partial` the dataset may lack some of the classes in the file.
    """
    facts = read_json(path)
    try:
        domains = {str(name): str(domain) for name, domain in facts.get("domains", {}).items()}
        siblings = tuple((str(both), str(one), str(other)) for both, one, other in facts.get("siblings", []))
        base_domain = str(facts.get("base_domain", ""))
    except (ValueError, TypeError, AttributeError) as error:
        raise BranchoutError(
            f"{path} does not describe classes ({error}). Expected JSON such as\n{_FACTS_EXAMPLE}"
        ) from None
    known = dataset.train.classes
    if partial:
        domains = {name: domain for name, domain in domains.items() if name in known}
        siblings = tuple(pair for pair in siblings if {pair[1], pair[2]} <= set(known))
        base_domain = base_domain if base_domain in domains.values() else ""
    for name in [*domains, *(name for _, *pair in siblings for name in pair)]:
        if name not in known:
            raise BranchoutError(f"{path}: {unknown('class', name, known)}")
    if base_domain not in {"", *domains.values()}:
        raise BranchoutError(f"{path}: base_domain is {base_domain!r}, but no class has that domain")
    return replace(
        dataset,
        domains=domains or dataset.domains,
        base_domain=base_domain or dataset.base_domain,
        siblings=siblings or dataset.siblings,
        style_sides=None if siblings else dataset.style_sides,
    )


def _scan(root: Path, problems: list[str] | None, classes_from: str | None) -> Samples:
    from branchout.data.folders import scan  # it loads Pillow, which the built-in dataset's table does not need

    samples, found = scan(root, classes_from=classes_from)
    if problems is not None:
        problems += found.summary()
    return samples


def _hold_out(samples: Samples) -> tuple[Samples, Samples]:
    """By a hash of each sample's id, so that an image added later moves few others across.

    Near-duplicates stay together, unless a class has nothing else.
    """
    groups = near_duplicates(samples)
    draw = np.array([digest("0", str(name)) for name in samples.ids], dtype=np.str_)  # another text, another choice
    held = np.zeros(len(samples), dtype=bool)
    for label in range(len(samples.classes)):
        members = np.flatnonzero(samples.labels == label)
        count = max(1, round(HELD_OUT * len(members))) if len(members) > 1 else 0
        members = members[np.argsort(draw[members])]
        whole = take_groups(members, groups, count)
        held[whole if len(whole) else members[:count]] = True
    return samples.select(~held), samples.select(held)


def below(split: str, samples: Samples) -> Samples:
    """Put the split into the ids, which then differ between splits: `train/robin/one.jpg`."""
    return replace(samples, ids=np.char.add(f"{split}/", samples.ids))


def require_known(root: Path, train: Samples, val: Samples) -> None:
    untrained = sorted(set(val.classes) - set(train.classes))
    if untrained:
        raise BranchoutError(
            f"No training images in {root} for {count(len(untrained), 'class', 'classes')} of its validation images: "
            f"{some(untrained, 10)}\n"
            "Expected the same classes in both. Is the archive completely unpacked?"
        )
