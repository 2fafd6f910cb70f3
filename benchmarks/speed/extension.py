"""How long an extension takes against training jointly from scratch, from rows that one `bench` run measured.

branchout bench disjoint-40 --data TINY_IMAGENET_DIR --method joint --method branchout
python benchmarks/speed/extension.py --rows results/tiny-imagenet-200/disjoint-40/resnet10 --out results
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from branchout.bench import rows as results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="the folder of one table's rows")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    ours, joint = (
        json.loads((options.rows / f"{name}.json").read_text())
        for name in ("score-fusion-branchout-balanced", "joint-plain")
    )
    if ours["hardware"] != joint["hardware"] or ours["commit"] != joint["commit"]:
        raise SystemExit("these rows were measured on different machines or commits; run both again, together")
    if ours.get("gpu_shared") or joint.get("gpu_shared"):
        raise SystemExit(
            "these rows were measured while others used the GPU, so that their times say little; use --out"
        )
    taken, against = sum(ours["seconds"].values()), sum(joint["seconds"].values())
    content = {
        "of": "whole extension: stage I, features, fusion, choice (median over seeds)",
        "against": "joint training from scratch, in the same run",
        "ratio": taken / against,
        "of_seconds": taken,
        "against_seconds": against,
        **{key: ours[key] for key in ("versions", "hardware", "commit", "command", "settings")},
    }
    path = results.write(options.out / "speed", "extension", content)
    print(f"extension / joint = {taken:.1f} s / {against:.1f} s = {taken / against:.3f}; written to {path}")


if __name__ == "__main__":
    main()
