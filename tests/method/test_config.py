"""Settings of the wrong kind are refused where they are given, not deep inside a run."""

import json
from typing import Any

import numpy as np
import pytest

from branchout import api
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.method.compact import CompactConfig
from branchout.method.config import ExtendConfig


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("exemplars", 0, 1),
        ("exemplars", None, 1),
        ("epochs", "3", 1),
        ("epochs", 0, 1),
        ("views", -1, 0),
        ("views", 2.0, 0),
        ("seed", True, 0),
    ],
)
def test_what_is_no_whole_number_is_refused(name: str, value: object, least: int) -> None:
    with pytest.raises(BranchoutError, match=f"{name} .*whole number.*{least}, found {value!r}"):
        ExtendConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["minutes", "memory_limit"])
@pytest.mark.parametrize("value", ["3", 0, float("nan"), True])
def test_limits_are_numbers_above_0(name: str, value: object) -> None:
    with pytest.raises(BranchoutError, match=f"{name.split('_')[0]}.*above 0, found {value!r}"):
        ExtendConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "setting", [{"recipe": 3}, {"goal": None}, {"branch": 3}, {"pooler": 3}, {"fuse": "no"}, {"minutes": 10**400}]
)
def test_other_wrong_types_are_refused_with_the_name_of_the_setting(setting: dict[str, object]) -> None:
    ((name, _),) = setting.items()
    with pytest.raises(BranchoutError, match=f"{name} .*found"):
        ExtendConfig(**setting)  # type: ignore[arg-type]


def test_numbers_of_numpy_can_be_saved() -> None:
    seed: Any = np.int64(4)
    for config in (ExtendConfig(seed=seed, minutes=np.float32(2)), CompactConfig(seed=seed)):
        assert json.loads(json.dumps(vars(config)))["seed"] == 4


@pytest.mark.parametrize("setting", [{"epochs": "3"}, {"epochs": 1.5}, {"seed": "a"}])
def test_pretraining_refuses_them_before_it_reads_an_image(setting: dict[str, Any]) -> None:
    with pytest.raises(BranchoutError, match=f"{next(iter(setting))} must be a whole number"):
        api.pretrain("nowhere", **setting)


def test_tuning_and_predicting_refuse_them_too(extended: api.Model, val: Samples) -> None:
    with pytest.raises(BranchoutError, match=r"goal .*found 3"):
        extended.tune(3)  # type: ignore[arg-type]
    with pytest.raises(BranchoutError, match="top must be a whole number"):
        extended.predict(val.read(0), top="3")  # type: ignore[call-overload]


@pytest.mark.parametrize("recipe", ["paper", "reference"])
def test_minutes_are_refused_where_nothing_depends_on_them(recipe: str) -> None:
    with pytest.raises(BranchoutError, match=f"'{recipe}'.*--minutes has no effect"):
        ExtendConfig(recipe=recipe, minutes=3)
