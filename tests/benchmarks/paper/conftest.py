"""What tests of the bench share."""

import pytest

from benchmarks.paper import measurements


@pytest.fixture(autouse=True)
def countless_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented rows are about so many that chance decides nothing where a test is not about it."""
    monkeypatch.setattr(measurements, "TEST_IMAGES", {"paper": 10**12, "toys": 10**12})
