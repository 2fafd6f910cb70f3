"""Time and memory of the commands a user types, each in a process of its own: check, extend, evaluate.

    python benchmarks/commands.py NEW/ --memory OLD/ --test TEST/ --base efficientnet_lite0 --name imagenet-flowers

Branchout's cache is empty at the start; the base's weights may be downloaded already. Peak memory is the largest
resident set of one process, as the operating system reports it; the forecast is the line that `check` prints. Runs on
Linux and macOS.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from branchout.bench import rows
from branchout.files import read_json, write_json
from branchout.training.loop import best_device

IN_BYTES = 1 if sys.platform == "darwin" else 1024
"""The unit of `ru_maxrss`."""
STARTER = """
import resource, subprocess, sys
with open(sys.argv[1], "w") as output:
    status = subprocess.call([sys.executable, "-m", "branchout", *sys.argv[2:]], stdout=output)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""
"""A process starts with the peak of the one that starts it, so a small one starts the command."""


def run(words: list[str], cache: Path, shown: Path) -> dict[str, Any]:
    """Seconds and peak memory of one command; its output goes to the file `shown`."""
    environment = {**os.environ, "BRANCHOUT_CACHE": str(cache)}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", STARTER, shown, *words], stdout=subprocess.PIPE, env=environment, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"branchout {words[0]} failed with status {done.returncode}")
    peak = int(done.stdout) * IN_BYTES
    print(f"{words[0]}: {seconds:.1f} s, {peak / 1e9:.2f} GB", flush=True)
    return {"seconds": round(seconds, 1), "peak_memory_bytes": peak}


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    given = [str(asked.new), "--base", asked.base, "--memory", str(asked.memory)]
    given += [] if asked.branch is None else ["--branch", asked.branch]
    cache, shown, model, accuracy = (folder / name for name in ("cache", "shown.txt", "v2", "accuracy.json"))
    check = run(["check", *given], cache, shown)
    (forecast,) = re.findall(r"^time: (.*)$", shown.read_text(), re.MULTILINE)
    extend = run(["extend", *given, "--out", str(model)], cache, shown)
    evaluate = run(["evaluate", str(model), str(asked.test), "--json", str(accuracy)], cache, shown)
    found = read_json(accuracy)
    return {
        "what": "commands",
        "dataset": asked.name,
        "arch": asked.base,
        "branch": asked.branch or "last",
        "check": {**check, "forecast": forecast},
        "extend": extend,
        "evaluate": evaluate,
        "accuracy": {"before": found["before"], "after": found["after"]},
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("new", type=Path)
    words.add_argument("--memory", type=Path, required=True)
    words.add_argument("--test", type=Path, required=True)
    words.add_argument("--base", required=True)
    words.add_argument("--branch")
    words.add_argument("--name", required=True, help="of the images, for the file's name")
    words.add_argument("--out", type=Path, default=Path("results/commands"))
    asked = words.parse_args()
    made_by = rows.provenance()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(asked, Path(folder))
    write_json(asked.out / f"{asked.name}-{best_device().type}.json", {**row, **made_by})


if __name__ == "__main__":
    main()
