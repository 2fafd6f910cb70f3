"""Measured rows: JSON files with the metrics, settings, versions, hardware, commit and command of a measurement."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from branchout import __version__
from branchout.errors import BranchoutError
from branchout.files import atomic_write, read_json, write_json
from branchout.goals import METRICS
from branchout.labels import Bools
from branchout.metrics import Accuracies
from branchout.training.optimisation import settings_dict

PACKAGE = Path(__file__).parents[1]


def percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 3)


def number(value: float | None) -> str:
    """With one decimal, halves away from zero: 62.15 is 62.2, though it is stored as a little less."""
    return "–" if value is None else str(Decimal(str(value)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def figures(measured: Accuracies) -> dict[str, float | None]:
    """Accuracies in percent, as results have them."""
    return {name: percent(getattr(measured, name)) for name in METRICS}


def averaged(rows: Sequence[Accuracies]) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Mean and standard deviation (n − 1) over seeds, in percent; one seed has no deviation."""
    means: dict[str, float | None] = {}
    spreads: dict[str, float | None] = {}
    for name in METRICS:
        values = [getattr(row, name) for row in rows]
        known = all(value is not None for value in values)
        means[name] = percent(float(np.mean(values))) if known else None
        spreads[name] = percent(float(np.std(values, ddof=1))) if known and len(values) > 1 else None
    return means, spreads


def packed(right: Bools) -> str:
    """Which images were predicted correctly, one bit each, as text."""
    return f"{len(right)}:{b64encode(np.packbits(right).tobytes()).decode()}"


def unpacked(text: str) -> Bools:
    count, bits = text.split(":")
    return np.unpackbits(np.frombuffer(b64decode(bits), dtype=np.uint8), count=int(count)).astype(bool)


def provenance() -> dict[str, Any]:
    """Versions, commit, hardware and command of this run."""
    packages = ("torch", "torchvision", "timm", "numpy", "scikit-learn")
    versions = {"python": platform.python_version(), "branchout": __version__}
    return {
        "versions": {**versions, **{name: version(name) for name in packages}},
        "hardware": hardware(),
        "commit": commit(),
        "command": command(),
    }


def command() -> str:
    """The command that runs this again, from the root of the repository."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py" or script.suffix != ".py":
        return shlex.join(["branchout", *sys.argv[1:]])
    return shlex.join(["python", f"{script.absolute().parent.name}/{script.name}", *sys.argv[1:]])


def hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def commit(package: Path = PACKAGE) -> str:
    """The commit of the package, with -dirty if the package has changes; $BRANCHOUT_COMMIT where there is no git."""
    return os.environ.get("BRANCHOUT_COMMIT") or _commit_at_start(package)


@cache
def _commit_at_start(package: Path) -> str:
    """Asked for once: the code that runs stays the same while its files are edited and committed for hours."""
    try:
        # A package installed below another repository is not part of that repository.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        name, changes = _git(package, "rev-parse", "--short=12", "HEAD"), _git(package, "status", "--porcelain", ".")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-dirty" if changes else name


def _git(where: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout.strip()


def on_another_base(rows: Mapping[Path, Mapping[str, Any]]) -> list[Path]:
    """Rows that were measured with another training of the base model than most rows of their folder.

    Two trainings of a base end in different networks, so their rows should not be compared. A base is identified by its
    digest; older rows lack it and are matched by the base's accuracy. Joint training starts from no base.
    """
    folders: dict[Path, list[Path]] = {}
    for path, row in rows.items():
        if (row.get("settings") or {}).get("faithful") and row.get("base_weights") is None:
            continue  # each of these methods has a base of its own
        if row.get("method") == "joint":
            continue
        folders.setdefault(path.parent, []).append(path)
    found = []
    for paths in folders.values():
        told = Counter((rows[path].get("base_model"), rows[path].get("base_weights")) for path in paths)
        # Of two bases with the same accuracy the more common.
        known = {accuracy: digest for (accuracy, digest), _ in reversed(told.most_common()) if digest}
        base = {}
        for path in paths:
            accuracy = rows[path].get("base_model")
            base[path] = rows[path].get("base_weights") or known.get(accuracy, accuracy)
        usual = Counter(base.values()).most_common(1)[0][0]
        found += [path for path in paths if base[path] != usual]
    return found


def rows_in(folder: Path) -> dict[Path, dict[str, Any]]:
    """All rows of a dataset's folder."""
    # TABLE/NETWORK/ROW.json: other files, such as a scenario or a demo, are no rows and lie higher.
    return {path: read_row(path) for path in sorted(folder.glob("*/*/*.json"))}


def outdated(rows: Mapping[Path, Mapping[str, Any]]) -> dict[Path, Mapping[str, Any]]:
    """Those that are marked as outdated, because their method has changed since."""
    return {path: row for path, row in rows.items() if row.get("outdated")}


def asked_seeds(row: Mapping[str, Any]) -> tuple[int, ...]:
    """The seeds that a row was asked for; a method that does not depend on them has one of them."""
    return tuple(row.get("asked_seeds", row["seeds"]))


def read_row(path: Path) -> dict[str, Any]:
    """A row from its file; a file that is no row is an error that names it."""
    try:
        row: dict[str, Any] = read_json(path)
        if not isinstance(row, dict) or not {"settings", "seeds", "metrics"} <= set(row):
            raise ValueError("it has no settings, seeds or metrics")
        check_figures(row)
    except (BranchoutError, ValueError) as error:
        raise BranchoutError(f"{path} cannot be read as a row ({error}); delete it and run this again") from None
    return row


def check_figures(row: Mapping[str, Any]) -> None:
    """A ValueError says which figures of a row are no numbers."""
    if not isinstance(row["metrics"], dict):
        raise ValueError(f"metrics is {row['metrics']!r}")
    for name, value in {**row["metrics"], "base_model": row.get("base_model")}.items():
        if not isinstance(value, int | float | None):
            raise ValueError(f"{name} is {value!r}")


def write(folder: Path, name: str, row: Mapping[str, Any]) -> Path:
    """Write one row."""
    return write_together({folder / f"{name}.json": row})[0]


def write_together(rows: Mapping[Path, Mapping[str, Any]]) -> list[Path]:
    """Write the rows of one measurement: all are on disk before the first gets its name.

    So a process that is killed leaves none of them, and no row of another measurement is written beside one of this.
    """
    with ExitStack() as moves:
        for path, row in rows.items():
            partial = moves.enter_context(atomic_write(path))
            write_json(partial, json.loads(json.dumps(row, default=_plain)))
    return list(rows)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return settings_dict(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return str(value)
