"""Models that the tests of stage I start from."""

from dataclasses import replace

import pytest
from helpers import BASE, NEW, SIZES, untrained
from torch import nn

from branchout import api
from branchout.model.classifier import Classifier


@pytest.fixture
def models(base: api.Model) -> dict[str, Classifier]:
    """A trained base, and models that have a step already."""
    two = untrained(BASE, NEW)
    width = two.backbone.features
    heads = [nn.Linear(width, len(names)) for names in (BASE, NEW)]
    step = replace(two.steps[0], head=heads[1])
    return {
        "base": base.saved.model(),
        "after a step": two,
        "after a step, linear": Classifier(two.arch, two.backbone, heads[0], BASE, SIZES, "glyph", [step]),
        "after an fc step": untrained(BASE, NEW, where=["fc"]),
    }
