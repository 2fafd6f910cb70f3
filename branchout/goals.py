"""The one list of metrics and goals with their wording, how a goal is read, and the poolers.

It imports nothing slow: a typo in a goal or a pooler is answered before numpy or torch is imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from branchout.errors import BranchoutError, printable, shortened


@dataclass(frozen=True)
class Metric:
    """What one accuracy measures."""

    meaning: str
    of_part: bool = False
    """Whether it is of one part of the classes alone: base, new or overlapping."""
    of_old: bool = False
    """Whether its classes are old: then the model before a step is measured on the same images."""


METRICS = {
    "all": Metric("accuracy on all images"),
    "base": Metric("accuracy on classes that only the base knows", of_part=True, of_old=True),
    "novel": Metric("accuracy on classes that only new branches know", of_part=True),
    "overlap": Metric("accuracy on classes that several branches know", of_part=True, of_old=True),
    "avg": Metric("mean of the accuracies on base classes, on each step's new classes and on overlapping classes"),
}
"""What is measured after each step, in the order of columns."""
PARTS_FIRST = tuple(sorted(METRICS, key=lambda name: not METRICS[name].of_part))
"""The same in the order of headlines and axes."""
STEP_METRICS = ("incremental", "avg_steps")
"""The means of `all` and of `avg` over the base and all steps of a sequence."""
GOALS = ("all", "avg", "balanced", "novel", "base", "overlap")
"""What an operating point can be chosen to maximise: a metric, or one of `COMBINED`.

Besides, any metric can be given a minimum, as in `novel>=0.80`.
"""
COMBINED = {"balanced": "mean of all and avg"}
"""Goals that are not one metric, and what they maximise."""
PAPER_GOALS = ("all", "balanced", "avg")
"""The goals of the paper's tables: best-Acc_all, best-balanced, best-Acc_avg. Every extension reports them."""
CHOSEN_ON = {
    "dev": "validation images",
    "held-out": "images held out from training",
    "pseudo": "new images and pseudo-exemplars of old classes; the accuracies only compare operating points: that on "
    "images of old classes is not measured, and may be far higher",
}
"""The images an operating point was chosen on, by the key that a frontier keeps."""
POOLERS = ("max", "average")
"""How one logit is made of those that several branches have for a class."""

CONDITION = re.compile(rf"^\s*({'|'.join(METRICS)})\s*>=\s*([0-9.]+)\s*(%?)\s*$")
ATTEMPT = re.compile(r"^\s*(\w+)\s*[>=≥]+\s*([0-9.]+\s*%?)\s*$")
"""What was probably meant as a condition."""
OTHER_NAMES = {"new": "novel", "old": "base", "average": "avg", "mean": "avg", "shared": "overlap"}
"""What metrics are also called, to suggest the right name."""
POSSIBLE = f"A goal is one of {', '.join(GOALS)}, or a minimum of one accuracy, such as 'novel>=0.80'"
UNCLEAR = 10
"""In a condition, a number up to 1 is a fraction and one from here on a percentage; between the two it is refused."""


def meaning(goal: str) -> str:
    """What a named goal maximises, in words."""
    return f"highest {METRICS[goal].meaning if goal in METRICS else COMBINED[goal]}"


def check_goal(goal: str) -> tuple[str, float] | None:
    """The metric and minimum of a condition, None for a named goal; anything else is an error."""
    if not isinstance(goal, str):
        raise BranchoutError(f"goal must be a name or a condition, found {shortened(goal)}")
    condition = CONDITION.match(goal)
    if condition:
        metric, number, percent = condition.groups()
        return metric, _fraction(number, percent)
    if goal not in GOALS:
        raise _wrong_goal(goal)
    return None


def _wrong_goal(goal: str) -> BranchoutError:
    """The error for what is no goal, with what was probably meant."""
    if len(re.findall("[<>=≥≤]+", goal)) > 1:
        return BranchoutError(
            f"{printable(goal)!r} has several conditions, and a goal can have one. {POSSIBLE}: of the points that "
            "reach it, the one with the highest accuracy on all images is chosen"
        )
    attempt = ATTEMPT.match(goal.lower())
    name = attempt[1] if attempt else goal.lower()
    near = OTHER_NAMES.get(name) or next(iter(get_close_matches(name, METRICS if attempt else GOALS, n=1)), "")
    meant = f"{near}>={attempt[2]}" if attempt and near else near
    if attempt and meant:
        check_goal(meant)
    hint = f"Did you mean '{meant}'? " if meant else ""
    return BranchoutError(f"no goal is called {printable(goal)!r}. {hint}{POSSIBLE}")


def read_as(goal: str) -> str:
    """A goal as it was understood: the minimum of a condition in percent, whichever way it was written."""
    condition = check_goal(goal)
    return goal if condition is None else f"{condition[0]} ≥ {100 * condition[1]:.6g}%"


def _fraction(number: str, percent: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise BranchoutError(f"{number!r} is not a number. Write a fraction such as 0.80, or 80%.") from None
    if not percent and 1 < value < UNCLEAR:
        raise BranchoutError(
            f"{number} is neither a fraction (up to 1) nor a percentage (from {UNCLEAR} on). "
            f"Write a fraction such as 0.80, or {number}% for percent."
        )
    value = value / 100 if percent or value > 1 else value
    if value > 1:
        raise BranchoutError(f"An accuracy cannot be {value:.0%}. Write a fraction such as 0.80, or 80%.")
    return value
