"""Run the demo and write down what it reached.

python benchmarks/demo.py --out results
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console

from branchout import demo
from branchout.bench import rows as results
from branchout.goals import METRICS
from branchout.training.loop import silent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model, _ = demo.run(Path(folder) / "demo", console.print, silent)
    event = model.saved.history[-1]
    measured = event["measured"]
    space = model.classifier.space
    figures = {
        name: {part: results.percent(value) for part, value in each.items() if part in METRICS}
        for name, each in {"before": measured["before"], **measured["goals"]}.items()
    }
    content = {
        "dataset": "glyphs",
        "scenario": "overlap-style",
        "base_classes": len(space.branches[0]),
        "novel_classes": len(space.branches[1]),
        "overlap_classes": len(space.overlap),
        "steps": 1,
        "arch": model.classifier.arch,
        "method": "score-fusion",
        "recipe": event["recipe"],
        "images": measured["images"],
        "before": figures.pop("before"),
        "points": figures,
        "seconds": event["seconds"],
        "settings": {key: value for key, value in event.items() if key not in ("measured", "seconds", "losses")},
        **results.provenance(),
    }
    console.print(f"written to {results.write(options.out / 'glyphs' / 'demo', 'score-fusion-branchout', content)}")


if __name__ == "__main__":
    main()
