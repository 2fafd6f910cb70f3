"""Datasets from where they lie: CIFAR-100, Tiny-ImageNet and ImageNet as published, or any folder of class folders."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from branchout.data.dataset import Dataset, with_facts
from branchout.data.folders import FilePixels, scan
from branchout.data.problems import Problems
from branchout.data.samples import ArrayPixels, Samples, digest
from branchout.errors import BranchoutError

ANIMATE, INANIMATE = "animate", "inanimate"
FACTS = "classes.json"
"""What a dataset may say of its classes, in its own folder."""
FIRST_ARTEFACT = "n02666196"
"""ImageNet's synset ids are sorted by meaning: all animals come before the first thing made, the abacus."""

_SYNSET = re.compile(r"n\d{8}")
_TRAIN, _VAL = ("train", "training"), ("val", "valid", "validation", "test")

Groups = Iterable[tuple[str, Sequence[str]]]
"""Name of what they have in common, and the members."""


def resolve(text: str, *, report: Callable[[Problems], None] | None = None) -> Dataset:
    """The dataset that a text means: `glyphs`, which is built in, or a folder whose layout tells what it is.

    `report` is handed what was wrong with the files of an ordinary folder; published benchmarks are trusted.
    """
    if text == "glyphs":
        from branchout.data.glyphs import glyphs

        return glyphs()
    root = Path(text).expanduser()
    if root.is_file():
        raise BranchoutError(f"{root} is a file; a dataset is a folder with one folder per class, or 'glyphs'")
    if not root.is_dir():
        raise BranchoutError(
            f"no dataset {text!r}: it is not built in, and there is no folder {root.absolute()}\n"
            "Built in: glyphs\n"
            "Everything else is named by its folder, and its layout tells what it is:\n"
            + "\n".join(f"  {how}" for how in (_GET_CIFAR, _GET_TINY, _GET_IMAGENET, _OWN))
        )
    loader = _loader(root)
    return folder(root, report=report) if loader is folder else loader(root)


def _loader(root: Path) -> Callable[..., Dataset]:
    if any(_is_cifar(folder) for folder in (root, root / _CIFAR_FOLDER)):
        return cifar100
    if (root / "wnids.txt").is_file():
        return tiny_imagenet
    synsets = _synsets(root / "train")
    if synsets and (root / "val").is_dir():
        return tiny_imagenet if len(synsets) <= 200 else imagenet
    return folder


# CIFAR-100.

_CIFAR_FOLDER = "cifar-100-python"
_GET_CIFAR = (
    "CIFAR-100: a folder that holds cifar-100-python/, with train, test and meta in it. It is the archive "
    "cifar-100-python.tar.gz of the CIFAR page at the University of Toronto; to download it: "
    "python -c \"from branchout.data.datasets import cifar100; cifar100('DIR', download=True)\""
)
_CIFAR_ANIMATE = frozenset(
    {"aquatic_mammals", "fish", "insects", "large_carnivores", "large_omnivores_and_herbivores", "medium_mammals"}
    | {"non-insect_invertebrates", "people", "reptiles", "small_mammals"}
)


def cifar100(root: str | os.PathLike[str], *, download: bool = False) -> Dataset:
    """100 classes of 32 × 32 pixels, in 20 groups that the attribute `coarse` names. The network is used if told to."""
    root = Path(root)
    if download and not _is_cifar(root / _CIFAR_FOLDER):
        from torchvision.datasets import CIFAR100
        from torchvision.datasets.utils import download_and_extract_archive

        download_and_extract_archive(CIFAR100.url, str(root), filename=CIFAR100.filename, md5=CIFAR100.tgz_md5)
    found = next((path for path in (root / _CIFAR_FOLDER, root) if _is_cifar(path)), None)
    if found is None:
        raise _missing("CIFAR-100", root, _GET_CIFAR)
    meta = _unpickle(found / "meta")
    train, val = (_cifar_split(found / split, meta) for split in ("train", "test"))
    coarse = dict(zip(train.names.tolist(), train.attributes["coarse"].tolist(), strict=True))
    groups = [
        (group, [name for name in train.classes if coarse[name] == group]) for group in sorted({*coarse.values()})
    ]
    return Dataset(
        "cifar-100",
        train,
        val,
        domains={name: ANIMATE if coarse[name] in _CIFAR_ANIMATE else INANIMATE for name in train.classes},
        base_domain=INANIMATE,
        siblings=_pairs(groups, {name: name for name in train.classes}),
    )


def _is_cifar(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("train", "test", "meta"))


def _cifar_split(path: Path, meta: Mapping[str, Any]) -> Samples:
    split = _unpickle(path)
    try:
        images = np.ascontiguousarray(split["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        return Samples.build(
            ArrayPixels(images),
            [meta["fine_label_names"][label] for label in split["fine_labels"]],
            [f"{path.name}/{number:05d}" for number in range(len(images))],
            attributes={"coarse": [meta["coarse_label_names"][label] for label in split["coarse_labels"]]},
        )
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise BranchoutError(f"{path} does not hold what a file of CIFAR-100 holds: {error!r}\n{_GET_CIFAR}") from error


class _ArraysOnly(pickle.Unpickler):
    """Reads pickles of numbers, texts and numpy arrays. A pickle that names anything else is refused, not run."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            "_reconstruct": np.empty(0).__reduce__()[0],  # its module's name changes with the version of numpy
            "ndarray": np.ndarray,
            "dtype": np.dtype,
        }
        if module.split(".")[0] == "numpy" and name in known:
            return known[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="latin1").load()
    except Exception as error:  # a broken pickle can raise anything
        raise BranchoutError(f"{path} is damaged or not a file of CIFAR-100: {error}\n{_GET_CIFAR}") from error
    if not isinstance(content, dict):
        raise BranchoutError(f"{path} is not a file of CIFAR-100: expected a dict, found {type(content).__name__}")
    return content


# ImageNet and its small relative.

_GET_TINY = (
    "Tiny-ImageNet: a folder that holds train/<synset>/… and val/, as the archive tiny-imagenet-200.zip of Stanford's "
    "course CS231n unpacks, or with val/<synset>/…"
)
_GET_IMAGENET = (
    "ImageNet: a folder that holds train/<synset>/… and val/<synset>/…: ILSVRC2012_img_train.tar and "
    "ILSVRC2012_img_val.tar, from the ImageNet page after signing in, unpacked into one folder per synset"
)


def tiny_imagenet(root: str | os.PathLike[str]) -> Dataset:
    """200 synsets of 64 × 64 pixels: as published, or with a folder per synset in `val/` too."""
    return _of_synsets("tiny-imagenet-200", Path(root), _GET_TINY)


def imagenet(root: str | os.PathLike[str]) -> Dataset:
    """ImageNet-1k, or any part of it, in folders named by synset."""
    return _of_synsets("imagenet-1k", Path(root), _GET_IMAGENET)


def _of_synsets(name: str, root: Path, how: str) -> Dataset:
    annotations = root / "val" / "val_annotations.txt"
    published = annotations.is_file() and any((root / "val" / "images").glob("*"))
    if not _synsets(root / "train") or not (published or _synsets(root / "val")):
        raise _missing(name, root, how)
    train = _listed(root, "train")
    val = _annotated(root, annotations) if published else _listed(root, "val")
    _require_known(root, train, val)
    facts = _facts(root)
    names = _names(train.classes, root, facts)
    groups = [(group["parent"], group["wnids"]) for group in facts.get("siblings", [])] or _shipped_siblings()
    return Dataset(
        name,
        train.rename(names),
        val.rename(names),
        domains={names[synset]: ANIMATE if synset < FIRST_ARTEFACT else INANIMATE for synset in train.classes},
        base_domain=INANIMATE,
        siblings=_pairs(groups, names),
    )


def _synsets(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if _SYNSET.fullmatch(path.name))


def _listed(root: Path, split: str) -> Samples:
    return _below(split, scan(root / split, verify=False)[0])


def _annotated(root: Path, annotations: Path) -> Samples:
    """The published validation images of Tiny-ImageNet: one folder, and a table that gives each its synset."""
    rows = sorted(tuple(line.split("\t")[:2]) for line in annotations.read_text().splitlines() if "\t" in line)
    present = {path.name for path in (root / "val" / "images").iterdir()}
    absent = [file for file, _ in rows if file not in present]
    if absent:
        raise BranchoutError(
            f"{len(absent):,} of {len(rows):,} images that {annotations} names are not in {root / 'val' / 'images'}, "
            f"such as {absent[0]}: unpack the archive again"
        )
    paths = np.array([f"images/{file}" for file, _ in rows], dtype=np.str_)
    return _below("val", Samples.build(FilePixels(root / "val", paths), [synset for _, synset in rows], paths))


def _facts(root: Path) -> dict[str, Any]:
    """`classes.json`, where it lies beside: names of the synsets, and which of them are siblings."""
    try:
        return dict(json.loads((root / FACTS).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise BranchoutError(f"{root / FACTS} is not readable as JSON: {error}") from error


def _names(synsets: Sequence[str], root: Path, facts: Mapping[str, Any]) -> dict[str, str]:
    """Synset → what people call it; where two are called alike, both carry their synset in brackets."""
    lemmas = {entry["wnid"]: entry["name"] for entry in facts.get("classes", [])}
    if not lemmas.keys() >= set(synsets) and (root / "words.txt").is_file():
        lines = (root / "words.txt").read_text(encoding="utf-8").splitlines()
        lemmas = dict(line.split("\t", 1) for line in lines if "\t" in line) | lemmas
    if not lemmas.keys() >= set(synsets):
        from timm.data import ImageNetInfo

        info = ImageNetInfo()
        lemmas = {synset: info.label_name_to_description(synset) for synset in info.label_names()} | lemmas
    first = {synset: lemmas.get(synset, synset).split(",")[0].strip() for synset in synsets}
    count = Counter(name.casefold() for name in first.values())
    return {synset: name if count[name.casefold()] == 1 else f"{name} ({synset})" for synset, name in first.items()}


def _shipped_siblings() -> list[tuple[str, list[str]]]:
    text = Path(__file__).with_name("siblings.json").read_text(encoding="utf-8")
    return [(parent, synsets) for parent, synsets in json.loads(text)]


def _pairs(groups: Groups, names: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    """(merged name, first, second) of every group that has two members here and a name that is still free."""
    taken = {name.casefold() for name in names.values()}
    pairs = []
    for parent, members in groups:
        present = sorted(member for member in members if member in names)
        if len(present) >= 2 and parent.casefold() not in taken:
            pairs.append((parent, names[present[0]], names[present[1]]))
            taken.add(parent.casefold())
    return tuple(pairs)


# Any other folder.

_OWN = "your own images: a folder with one folder per class, or with train/ and val/ that hold one folder per class"


def folder(
    root: str | os.PathLike[str],
    *,
    held_out: float = 0.2,
    seed: int = 0,
    verify: bool = True,
    report: Callable[[Problems], None] | None = None,
) -> Dataset:
    """A folder of class folders. `train/` and `val/` (or `test/`) in it are used as they are.

    Without them a part of each class is held out as `val`, drawn by `seed`: at least one image where a class has two.
    `classes.json` beside the class folders may say their domains and siblings. `report` is handed what was wrong with
    the files.
    """
    root = Path(root)
    splits = {path.name.lower(): path.name for path in sorted(root.iterdir()) if path.is_dir()} if root.is_dir() else {}
    train_name, val_name = (next((splits[n] for n in names if n in splits), None) for names in (_TRAIN, _VAL))
    if train_name and val_name and all(_holds_folders(root / name) for name in (train_name, val_name)):
        train, val = (_below(name, _scan(root / name, verify, report)) for name in (train_name, val_name))
        _require_known(root, train, val)
    else:
        train, val = _hold_out(_scan(root, verify, report), held_out, seed)
    dataset = Dataset(root.absolute().name, train, val)
    return with_facts(dataset, root / FACTS, of_more=True) if _says_of_classes(root / FACTS) else dataset


def _says_of_classes(path: Path) -> bool:
    """Whether a file of that name is ours to read: other tools write such files too."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(found, dict):
        return False
    return isinstance(found.get("domains"), dict) or isinstance(found.get("siblings"), list)


def _scan(root: Path, verify: bool, report: Callable[[Problems], None] | None) -> Samples:
    samples, problems = scan(root, verify=verify)
    if report:
        report(problems)
    return samples


def _hold_out(samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
    """By a hash of each sample's id, so that an image added later moves few others across."""
    draw = np.array([digest(str(seed), str(name)) for name in samples.ids], dtype=np.str_)
    held = np.zeros(len(samples), dtype=bool)
    for label in range(len(samples.classes)):
        members = np.flatnonzero(samples.labels == label)
        count = max(1, round(fraction * len(members))) if len(members) > 1 else 0
        held[members[np.argsort(draw[members])][:count]] = True
    return samples.select(~held), samples.select(held)


def _holds_folders(folder: Path) -> bool:
    return any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir())


# Shared.


def _below(split: str, samples: Samples) -> Samples:
    """Ids that tell the splits apart: `train/robin/one.jpg`."""
    return replace(samples, ids=np.char.add(f"{split}/", samples.ids))


def _require_known(root: Path, train: Samples, val: Samples) -> None:
    unknown = sorted(set(val.classes) - set(train.classes))
    if unknown:
        raise BranchoutError(
            f"{len(unknown):,} classes of the validation images in {root} have no training images: "
            f"{', '.join(unknown[:10])}{', …' if len(unknown) > 10 else ''}\n"
            "Expected the same classes in both: is everything unpacked?"
        )


def _missing(name: str, root: Path, how: str) -> BranchoutError:
    inside = sorted(path.name for path in root.iterdir())[:10] if root.is_dir() else []
    found = (
        f"which holds {', '.join(inside)}" if inside else ("which is empty" if root.is_dir() else "which is not there")
    )
    return BranchoutError(f"{name} was looked for in {root.absolute()}, {found}.\nExpected {how}")
