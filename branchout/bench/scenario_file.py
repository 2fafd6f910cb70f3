"""The class split of an experiment: drawn from the plan or, for clustered scenarios, kept in a file beside the rows.

A clustered scenario depends on a network trained here, and another training of that network would split the samples
differently. So it is drawn once and read from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from branchout.bench.plan import Plan, difference, flat
from branchout.data.scenarios import Scenario
from branchout.errors import BranchoutError
from branchout.files import atomic_write, lock


def with_fewer_base_classes(scenario: Scenario, plan: Plan) -> Scenario:
    """Only `plan.kept` of the base classes, drawn by the split's seed; the new classes stay the same."""
    if plan.kept is None:
        return scenario
    base, *steps = scenario.branches
    fewer = sorted(np.random.default_rng(plan.split).permutation(len(base))[: plan.kept].tolist())
    return replace(scenario, branches=(tuple(base[n] for n in fewer), *steps))


def draw_once(place: Path, plan: Plan, network: Mapping[str, Any], drawn: Callable[[], Scenario]) -> Scenario:
    """The scenario in a file, which the first process draws; it must be the one that the plan asks for."""
    if not place.exists():
        with lock(place.with_name(f".{place.name}.lock")):
            if not place.exists():
                with atomic_write(place) as partial:
                    replace(drawn(), network=network).save(partial)
    scenario = Scenario.load(place)
    base, *steps = [len(names) for names in scenario.branches]
    found = {
        "scenario": scenario.name,
        "base": base,
        "novel": steps,
        "overlap": len(scenario.space.overlap),
        "split": scenario.seed,
        "network": scenario.network or network,  # older files do not name it
    }
    asked = {
        "scenario": plan.scenario,
        "base": base if plan.base is None else plan.base,
        "novel": [plan.novel] * plan.steps,
        "overlap": plan.novel if plan.scenario == "overlap-full" else plan.overlap,
        "split": plan.split,
        "network": network,
    }
    differing = difference(flat(found), asked)
    if differing:
        raise BranchoutError(
            f"{place} was drawn with {differing}. Delete it and the rows below it, or choose another --out"
        )
    return scenario
