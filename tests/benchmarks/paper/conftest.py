"""What the tests of the pages share."""

from pathlib import Path

import pytest
from measured import ROOT

from benchmarks.paper import rows
from benchmarks.paper.rows import Row, read


@pytest.fixture(autouse=True)
def countless_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented rows are about so many images that chance decides nothing where a test is not about it."""
    monkeypatch.setitem(rows.TEST_IMAGES, "paper", 10**12)


@pytest.fixture(scope="session")
def measured_rows() -> dict[Path, Row]:
    """The rows of the repository."""
    return read(ROOT / "results")
