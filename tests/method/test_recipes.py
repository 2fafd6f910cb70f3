"""Settings as they are written: what was written before there was a choice of optimisers still means the same."""

from dataclasses import replace

import pytest

from branchout.method.config import ExtendConfig
from branchout.method.recipes import BRANCHOUT, RECIPES
from branchout.training.optimisation import Optimisation, optimisation_in, settings_dict
from branchout.training.pretrain import FAST, TRANSFORMER

WRITTEN = {"epochs": 40, "lr": 0.4, "batch": 512, "weight_decay": 0.0005, "nesterov": True, "schedule": "cosine"}


def test_descent_with_momentum_is_written_as_ever() -> None:
    assert settings_dict(FAST) == WRITTEN
    assert list(settings_dict(FAST)) == list(WRITTEN)  # in this order: names of kept networks hash it
    told = "Optimisation(epochs=40, lr=0.4, batch=512, weight_decay=0.0005, nesterov=True, schedule='cosine')"
    assert repr(FAST) == told


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_name_no_optimiser(name: str) -> None:
    written = settings_dict(RECIPES[name])
    assert "optimiser" not in str(written)
    assert "optimiser" not in repr(RECIPES[name])
    assert written["stage_one"]["optimisation"]["epochs"] == 30


def test_settings_that_older_rows_do_not_name_are_named_once_they_differ() -> None:
    stage_one = BRANCHOUT.stage_one
    assert set(settings_dict(stage_one)) == {"optimisation", "replay", "distillation", "temperature"}
    assert settings_dict(replace(stage_one, linear_rate=3.0)) == {**settings_dict(stage_one), "linear_rate": 3.0}


def test_another_optimiser_is_named() -> None:
    assert settings_dict(TRANSFORMER)["optimiser"] == "adamw"
    assert repr(TRANSFORMER).endswith(", optimiser='adamw')")
    assert eval(repr(TRANSFORMER)) == TRANSFORMER


def test_what_was_written_is_read_back() -> None:
    assert optimisation_in({"what": "pretrain", **WRITTEN, "seconds": 3}) == FAST
    assert optimisation_in({"what": "pretrain", **settings_dict(TRANSFORMER)}) == TRANSFORMER
    assert optimisation_in({"what": "opened", "base": "resnet18"}) is None
    assert optimisation_in({}) is None
    assert Optimisation(1).optimiser == "sgd"


def test_a_plan_sets_epochs_and_a_smaller_batch_where_exemplars_are_replayed() -> None:
    usual = BRANCHOUT.stage_one.optimisation
    assert ExtendConfig().full_recipe() == BRANCHOUT
    planned = ExtendConfig().full_recipe(20, 64).stage_one.optimisation
    assert planned == replace(usual, epochs=20, batch=64, lr=usual.lr * 64 / usual.batch)
    assert ExtendConfig(epochs=3).full_recipe(20, 1000).stage_one.optimisation == replace(usual, epochs=3)
    paper = ExtendConfig(recipe="paper", epochs=3).full_recipe(20, 64).stage_one.optimisation
    assert paper == replace(RECIPES["paper"].stage_one.optimisation, epochs=3)
