"""Write the pages that compare the paper's numbers with the measured rows: Markdown, and HTML beside it.

python -m benchmarks.paper --data tiny-imagenet-200
python -m benchmarks.paper --data glyphs --page docs/results-glyphs.md
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.paper.figures import draw
from benchmarks.paper.markdown import markdown
from benchmarks.paper.page import beside, html
from benchmarks.paper.report import report
from branchout.errors import BranchoutError
from branchout.files import check_output, write_text


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.paper", description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="tiny-imagenet-200", help="name of the dataset, a folder of --results")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder that holds the measured rows")
    parser.add_argument("--page", type=Path, default=Path("docs/results.md"), help="the Markdown file to write")
    options = parser.parse_args(words)
    try:
        written = write_pages(options.results, options.data, options.page)
    except BranchoutError as error:
        sys.exit(f"error: {error}")
    print(f"Written: {', '.join(map(str, written))}")


def write_pages(results: Path, dataset: str, page: Path) -> list[Path]:
    """Draw the figures and write both pages; returns the pages."""
    check_output(page, such_as="results.md")
    page_html = beside(page)
    drawn = draw(results, dataset, page.parent / "figures" / dataset)
    found = report(results, dataset, [path.relative_to(page.parent) for path in drawn])
    link = os.path.relpath(results, page.parent)
    texts = {
        page: markdown(found, link, page_html.name),
        page_html: html(found, link, {path.stem: path.read_text(encoding="utf-8") for path in drawn}),
    }
    for place, content in texts.items():
        write_text(place, content)
    return list(texts)


if __name__ == "__main__":
    main()
