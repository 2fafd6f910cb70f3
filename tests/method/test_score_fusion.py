"""The losses of stage II."""

import pytest
import torch

from branchout.labels import LabelSpace
from branchout.method import score_fusion

DISJOINT = LabelSpace.of(["a", "b", "c"], ["d", "e"])


def test_routing_loss_weighs_splits_equally_whatever_their_sizes() -> None:
    columns = torch.randn(1, 40, 1, DISJOINT.columns, dtype=torch.float64)
    origin = torch.tensor([[0] * 37 + [1] * 3])
    got = score_fusion.routing_loss(DISJOINT, columns, origin, None)[0, 0]
    halves = [
        score_fusion.routing_loss(DISJOINT, columns[:, part], origin[:, part], None)[0, 0]
        for part in (slice(0, 37), slice(37, 40))
    ]
    assert got == pytest.approx(sum(halves).item(), abs=1e-12)  # each half alone already carries its weight of 1/2
