"""Invented rows are about countless images, so that chance decides nothing where a test is not about it."""

import pytest

from branchout.bench import measurements


@pytest.fixture(autouse=True)
def countless_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "TEST_IMAGES", {"paper": 10**12, "toys": 10**12})
