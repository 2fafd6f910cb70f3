"""One measured row on disk: a JSON file that says what was measured, how, on what and by which command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass
from decimal import ROUND_HALF_UP, Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from branchout.files import atomic_write
from branchout.metrics import Accuracies
from branchout.training.optimisation import settings_dict

METRICS = ("all", "base", "novel", "overlap", "avg")
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
    """Mean and standard deviation over seeds, in percent."""
    means: dict[str, float | None] = {}
    spreads: dict[str, float | None] = {}
    for name in METRICS:
        values = [getattr(row, name) for row in rows]
        known = all(value is not None for value in values)
        means[name] = percent(float(np.mean(values))) if known else None
        spreads[name] = percent(float(np.std(values))) if known else None
    return means, spreads


def provenance() -> dict[str, Any]:
    """Versions, commit, hardware and command of this very run."""
    packages = ("torch", "torchvision", "timm", "numpy", "scikit-learn")
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "hardware": hardware(),
        "commit": commit(),
        "command": command(),
    }


def command() -> str:
    """What to type in the repository to run this again."""
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
    """The commit of the code, marked if the code has changes; $BRANCHOUT_COMMIT where it runs without git.

    Rows and pages change while they are made, and say nothing about what made them.
    """
    if "BRANCHOUT_COMMIT" in os.environ:
        return os.environ["BRANCHOUT_COMMIT"]
    try:
        # Installed in a folder of somebody's repository it is not part of it.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        name, changes = _git(package, "rev-parse", "--short=12", "HEAD"), _git(package, "status", "--porcelain", ".")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-dirty" if changes else name


def _git(where: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout.strip()


def on_another_base(rows: Mapping[Path, Mapping[str, Any]]) -> list[Path]:
    """Rows that rest on another training of the base model than most of their folder do.

    On a GPU no training repeats to the bit: a row that is made again after the base was lost is right by itself, but
    should not be compared with the others. A base is known by its digest; rows from before that was written down have
    the base whose accuracy they name.
    """
    folders: dict[Path, list[Path]] = {}
    for path in rows:
        folders.setdefault(path.parent, []).append(path)
    found = []
    for paths in folders.values():
        told = Counter((rows[path].get("base_model"), rows[path].get("base_weights")) for path in paths)
        # Of two with one accuracy the more common.
        known = {accuracy: digest for (accuracy, digest), _ in reversed(told.most_common()) if digest}
        base = {}
        for path in paths:
            accuracy = rows[path].get("base_model")
            base[path] = rows[path].get("base_weights") or known.get(accuracy, accuracy)
        usual = Counter(base.values()).most_common(1)[0][0]
        found += [path for path in paths if base[path] != usual]
    return found


def check_figures(row: Mapping[str, Any]) -> None:
    """Whether a row's figures are figures; a ValueError says which are not."""
    for name, value in {**row["metrics"], "base_model": row.get("base_model")}.items():
        if not isinstance(value, int | float | None):
            raise ValueError(f"{name} is {value!r}")


def write(folder: Path, name: str, row: Mapping[str, Any]) -> Path:
    """Write a row in one move, so that a reader never sees half of it."""
    return write_together({folder / f"{name}.json": row})[0]


def write_together(rows: Mapping[Path, Mapping[str, Any]]) -> list[Path]:
    """Write rows that belong together: all are on disk before the first gets its name, so that a killed process does
    not leave one measurement's rows to be filled up by another's."""
    with ExitStack() as moves:
        for path, row in rows.items():
            partial = moves.enter_context(atomic_write(path))
            content = json.dumps(row, indent=1, ensure_ascii=False, default=_plain)
            partial.write_text(content + "\n", encoding="utf-8")
    return list(rows)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return settings_dict(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return str(value)
