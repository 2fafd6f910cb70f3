"""What an extension trains in the time it is given: which branch, with how many views and epochs.

Without `minutes`, networks with large inputs on a CPU get seven, and clone their last stage or less; everything else is
trained as `usual_effort` says, without a measurement. The plan of a run is kept in its work folder: it depends on
measured times, and a run that was stopped must resume with the same one.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, replace
from pathlib import Path

import torch

from branchout.errors import BranchoutError
from branchout.files import read_json, write_json
from branchout.method.config import ExtendConfig
from branchout.method.running.effort import (
    BRANCHES,
    HEADS,
    LARGE_INPUTS,
    ON_GPU,
    Effort,
    Plan,
    effort_for,
    trains_head_alone,
    usual_effort,
)
from branchout.method.running.engine import engine_for
from branchout.method.running.measure_speed import measure_speeds
from branchout.method.running.speeds import Counts, Speeds, frozen_passes, seconds_for, table_rows
from branchout.method.split import DataSplit
from branchout.model.classifier import Classifier
from branchout.training.loop import OnProgress, silent
from branchout.units import duration

_log = logging.getLogger(__name__)
FILE = "plan.json"
DEFAULT_MINUTES = 7.0
"""An extension of photos on a CPU takes at most eight minutes in all, with imports and reading the folders."""
MOST_CACHED = 180_000_000
"""Bytes of cached outputs on a CPU, so that an extension takes at most 1.5 GB in all."""
MEMORY_SHORT = f"a branch would cache more than {MOST_CACHED // 10**6} MB of frozen features"


def make_plan(
    base: Classifier,
    split: DataSplit,
    config: ExtendConfig,
    device: torch.device,
    *,
    timed: bool = False,
    on_progress: OnProgress = silent,
) -> Plan:
    """The best that fits the time, from a few seconds of measurement where there is a limit, or with `timed`."""
    large = effort_for(device, base.preprocessing.size) == LARGE_INPUTS
    usual = usual_effort(base, config.where, device, replay=config.replays)
    counts = Counts.of(base, split, config)
    engine = engine_for(base, device, frozen_passes(usual, counts))
    limited = (config.minutes is not None or large) and config.replays
    choices = options(base, config, device) if limited else [Plan.of(base, config.where, _with_given(usual, config))]
    if not limited and not timed:
        return replace(choices[0], engine=engine)
    branches = sorted({plan.branch for plan in choices})
    speeds = measure_speeds(base, split, branches, device, engine, counts.fused, on_progress)
    if device.type == "cpu":
        choices = [plan for plan in choices if _fits_memory(plan, counts, speeds)] or choices[:1]
    forecasts = [seconds_for(plan.effort, plan.branch, counts, speeds) for plan in choices]
    timed_choices = [replace(plan, engine=speeds.engine, seconds=s) for plan, s in zip(choices, forecasts, strict=True)]
    if not limited:
        return timed_choices[0]
    chosen = choose_plan(timed_choices, config)
    if chosen.more or any(plan.branch == config.where for plan in choices):
        return chosen
    return replace(chosen, more=f"{MEMORY_SHORT}; to train the last stage anyway: --branch last")


def _fits_memory(plan: Plan, counts: Counts, speeds: Speeds) -> bool:
    return table_rows(plan.effort, counts) * speeds.table_bytes[plan.branch] <= MOST_CACHED


def options(base: Classifier, config: ExtendConfig, device: torch.device) -> list[Plan]:
    """What could be trained, from the least accurate to the most.

    Branches have the views and epochs that the user gave; a head alone has those of `HEADS`.
    """
    efforts = ON_GPU if device.type == "cuda" else BRANCHES
    names = base.backbone.names
    deeper = [names[-2]] if len(names) > 1 else []
    given = config.epochs is not None or config.views is not None  # a head alone has neither
    head = ["fc"] if base.has_linear_head and not given else []
    branches = [*head, "last", *deeper] if config.branch is None else [config.branch]
    found = [
        Plan.of(base, branch, _with_given(effort, config))
        for branch in branches
        for effort in (HEADS if trains_head_alone(base, branch) else efforts)
    ]
    return list(dict.fromkeys(found))


def _with_given(effort: Effort, config: ExtendConfig) -> Effort:
    """The effort with the user's views and epochs. Epochs that the user sets are all trained."""
    effort = effort if config.views is None else replace(effort, views=config.views)
    return effort if config.epochs is None else replace(effort, epochs=config.epochs, stops=False)


def choose_plan(timed: list[Plan], config: ExtendConfig) -> Plan:
    """The last option that fits the time, or the shortest. Without `minutes` no more than the last stage is cloned."""
    minutes = DEFAULT_MINUTES if config.minutes is None else config.minutes
    allowed = [plan for plan in timed if config.minutes is not None or plan.branch in ("fc", config.where)]
    fitting = [plan for plan in allowed if _seconds(plan) <= 60 * minutes]
    chosen = fitting[-1] if fitting else min(allowed, key=_seconds)
    too_short = "" if fitting else _too_short(chosen, config)
    better = timed[timed.index(chosen) + 1 :]
    if not better:
        return replace(chosen, too_short=too_short)
    asked = 0.0 if config.minutes is None else 60 * minutes
    needed = math.ceil(max(60, asked, _seconds(chosen), min(map(_seconds, better))) / 60)
    following = [plan for plan in timed if _seconds(plan) <= 60 * needed][-1]
    more = f"with --minutes {needed}: {following.described()} (about {duration(_seconds(following))})"
    if following not in allowed:
        more += "; without --minutes, no branch deeper than the last stage is trained"
    return replace(chosen, too_short=too_short, more=more)


def _too_short(shortest: Plan, config: ExtendConfig) -> str:
    """The sentence about a limit that even the shortest plan exceeds."""
    if config.minutes is None:
        return f"This is the shortest plan; none fits into the default limit of {DEFAULT_MINUTES:g} minutes"
    needed = _seconds(shortest)
    return (
        f"--minutes {config.minutes:g} is too short. The shortest plan is trained anyway and takes about "
        f"{duration(needed)}; it fits --minutes {math.ceil(needed / 60)}"
    )


def _seconds(plan: Plan) -> float:
    return plan.seconds or 0.0


def kept_plan(work: Path | None) -> Plan | None:
    """The plan of a run that was stopped; None if there is none, or with a warning if it cannot be read."""
    if work is None or not (work / FILE).is_file():
        return None
    try:
        content = read_json(work / FILE)
        return Plan(**{**content, "effort": Effort(**content["effort"])})
    except (BranchoutError, TypeError, KeyError):
        _log.warning("The plan of the interrupted run, %s, cannot be read. A new plan is made.", work / FILE)
        return None


def keep_plan(work: Path | None, plan: Plan) -> None:
    if work is not None:
        write_json(work / FILE, asdict(plan))
