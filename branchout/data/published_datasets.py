"""Published datasets as their archives unpack: CIFAR-100, Tiny-ImageNet and ImageNet."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from branchout.data.datasets import FACTS, Dataset, below, require_known
from branchout.data.folders import scan
from branchout.data.samples import ArrayPixels, Samples
from branchout.data.verify import FilePixels
from branchout.errors import BranchoutError, some
from branchout.files import read_json
from branchout.labels import unique_names

ANIMATE, INANIMATE = "animate", "inanimate"
FIRST_ARTEFACT = "n02666196"
"""ImageNet's synset ids are sorted by meaning: all animals come before the first artefact, the abacus."""

_SYNSET = re.compile(r"n\d{8}")

Groups = Iterable[tuple[str, Sequence[str]]]
"""Name of what they have in common, and the members."""


def open_published(root: Path) -> Dataset | None:
    """The dataset in this folder, if its layout is that of a published one."""
    for folder in (root / _CIFAR_FOLDER, root):
        if all((folder / name).is_file() for name in ("train", "test", "meta")):
            return _cifar100(folder)
    synsets = _synsets(root / "train")
    if (root / "wnids.txt").is_file() or (synsets and len(synsets) <= 200 and (root / "val").is_dir()):
        return _of_synsets("tiny-imagenet-200", root, _GET_TINY)
    if synsets and (root / "val").is_dir():
        return _of_synsets("imagenet-1k", root, _GET_IMAGENET)
    return None


# CIFAR-100.

_CIFAR_FOLDER = "cifar-100-python"
_GET_CIFAR = (
    "CIFAR-100: a folder that holds cifar-100-python/, with train, test and meta in it. It is the archive "
    "cifar-100-python.tar.gz of the CIFAR page at the University of Toronto; to download it: "
    "python -c \"from branchout.data.published_datasets import download_cifar100; download_cifar100('DIR')\""
)
_CIFAR_ANIMATE = frozenset(
    {"aquatic_mammals", "fish", "insects", "large_carnivores", "large_omnivores_and_herbivores", "medium_mammals"}
    | {"non-insect_invertebrates", "people", "reptiles", "small_mammals"}
)


def download_cifar100(root: str) -> None:
    from torchvision.datasets import CIFAR100
    from torchvision.datasets.utils import download_and_extract_archive

    download_and_extract_archive(CIFAR100.url, root, filename=CIFAR100.filename, md5=CIFAR100.tgz_md5)


def _cifar100(folder: Path) -> Dataset:
    """100 classes of 32 × 32 pixels, in 20 groups that the attribute `coarse` names."""
    meta = _unpickle(folder / "meta")
    train, val = (_cifar_split(folder / split, meta) for split in ("train", "test"))
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
        raise BranchoutError(f"{path} is not a valid file of CIFAR-100: {error!r}\n{_GET_CIFAR}") from error


class _ArraysOnly(pickle.Unpickler):
    """Reads pickles of numbers, texts and numpy arrays. A pickle that names anything else is refused and never run."""

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
            return dict(_ArraysOnly(file, encoding="latin1").load())
    except Exception as error:  # a broken pickle can raise anything
        raise BranchoutError(f"{path} is damaged or not a file of CIFAR-100: {error}\n{_GET_CIFAR}") from error


# ImageNet and Tiny-ImageNet.

_GET_TINY = (
    "Tiny-ImageNet: a folder that holds train/<synset>/… and val/, as the archive tiny-imagenet-200.zip of Stanford's "
    "course CS231n unpacks, or with val/<synset>/…"
)
_GET_IMAGENET = (
    "ImageNet: a folder that holds train/<synset>/… and val/<synset>/…: ILSVRC2012_img_train.tar and "
    "ILSVRC2012_img_val.tar, from the ImageNet page after signing in, unpacked into one folder per synset"
)


LAYOUTS = (_GET_CIFAR, _GET_TINY, _GET_IMAGENET)


def _of_synsets(name: str, root: Path, how: str) -> Dataset:
    annotations = root / "val" / "val_annotations.txt"
    published = annotations.is_file() and any((root / "val" / "images").glob("*"))
    if not _synsets(root / "train") or not (published or _synsets(root / "val")):
        inside = some(sorted(path.name for path in root.iterdir()), 10)
        raise BranchoutError(f"no {name} in {root.absolute()}, which contains {inside}.\nExpected {how}")
    train = below("train", scan(root / "train", verify=False)[0])
    val = _annotated(root, annotations) if published else below("val", scan(root / "val", verify=False)[0])
    require_known(root, train, val)
    # Names of the synsets, and which of them are siblings.
    facts = dict(read_json(root / FACTS)) if (root / FACTS).exists() else {}
    names = _names(train.classes, root, facts)
    groups = [(group["parent"], group["wnids"]) for group in facts.get("siblings", [])] or json.loads(
        Path(__file__).with_name("siblings.json").read_text(encoding="utf-8")
    )
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


def _annotated(root: Path, annotations: Path) -> Samples:
    """The published validation images of Tiny-ImageNet: one folder, and a table that gives each its synset."""
    rows = sorted(tuple(line.split("\t")[:2]) for line in annotations.read_text().splitlines() if "\t" in line)
    present = {path.name for path in (root / "val" / "images").iterdir()}
    absent = [file for file, _ in rows if file not in present]
    if absent:
        raise BranchoutError(
            f"{len(absent):,} of {len(rows):,} images that {annotations} names are not in {root / 'val' / 'images'}, "
            f"such as {absent[0]}. Unpack the archive again"
        )
    paths = [f"images/{file}" for file, _ in rows]
    pixels = FilePixels(root / "val", np.array([os.fsencode(path) for path in paths]))
    return below("val", Samples.build(pixels, [synset for _, synset in rows], paths))


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
    first = [lemmas.get(synset, synset).split(",")[0].strip() for synset in synsets]
    return dict(zip(synsets, unique_names(first, synsets, str.casefold), strict=True))


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
