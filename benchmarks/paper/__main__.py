"""Write the pages of results, the figures and the table of all rows.

python -m benchmarks.paper
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.paper.explore import as_csv, as_html
from benchmarks.paper.figures import draw
from benchmarks.paper.pages import pages
from benchmarks.paper.rows import read
from benchmarks.paper.tables import DATASETS
from branchout.errors import BranchoutError
from branchout.files import write_text


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.paper", description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder that holds the measured rows")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder to write into")
    options = parser.parse_args(words)
    try:
        written = write_pages(options.results, options.docs)
    except BranchoutError as error:
        sys.exit(f"error: {error}")
    print(f"Written: {len(written)} files under {options.docs}")


def write_pages(results: Path, docs: Path) -> list[Path]:
    """Draw the figures and write every page; returns the pages."""
    rows = read(results)
    if not rows:
        raise BranchoutError(f"{results} holds no rows; make some with: branchout bench disjoint-40 --data DIR")
    drawn = draw(rows, docs / "figures", tuple(DATASETS))
    texts = {
        **pages(rows, results, drawn),
        "results/rows.csv": as_csv(rows),
        "results/rows.html": as_html(rows),
    }
    for name, content in texts.items():
        write_text(docs / name, content)
    return [docs / name for name in texts]


if __name__ == "__main__":
    main()
