"""Hostile files: mutated models, training checkpoints, scenarios and images. Each case must end in a sentence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.torture.fixtures import Material
from benchmarks.torture.run import Ended, command, forked

Case = tuple[str, Callable[[], str | None]]
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**9, 1e308, float("nan"), float("inf"), "", "x" * 5000, "../../etc/passwd", "\x1b[31m",
    [], [[]], {}, {"a": {"b": 1}}, "hf-hub:owner/name", "local-dir:/tmp", [1, "two", None],
)  # fmt: skip
"""What a field of a JSON file is replaced by."""


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and index inside a JSON value; of long lists the first and the last."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    if isinstance(value, list) and len(inner) > 4:
        inner = [inner[0], inner[-1]]
    for key, each in inner:
        yield (*at, key)
        yield from places(each, (*at, key))


def mutate_json(path: Path, rng: np.random.Generator) -> str:
    """Replace, remove or rename one field of a JSON file; returns what was done."""
    content = json.loads(path.read_text(encoding="utf-8"))
    every = list(places(content))
    *way, last = every[rng.integers(len(every))]
    inside = content
    for key in way:
        inside = inside[key]
    kind = rng.integers(4)
    if kind == 0:
        del inside[last]
        done = "removed"
    elif kind == 1 and isinstance(inside, dict):
        inside[f"{last}x"] = inside.pop(last)
        done = "renamed"
    else:
        value = VALUES[rng.integers(len(VALUES))]
        inside[last] = value
        done = f"set to {str(value)[:30]!r}"
    path.write_text(json.dumps(content), encoding="utf-8")
    return f"{'.'.join(map(str, (*way, last)))} {done}"


def mutate_bytes(path: Path, rng: np.random.Generator) -> str:
    """Flip, cut, repeat or overwrite bytes of a file."""
    content = bytearray(path.read_bytes())
    kind = int(rng.integers(5))
    at = int(rng.integers(max(1, min(len(content), 400 if rng.random() < 0.5 else len(content)))))
    if kind == 0:
        content[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del content[at:]
    elif kind == 2:
        content[at:at] = bytes(rng.integers(0, 256, 64, dtype=np.uint8))
    elif kind == 3:
        content[at : at + 16] = b"\xff" * 16
    else:
        content = bytearray(rng.integers(0, 256, at + 1, dtype=np.uint8).tobytes())
    path.write_bytes(bytes(content))
    return f"{('bit flipped', 'cut', 'bytes added', 'bytes overwritten', 'random bytes')[kind]} at {at}"


def mutate_kind(path: Path, rng: np.random.Generator) -> str:
    """Put something that is no file, or another file, in a file's place."""
    path.unlink()
    kind = int(rng.integers(6))
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.symlink_to(path.with_name("nowhere"))
    elif kind == 4:
        path.write_bytes(b"")
    return ("a FIFO", "a link to /dev/zero", "a folder", "a dangling link", "empty", "missing")[kind]


def judged(ended: Ended, ordinary: str | None = None) -> str | None:
    """A fault, or None. A success must answer what the unharmed model answers."""
    fault = ended.fault()
    if fault is None and ordinary is not None and ended.status == 0 and ended.out != ordinary:
        return "another answer"
    return fault


FREE = (
    "point",
    "goal",
    "classes",
    "names",
    "history",
    "preprocessing",
    "frontier",
    "shifts",
    "card",
    "version",
    "kind",
)
"""Fields whose value is the owner's to choose: another valid value gives another valid model."""


def models(material: Material, seed: int) -> Iterator[Case]:
    """Mutated model folders, asked for a prediction."""
    ordinary = command("predict", material / "v2", material.photo).out
    for number in range(10**6):
        rng = np.random.default_rng([seed, 1, number])
        folder = material / "mutated"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(material / "v2", folder)
        if rng.random() < 0.6:
            file = folder / "branchout.json"
            done = mutate_json(file, rng)
        else:
            file = sorted(folder.glob("*.safetensors"))[rng.integers(len(list(folder.glob("*.safetensors"))))]
            done = mutate_bytes(file, rng) if rng.random() < 0.7 else mutate_kind(file, rng)
        free = any(word in done for word in FREE) and file.suffix == ".json"
        expected = None if free else ordinary

        def run(folder: Path = folder, expected: str | None = expected) -> str | None:
            return judged(command("predict", folder, material.photo), expected)

        yield f"{file.name}: {done}", run


ENDLESS = 100_000
"""Epochs that no machine trains in the seconds that a case has."""


def checkpoints(material: Material, seed: int) -> Iterator[Case]:
    """The files of a stopped extension, mutated; the same command must resume, start over or refuse."""
    out = material / "stopped"
    work = out.with_name(f".{out.name}.work")
    shutil.rmtree(out, ignore_errors=True)
    command(*material.extend(out, epochs=ENDLESS), seconds=6)  # killed in the middle of training
    if not list(work.glob("*")):
        raise RuntimeError("the extension that should have been stopped left nothing to attack")
    kept = material / "kept.work"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(work, kept)
    for number in range(10**6):
        rng = np.random.default_rng([seed, 2, number])
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(kept, work)
        files = sorted(each for each in work.iterdir() if each.is_file() and each.suffix in (".json", ".safetensors"))
        file = files[rng.integers(len(files))]
        done = mutate_json(file, rng) if file.suffix == ".json" and rng.random() < 0.6 else mutate_bytes(file, rng)

        def run() -> str | None:
            ended = command(*material.extend(out, epochs=ENDLESS), seconds=4)
            # Training goes on where it was, or starts over: that it takes long is no fault.
            return None if ended.killed and "Traceback" not in ended.err else ended.fault()

        yield f"{file.name}: {done}", run


def scenarios(material: Material, seed: int) -> Iterator[Case]:
    """Mutated scenario files, read and applied to their dataset."""
    for number in range(10**6):
        rng = np.random.default_rng([seed, 3, number])
        path = material / "mutated.json"
        shutil.copy(material / "s.json", path)
        done = mutate_json(path, rng) if rng.random() < 0.7 else mutate_bytes(path, rng)

        def body(path: Path = path) -> int:
            from branchout.cli.app import open_dataset
            from branchout.data.scenarios import Scenario
            from branchout.errors import BranchoutError

            try:
                dataset = open_dataset(str(material / "old"))
                plan = Scenario.load(path)
                plan.train(dataset)
                plan.test(dataset, step=0)
            except BranchoutError as error:
                os.write(2, f"error: {error}\n".encode(errors="replace"))
                return 1
            return 0

        yield done, lambda body=body: forked(body, seconds=10).fault()  # type: ignore[misc]


def hostile_images(material: Material, seed: int) -> Iterator[Case]:
    """Images made to harm a decoder, then ordinary ones with bytes changed; each is asked about."""
    from tests.data import hostile

    folder = material / "hostile"
    folder.mkdir(exist_ok=True)
    names: list[Path] = []
    for name, (content, _) in hostile.images().items():
        path = folder / f"{len(names)}-{Path(name).name}"
        path.write_bytes(content)
        names.append(path)
        yield f"hostile {name}", lambda path=path: command("predict", material / "v2", path).fault()  # type: ignore[misc]
    for number in range(10**6):
        rng = np.random.default_rng([seed, 4, number])
        source = names[rng.integers(len(names))]
        path = folder / f"mutated{source.suffix or '.png'}"
        path.write_bytes(source.read_bytes()[: 1 << 20])
        done = mutate_bytes(path, rng) if path.stat().st_size else "empty"
        yield f"{source.name} {done}", lambda path=path: command("predict", material / "v2", path).fault()  # type: ignore[misc]
