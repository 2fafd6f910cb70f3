"""Kills at any moment, full disks and places where nothing can be written."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.torture.files import Case
from benchmarks.torture.fixtures import Material
from benchmarks.torture.run import command, forked


def kills(material: Material, seed: int) -> Iterator[Case]:
    """SIGKILL at a random moment of every command that writes; then the same command again must succeed."""
    for number in range(10**6):
        rng = np.random.default_rng([seed, 5, number])
        kind = ("extend", "pretrain", "tune", "report", "export", "extend again")[number % 6]

        def run(kind: str = kind, share: float = float(rng.random())) -> str | None:
            return _killed(material, kind, share)

        yield kind, run


TOOK: dict[str, float] = {}
"""Seconds that each command takes when it is left alone, so that kills fall anywhere in it."""


def _killed(material: Material, kind: str, share: float) -> str | None:
    out = material / "kills" / "v3"  # a folder of its own: other attacks leave stopped runs behind on purpose
    out.parent.mkdir(exist_ok=True)
    words = _words(material, kind, out)
    _clear(out, material, kind)
    if kind not in TOOK:
        start = time.monotonic()
        _process(words).communicate(timeout=120)
        TOOK[kind] = time.monotonic() - start
        _clear(out, material, kind)
    process = _process(words)
    try:
        process.wait(TOOK[kind] * share)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    if out.exists() and (fault := _unusable(out, material)):  # what bears the name is whole
        return fault
    exported = out.with_suffix(".onnx")
    if exported.exists() and not _opens(exported):
        return "a damaged ONNX file"
    if kind != "tune" and (out.exists() or exported.exists()):
        return None  # the kill came after the last step, and the same command would not replace what it wrote
    again = command(*words, seconds=60)
    if again.status:
        return again.fault(60) or f"not resumed: {again.err[-300:]}"
    left = [path.name for path in out.parent.rglob("*.partial")]
    return f"left behind: {left}" if left else None


def _unusable(model: Path, material: Material) -> str | None:
    predicted = command("predict", model, material.photo)
    return predicted.fault() or ("a damaged model" if predicted.status else None)


def _opens(exported: Path) -> bool:
    def body() -> int:
        import onnxruntime

        onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
        return 0

    return forked(body, seconds=20).status == 0


def _words(material: Material, kind: str, out: Path) -> Sequence[str | Path]:
    if kind == "extend":
        return material.extend(out)
    if kind == "extend again":
        return material.extend(out, base="v2", new="more")
    if kind == "pretrain":
        return material.pretrain(out)
    if kind == "tune":
        return ["tune", out, "--goal", "avg"]
    if kind == "report":
        return ["report", material / "v2", material / "old", "--out", out.with_suffix(".html")]
    return ["export", material / "v2", "--onnx", out.with_suffix(".onnx")]


def _clear(out: Path, material: Material, kind: str) -> None:
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(out.with_name(f".{out.name}.work"), ignore_errors=True)
    for ending in (".html", ".onnx"):
        out.with_suffix(ending).unlink(missing_ok=True)
    if kind == "tune":
        shutil.copytree(material / "v2", out)


def _process(words: Sequence[str | Path]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "branchout", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def disks(material: Material, _: int) -> Iterator[Case]:
    """A disk that fills up, and outputs that cannot be: each is answered by a sentence."""
    (material / "a file").write_text("x")
    (material / "dangling").symlink_to(material / "missing" / "place")
    impossible = {
        "below a file": material / "a file" / "v9",
        "a name of 300 characters": material / ("n" * 300),
        "a dangling link": material / "dangling",
        "in /proc": Path("/proc/v9"),
    }
    makers: dict[str, Callable[[Path], Sequence[str | Path]]] = {
        "extend": material.extend,
        "pretrain": material.pretrain,
    }
    for name, make in makers.items():
        for what, out in impossible.items():
            words = make(out)
            yield f"{name} into {what}", lambda words=words: _refused(command(*words, seconds=20))  # type: ignore[misc]
        for size in (0, 1 << 10, 1 << 16, 1 << 18):
            yield f"{name}, files limited to {size} bytes", lambda make=make, size=size: _full(material, make, size)  # type: ignore[misc]
    for where in ("a file", "dangling"):
        yield f"a cache that cannot be written: {where}", lambda where=where: _no_cache(material, material / where)  # type: ignore[misc]
    wrong: dict[str, Sequence[str | Path]] = {
        "report": ["report", material / "v2", "--out", material / "a file" / "r.html"],
        "export": ["export", material / "v2", "--onnx", material / "a file" / "m.onnx"],
        "predict": ["predict", material / "v2", material / "missing.png"],
        "evaluate": ["evaluate", material / "v2", material / "a file"],
    }
    for name, words in wrong.items():
        yield f"{name} with an impossible path", lambda words=words: _refused(command(*words, seconds=30))  # type: ignore[misc]


def _refused(ended) -> str | None:  # type: ignore[no-untyped-def]
    return ended.fault(30) or ("accepted" if ended.status == 0 else None)


def _full(material: Material, make, size: int) -> str | None:  # type: ignore[no-untyped-def]
    """As on a full disk: a file cannot grow beyond `size` bytes. Nothing half written may bear the model's name."""
    out = material / "full"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(out.with_name(f".{out.name}.work"), ignore_errors=True)
    # The child's own output goes to a file as well, so a sentence may not fit: only its status is looked at.
    ended = command(*make(out), seconds=60, prepare=limit)
    if ended.killed:
        return "hang"
    if "Traceback" in ended.err or ended.status < 0:
        return "traceback"
    return _unusable(out, material) if out.exists() else None


def _no_cache(material: Material, cache: Path) -> str | None:
    out = material / "uncached"
    shutil.rmtree(out, ignore_errors=True)

    def use() -> None:
        os.environ["BRANCHOUT_CACHE"] = str(cache)

    ended = command(*material.extend(out), seconds=60, prepare=use)
    return ended.fault(60) or ("refused" if ended.status else None)
