"""What tests of the bench share."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from branchout import cli
from branchout.bench import measurements


@pytest.fixture(autouse=True)
def countless_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented rows are about so many that chance decides nothing where a test is not about it."""
    monkeypatch.setattr(measurements, "TEST_IMAGES", {"paper": 10**12, "toys": 10**12})


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """A command typed in a wide window: its exit status, what it said and what it complained of."""

    def answer(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["branchout", *map(str, words)])
        status = 0
        try:
            cli.main()
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 0
        return status, *capsys.readouterr()

    return answer
