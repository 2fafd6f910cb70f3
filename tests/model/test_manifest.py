"""Manifests that are wrong: each is refused with a sentence, quickly, before memory is taken for weights."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import BASE, LATER, NEW, fixed_batch, logits, untrained
from safetensors.torch import load_file, save_file

from branchout import files
from branchout.errors import BranchoutError
from branchout.model import bases
from branchout.model.checkpoint import SavedModel, StepPoints, load, save
from branchout.model.manifest import LARGEST, MANIFEST, read_manifest

ASSET = Path(bases.__file__).parent.parent / "assets" / "glyphs-base"
FIGURES = {name: [0.5, 0.6, 0.7] for name in ("all", "base", "novel", "avg")} | {"overlap": [None, None, None]}
DIAL = {
    "kind": "dial",
    "settings": [[-1.5], [0.25], [2.0]],
    "figures": FIGURES,
    "images": 10,
    "balanced_by": "mean",
    "measured": "dev",
}
GRID = {**DIAL, "kind": "grid", "settings": [[0.2, 0.4], [0.0, 1.0], [1.0, 0.0]]}
ACCURACIES = {"all": 0.5, "base": 0.5, "novel": None, "steps": [0.5], "overlap": None, "avg": 0.5}
EVENT = {
    "what": "extend",
    "images": 9,
    "losses": [0.2, 0.1],
    "seconds": {"stage1": 1.5},
    "measured": {"images": 4, "after": ACCURACIES, "before": {}, "goals": {"all": {"point": 1, **ACCURACIES}}},
}


def a_model() -> SavedModel:
    """Two steps: the first with a dial, the second with trained points, so that every kind of file is there."""
    model = untrained(BASE, NEW, (*LATER, BASE[0]))
    deltas = [[torch.full((128, width), 0.01 * (point + 1)) for width in (8, 3, 4)] for point in range(3)]
    step_points = (StepPoints(DIAL, [], 1, "all"), StepPoints(GRID, deltas, 2, "avg", (0.0, 0.5)))
    return SavedModel(model, step_points, ({"what": "pretrain", "seconds": 3.5}, EVENT, EVENT))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import timm  # noqa: F401 – importing it takes seconds, which are not those of a refusal

    folder = tmp_path_factory.mktemp("models") / "m"
    save(a_model(), folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "m"))


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return content


def put(folder: Path, path: str, value: object) -> None:
    """Change one entry of the manifest: `fusions.0.point`."""
    content = content_of(folder)
    *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = content
    for part in above:
        place = place[part]
    place[last] = value
    (folder / MANIFEST).write_text(json.dumps(content))


def refused(folder: Path, *words: str) -> None:
    start = time.perf_counter()
    with pytest.raises(BranchoutError) as caught:
        load(folder)
    assert time.perf_counter() - start < 10
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 2000
    for word in words:
        assert word in str(caught.value)


def test_a_manifest_is_read_back(folder: Path) -> None:
    manifest, content = read_manifest(folder)
    assert set(manifest.files) == {path.name for path in folder.glob("*.safetensors")}
    assert content == content_of(folder)
    assert manifest.fusions[1].frontier.settings == GRID["settings"]


def test_models_of_earlier_versions_are_read(folder: Path) -> None:
    """The first version wrote no shifts; the base that comes with the package is as old."""
    expected = logits(load(folder).model(1), fixed_batch())
    content = content_of(folder)
    del content["fusions"][0]["shifts"]
    (folder / MANIFEST).write_text(json.dumps(content))
    assert torch.equal(logits(load(folder).model(1), fixed_batch()), expected)
    assert len(load(ASSET).classifier.space.classes) == 800


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", "branchout-9", ["branchout-9", "branchout-1"]),
        ("head", "cosin", ["head", "cosine", "linear", "cosin"]),
        ("kind", "photograph", ["kind"]),
        ("pooler", "median", ["pooler", "median"]),
        ("point", 1, ["point"]),  # an unknown key
        ("fusions.0.point", 3, ["3 points"]),
        ("fusions.0.point", -1, ["fusions.0.point"]),
        ("fusions.0.point", True, ["fusions.0.point"]),
        ("fusions.0.goal", "", ["fusions.0.goal"]),
        ("fusions.0.deltas", 10**9, ["fusions.0", "deltas"]),
        ("fusions.1.deltas", 10**9, ["fusions.1", "deltas"]),
        ("fusions.1.deltas", 0, ["fusions.1", "deltas"]),
        ("fusions.1.shifts", [0.5], ["fusions.1.shifts"]),
        ("fusions.0.frontier.kind", "line", ["frontier.kind"]),
        ("fusions.0.frontier.kind", "grid", ["2 numbers"]),
        ("fusions.0.frontier.settings", [], ["frontier"]),
        ("fusions.0.frontier.settings", [[1], [2], ["x"]], ["settings.2"]),
        ("fusions.0.frontier.settings", [[1], [2], [1e200]], ["settings.2"]),
        ("fusions.0.frontier.figures.all", [0.5], ["figure"]),
        ("fusions.0.frontier.figures.all", [0.5, 0.5, 1.5], ["figures.all.2"]),
        ("fusions.0.frontier.figures.all", [None] * 3, ["accuracy"]),
        ("fusions.0.frontier.figures", {}, ["figures"]),
        ("fusions.0.frontier.images", -1, ["images"]),
        ("fusions.0.frontier.measured", "guessed", ["measured"]),
        ("fusions.0.frontier.balanced_by", "magic", ["balanced_by"]),
        ("fusions", [], ["fusions"]),
        ("steps", [], ["steps"]),
        ("steps.0.where", "layer9", ["layer9", "layer4"]),
        ("steps.0.where", "layer4.0.conv2", ["step-1.safetensors", "unexpected"]),
        ("steps.0.where", 4, ["steps.0.where"]),
        ("classes", [], ["classes"]),
        ("classes.0", [*BASE[:-1]], ["base.safetensors", "head/weight", "(8, 64)", "(7, 64)"]),
        ("classes.1", [], ["classes.1"]),
        ("classes.1.0", "", ["classes.1.0"]),
        ("classes.1.0", 7, ["classes.1.0"]),
        ("classes.1.0", NEW[1], ["classes.1", "more than once"]),
        ("classes.1.0", "\ud800", ["classes.1.0"]),
        ("preprocessing.std", [0], ["std"]),
        ("preprocessing.std", [0.2, 0.2, 0.2], ["std"]),
        ("preprocessing.size", 10**9, ["size"]),
        ("preprocessing.channels", 2, ["channels"]),
        ("preprocessing.crop", 0, ["crop"]),
        ("preprocessing", {"size": 32}, ["preprocessing.channels is missing"]),
        ("arch.width", 5000, ["base.safetensors", "another shape"]),
        ("arch.width", 10**18, ["width"]),
        ("arch.name", "resnet18", ["base.safetensors", "missing"]),
        ("arch.name", "resnet11", ["resnet11", "resnet10"]),
        ("arch.stem", "huge", ["stem"]),
        ("arch.extra", 1, ["extra"]),
        ("arch.family", "vgg", ["family", "timm"]),
        ("arch", {"family": "vit", "name": "vit_tiny", "size": 64, "depth": 10**9}, ["depth"]),
        ("arch", {"family": "vit", "name": "vit_tiny", "size": 33}, ["33"]),
        ("arch", {"family": "timm", "name": "vit_giant_patch14_224", "num_classes": 8}, ["base.safetensors"]),
        ("arch", {"family": "timm", "name": "resnet18", "num_classes": 10**6}, ["num_classes"]),
        ("history", {}, ["history"]),
        ("history.1.losses", ["x"], ["history.1.losses"]),
        ("history.1.measured", [1], ["history.1.measured"]),
        ("history.1.measured.goals.all.point", 99, ["history.1"]),
        ("files", {}, ["files", "base.safetensors"]),
        ("files", None, ["files"]),
        ("files", {"base.safetensors": "0" * 64}, ["step-1.safetensors"]),
        ("files.base.safetensors", "0" * 64, ["files"]),
        ("files.../../secret", "0" * 64, ["files"]),
    ],
)
def test_an_entry_that_is_wrong_is_named(path: str, value: object, words: list[str], folder: Path) -> None:
    if path.startswith("files."):
        put(folder, "files", content_of(folder)["files"] | {path.removeprefix("files.").replace("base", "Base"): value})
    else:
        put(folder, path, value)
    refused(folder, *words)


@pytest.mark.parametrize("key", ["arch", "head", "kind", "preprocessing", "pooler", "classes", "steps", "files"])
def test_an_entry_that_is_missing_or_misspelt_is_named(key: str, folder: Path) -> None:
    content = content_of(folder)
    content[f"{key[0]}{key}"] = content.pop(key)
    (folder / MANIFEST).write_text(json.dumps(content))
    refused(folder, f"{key} is missing")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "JSON"),
        ("[1, 2]", "JSON object"),
        ("{}", "format"),
        ('{"format": "branchout-1"}', "missing"),
        ('{"format": NaN}', "NaN"),
        ('{"format": "branchout-1", "x": 1e999}', "1e999"),
        ('{"format": -Infinity}', "Infinity"),
        ("[" * 200_000, "JSON"),
        ('{"a":' * 100_000, "JSON"),
        ("9" * 10_000, "JSON"),
        ("\xff\xfe", "JSON"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, words: str, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(text.encode("latin-1"))
    refused(folder, words)


def test_a_manifest_that_is_too_large_is_not_read(folder: Path) -> None:
    with (folder / MANIFEST).open("r+b") as file:
        file.truncate(LARGEST + 1)
    refused(folder, "too large")


def test_a_manifest_that_is_a_pipe_is_no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    refused(folder, MANIFEST)


# Networks.


@pytest.mark.parametrize(
    "name", ["hf-hub:timm/resnet18", "local-dir:/tmp/x", "timm/resnet18", "../x", "no_such_network"]
)
def test_only_registered_timm_names_are_built(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    import timm

    def unreachable(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(timm, "create_model", unreachable)
    put(folder, "arch", {"family": "timm", "name": name, "num_classes": len(BASE)})
    refused(folder, name)
    with pytest.raises(BranchoutError):
        bases.rebuild({"family": "timm", "name": name, "num_classes": 3})


# Tensors.


def change_tensors(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite a file with other tensors and a checksum that is right, as a stranger would."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)
    put(folder, "files", content_of(folder)["files"] | {name: files.checksum(folder / name)})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("fusion-2.safetensors", lambda tensors: tensors.pop("1/0"), ["missing", "1/0"]),
        ("fusion-2.safetensors", lambda tensors: tensors.update({"3/0": torch.ones(1)}), ["unexpected", "3/0"]),
        ("fusion-2.safetensors", lambda tensors: tensors.update({"0/0": torch.ones(64, 8)}), ["0/0", "(128, 8)"]),
        ("step-1.safetensors", lambda tensors: tensors.pop("head/weight"), ["missing", "head/weight"]),
        ("step-1.safetensors", lambda tensors: tensors.update({"head/bias": torch.ones(3)}), ["head/bias"]),
        ("base.safetensors", lambda tensors: tensors.update({"x\x1b[2J": torch.ones(1)}), ["unexpected"]),
        ("base.safetensors", lambda tensors: tensors.clear(), ["missing"]),
        (
            "base.safetensors",
            lambda tensors: tensors.update({"head/weight": torch.ones(8, 64, dtype=torch.int64)}),
            ["head/weight"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, change: Callable[[dict[str, torch.Tensor]], object], words: list[str], folder: Path
) -> None:
    change_tensors(folder, name, change)
    refused(folder, name, *words)


def test_shapes_are_compared_before_a_large_file_is_read(folder: Path) -> None:
    """A header that promises four terabytes, and a file that has them: its content is not read."""
    size = 2**42
    header = json.dumps({"head/weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with (folder / "base.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    refused(folder, "base.safetensors")


# Random damage.


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_in(inner, (*path, key))


JUNK = [None, True, -1, 10**30, 1e300, "", "x" * 5000, "\x00\x1b[31m", [], [[]], {}, {"a": 1}, "../../etc/passwd"]


def damage_manifest(folder: Path, rng: random.Random) -> None:
    """Replace, remove, rename or double one entry."""
    content = content_of(folder)
    *above, last = rng.choice(list(paths_in(content)))
    place: Any = content
    for part in above:
        place = place[part]
    match rng.randrange(4):
        case 0 | 1:
            place[last] = rng.choice(JUNK)
        case 2:
            del place[last]
        case 3:
            if isinstance(place, list):
                place.append(place[last])
            else:
                place[f"{last}x"] = place.pop(last)
    (folder / MANIFEST).write_text(json.dumps(content))


def damage_bytes(folder: Path, rng: random.Random, *, vouched: bool) -> None:
    """Change a few bytes of a weights file or cut it; `vouched` makes its checksum right again, in the header only."""
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(header if vouched else len(data))] = rng.randrange(256)
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
    path.write_bytes(bytes(data))
    if vouched:
        put(folder, "files", content_of(folder)["files"] | {path.name: files.checksum(path)})


@pytest.mark.parametrize("seed", range(150))
def test_random_damage_gives_a_sentence_or_the_same_model(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    expected = [logits(load(folder).model(step), fixed_batch(2)) for step in range(3)]
    if seed % 3 == 0:
        damage_bytes(folder, rng, vouched=seed % 2 == 0)
    else:
        damage_manifest(folder, rng)
    start = time.perf_counter()
    back, error = attempt(folder)
    assert time.perf_counter() - start < 10
    if back is None:
        assert str(folder) in error
        assert error.isprintable()
        return
    # An entry may have become another valid one, such as another operating point; the weights must be the same.
    step_points = tuple(
        replace(mine, point=was.point, offsets=was.offsets, frontier=was.frontier)
        for mine, was in zip(back.step_points, a_model().step_points, strict=True)
    )
    found = [logits(replace(back, step_points=step_points).model(step), fixed_batch(2)) for step in range(3)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def attempt(folder: Path) -> tuple[SavedModel | None, str]:
    try:
        return load(folder), ""
    except BranchoutError as error:
        return None, str(error)
