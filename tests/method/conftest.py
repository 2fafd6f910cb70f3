"""Models that the tests of stage I start from."""

import pytest
from helpers import BASE, NEW, untrained

from branchout import api
from branchout.model.classifier import Classifier


@pytest.fixture
def models(base: api.Model) -> dict[str, Classifier]:
    """A trained base, and models that have a step already."""
    two = untrained(BASE, NEW)
    return {
        "base": base.saved.model(),
        "after a step": two,
        "after an fc step": untrained(BASE, NEW, where=["fc"]),
    }
