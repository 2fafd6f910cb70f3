"""What `check` says about the images of an extension."""

from dataclasses import replace

import torch
from helpers import BASE, NEW, exemplars

from branchout import api
from branchout.data.samples import Samples
from branchout.method.config import ExtendConfig
from branchout.method.running.effort import SMALL_INPUTS, Plan
from branchout.method.running.forecast import forecast
from branchout.method.running.prepared_extension import Prepared
from branchout.method.split import DataSplit


def test_classes_whose_only_images_are_held_out_are_not_called_missing(base: api.Model, train: Samples) -> None:
    model = base.saved.classifier
    split = DataSplit.of(model.space, train.of_classes(NEW), exemplars(train), None, 0)
    assert split.memory is not None
    missing, single = BASE[0], BASE[1]
    split = replace(
        split,
        memory=split.memory.of_classes(BASE[2:]),
        dev=split.dev.of_classes([*BASE[1:], *NEW]),
        test=split.test.of_classes([*BASE[1:], *NEW]),
    )
    prepared = Prepared(model, split, ExtendConfig(), ())
    plan = Plan("last", SMALL_INPUTS, seconds=1.0)
    told = list(forecast(prepared, plan, device=torch.device("cpu"), base_bytes=0))
    assert [line for line in told if missing in line] == [f"  no image of: {missing}"]
    (about,) = [line for line in told if single in line]
    assert "held-out" in about
