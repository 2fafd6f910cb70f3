"""Settings of the wrong kind are refused where they are given, not deep inside a run."""

import json

import numpy as np
import pytest

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
@pytest.mark.parametrize("value", ["3", 0, float("nan")])
def test_limits_are_numbers_above_0(name: str, value: object) -> None:
    with pytest.raises(BranchoutError, match=f"{name.split('_')[0]}.*above 0, found {value!r}"):
        ExtendConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [ExtendConfig(seed=np.int64(4)), CompactConfig(seed=np.int64(4))])  # type: ignore[arg-type]
def test_numbers_of_numpy_can_be_saved(config: ExtendConfig | CompactConfig) -> None:
    assert json.loads(json.dumps(vars(config)))["seed"] == 4
