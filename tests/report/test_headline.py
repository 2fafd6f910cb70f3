"""The first sentence of a report does not hide that an earlier step got worse."""

from __future__ import annotations

from dataclasses import replace

from branchout import api
from branchout.data.samples import Samples
from branchout.report.counts import counts_at
from branchout.report.data import HeldOut
from branchout.report.headline import headline
from branchout.report.page import render


def test_earlier_steps_that_lost_images_are_named(extended_twice: api.Model, val: Samples) -> None:
    report = extended_twice.report_data(val, gallery=0)
    counts = counts_at(report, report.points.saved)
    parts = [replace(part, lost=5 if part.number < 3 else 0, gained=2) for part in counts.parts]
    found = headline(report, replace(counts, parts=parts))
    step = next(part for part in parts if part.number == 1)
    assert found.worse == f"; step 1 lost 3 of {step.images} images"  # not the base, nor the new step
    assert headline(report, replace(counts, parts=[replace(part, lost=0) for part in parts])).worse == ""


def test_without_labelled_images_held_out_ones_tell_of_earlier_steps(extended_twice: api.Model) -> None:
    report = extended_twice.report_data()
    before = {"all": 0.9, "base": 0.9, "novel": 0.8, "steps": [0.8, None], "overlap": None, "avg": 0.85}
    after = {"all": 0.8, "base": 0.95, "novel": 0.3, "steps": [0.2, 1.0], "overlap": None, "avg": 0.7}
    report = replace(report, held_out=HeldOut(40, before, after, {}))
    assert "step 1 20.0%, 60.0 points lower than before" in headline(report, None).worse
    assert "60.0 points lower than before" in render(report)
    assert headline(replace(report, held_out=HeldOut(40, before, before, {})), None).worse == ""
