"""Attack the command line, files and the server for some minutes; print counts, and write them to a file.

    python -m benchmarks.torture --minutes 30 --out results/torture.json

Every kind of attack gets the same share of the time. A fault is a traceback, a hang over 10 seconds, a crash, more than
1 GB of memory, a damaged model, or an answer that a mutated file changed in silence. Any fault ends with status 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.torture.files import Case, checkpoints, hostile_images, models, scenarios
from benchmarks.torture.fixtures import Material, make
from benchmarks.torture.processes import disks, kills
from benchmarks.torture.requests import fuzzed_requests
from benchmarks.torture.run import quiet_environment

ATTACKS: dict[str, Callable[[Material, int], Iterator[Case]]] = {
    "disks": disks,
    "models": models,
    "scenarios": scenarios,
    "images": hostile_images,
    "checkpoints": checkpoints,
    "requests": fuzzed_requests,
    "kills": kills,
}


SLOW = ("hang", "others had to wait")
"""Faults that a pause of the whole machine looks like. Such a case is run once more; the result counts them."""


def attack(name: str, material: Material, seed: int, seconds: float) -> dict[str, Any]:
    """Run cases of one kind until the time is over; counts of cases and faults, with the first faults of each kind."""
    faults: Counter[str] = Counter()
    examples: list[str] = []
    count = slow = 0
    limit = time.monotonic() + seconds
    cases = ATTACKS[name](material, seed)
    for case, run in cases:
        fault = run()
        if fault in SLOW and name != "kills":  # a kill comes at another moment the next time
            slow += 1
            fault = run()
        count += 1
        if fault is not None:
            faults[fault.split(":")[0]] += 1
            examples += [f"{case}: {fault}"[:400]] if len(examples) < 20 else []
        if time.monotonic() > limit:
            break
    close = getattr(cases, "close", None)
    if close is not None:
        close()
    return {"cases": count, "slow once": slow, "faults": dict(faults), "examples": examples}


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--minutes", type=float, default=30.0)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--only", choices=list(ATTACKS), nargs="*", default=list(ATTACKS))
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    import torch  # imported before the first fork, so that no case pays for it

    import branchout.cli  # noqa: F401
    from branchout import api  # noqa: F401
    from branchout.bench.rows import provenance
    from branchout.files import write_json

    torch.set_num_threads(1)
    start = time.monotonic()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, quiet_environment(Path(folder)):
        material = make(Path(folder))
        for number, name in enumerate(asked.only):
            left = asked.minutes * 60 - (time.monotonic() - start)
            found[name] = attack(name, material, asked.seed, left / (len(asked.only) - number))
            slow = f", {found[name]['slow once']} slow once" if found[name]["slow once"] else ""
            print(f"{name:12} {found[name]['cases']:6,} cases  {found[name]['faults'] or 'no fault'}{slow}", flush=True)
            for example in found[name]["examples"]:
                print(f"    {example}", flush=True)
    total = sum(each["cases"] for each in found.values())
    faults = sum(sum(each["faults"].values()) for each in found.values())
    print(f"{total:,} cases, {faults} faults in {(time.monotonic() - start) / 60:.1f} minutes")
    if asked.out:
        about = {"minutes": round((time.monotonic() - start) / 60, 1), "seed": asked.seed, "cores": os.cpu_count()}
        write_json(asked.out, {"cases": total, "faults": faults, "attacks": found, **about, **provenance()})
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
