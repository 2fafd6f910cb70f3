"""Rows are measured honestly, written once, and only where they are missing."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
import torch
from dask_cluster import two_workers, wait_until
from helpers import BASE, CPU, NEW, untrained
from PIL import Image
from torch import nn

from branchout.baselines.networks import Network
from branchout.baselines.task import Baseline, Task
from branchout.bench import experiment as module
from branchout.bench import measure as measuring
from branchout.bench import plan as plan_module
from branchout.bench import runner
from branchout.bench.experiment import Experiment
from branchout.bench.job import Job
from branchout.bench.measure import measure
from branchout.bench.methods import method_named
from branchout.bench.peak_memory import forget_peak_memory, peak_memory
from branchout.bench.plan import Plan
from branchout.bench.rows import on_another_base, read_row, unpacked
from branchout.bench.runner import grouped, run, run_all, run_group
from branchout.data import scenarios
from branchout.data.augment import Augmentation
from branchout.data.datasets import resolve
from branchout.data.images import SMALL
from branchout.data.samples import Samples, concatenate
from branchout.errors import BranchoutError
from branchout.files import lock
from branchout.goals import PAPER_GOALS
from branchout.method.features import extract
from branchout.method.recipes import PAPER, RECIPES
from branchout.method.running.effort import VIEWS
from branchout.metrics import accuracies
from branchout.progress import Event
from branchout.training.optimisation import Optimisation

PLAN = Plan(
    "disjoint",
    base=8,
    novel=3,
    exemplars=4,
    width=8,
    size=32,
    pretraining=Optimisation(epochs=2, lr=0.03, batch=32),
    network=Optimisation(epochs=1, lr=0.03, batch=16),
    epochs=1,
)


@pytest.fixture(scope="module")
def folder(train: Samples, val: Samples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset on disk that any process can open."""
    root = tmp_path_factory.mktemp("characters")
    for part, table in (("train", train), ("val", val)):
        for number, (name, label) in enumerate(zip(table.names, table.labels, strict=True)):
            if table.classes[label] in (*BASE, *NEW):
                place = root / part / str(name)
                place.mkdir(parents=True, exist_ok=True)
                grey = table.read(number)
                Image.fromarray(np.repeat(grey, 3, axis=2)).save(place / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def experiment(folder: Path) -> Experiment:
    return Experiment(PLAN, resolve(str(folder)), device=CPU)


def job(folder: Path, out: Path, method: str, plan: Plan = PLAN, seeds: tuple[int, ...] = (1, 2)) -> Job:
    return Job(str(folder), "characters", "mine", plan, method, seeds, out)


# Measuring.


def test_a_baselines_row_says_what_its_answers_say(experiment: Experiment, folder: Path, tmp_path: Path) -> None:
    done = run(job(folder, tmp_path, "logitcat-max", seeds=(1,)), {(str(folder), PLAN): experiment})
    assert done is not None
    row = json.loads((tmp_path / "characters/mine/resnet10/logitcat-max-plain.json").read_text())
    model, _ = experiment.branched(1, PAPER.stage_one)
    test = experiment.scenario.test(experiment.dataset)
    with torch.no_grad():
        pictures = next(experiment.images(test).plain([np.arange(len(test))]))
        answers = model(pictures).argmax(1).numpy()
    truth = accuracies(answers, experiment.labels(test, 1), experiment.space(1))
    assert row["metrics"]["all"] == pytest.approx(100 * truth.all, abs=1e-3)
    assert row["metrics"]["novel"] == pytest.approx(100 * truth.novel, abs=1e-3)
    assert (row["base_classes"], row["novel_classes"], row["steps"], row["seeds"]) == (8, 3, 1, [1])
    assert row["settings"]["exemplars"] == 4
    assert row["commit"]
    assert row["hardware"]
    assert row["seconds"]["train"] > 0
    whole = concatenate(experiment.halves(1))
    with torch.no_grad():
        answers = model(next(experiment.images(whole).plain([np.arange(len(whole))]))).argmax(1).numpy()
    truth = accuracies(answers, experiment.labels(whole, 1), experiment.space(1))
    assert len(whole) > len(test)
    for name in ("all", "base", "novel", "avg"):
        assert row["both_halves"][name] == pytest.approx(100 * getattr(truth, name), abs=1e-3)
    assert row["both_halves"]["incremental"] is None  # of one step
    dialled = json.loads((tmp_path / "characters/mine/resnet10/logitcat-max-dial-all.json").read_text())
    assert dialled["both_halves"] is None  # its dial was set on one of them


def test_over_many_steps_both_halves_have_an_incremental_accuracy(folder: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, scenario="steps", base=7, novel=2, steps=2)
    experiment = Experiment(plan, resolve(str(folder)), device=CPU)
    done = run(job(folder, tmp_path, "ncm", plan, (1, 2)), {(str(folder), plan): experiment})
    assert done is not None
    row = json.loads(done.job.files()["plain"].read_text())
    both = [[each.both for each in measure(method_named("ncm"), experiment, n).points["plain"]] for n in (1, 2)]
    known = concatenate(experiment.halves(0))
    with torch.no_grad():
        answers = experiment.base(next(experiment.images(known).plain([np.arange(len(known))]))).argmax(1).numpy()
    before = (answers == experiment.labels(known, 0)).mean()
    after = [np.mean([before, *(step.all for step in steps)]) for steps in both]
    assert row["both_halves"]["incremental"] == pytest.approx(100 * np.mean(after), abs=0.01)
    assert [[step["all"] for step in steps] for steps in row["per_step_both"]] == [
        [pytest.approx(100 * step.all, abs=0.01) for step in steps] for steps in both
    ]
    dialled = json.loads(done.job.files()["dial-avg"].read_text())
    assert len(dialled["per_step_both"][1]) == 2


# Exemplars by herding.


def slow_herding(features: np.ndarray, number: int) -> list[int]:
    """At each turn every picture is tried, and the one kept that brings the mean of all kept nearest to the mean."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    chosen: list[int] = []
    for _ in range(number):
        rest = [n for n in range(len(unit)) if n not in chosen]
        chosen.append(min(rest, key=lambda n: float(np.linalg.norm(unit.mean(0) - unit[[*chosen, n]].mean(0)))))
    return chosen


def herded(experiment: Experiment, features: Any, step: int, number: int) -> set[str]:
    """The ids that the slow version keeps of all classes of a step."""
    given = experiment.training_images(step)
    with torch.no_grad():
        rows = features(next(experiment.images(given).plain([np.arange(len(given))]))).numpy()
    kept: set[str] = set()
    for label in np.unique(given.labels):
        members = np.flatnonzero(given.labels == label)
        kept |= {str(given.ids[members[n]]) for n in slow_herding(rows[members], number)}
    return kept


def test_herded_exemplars_of_a_step_are_those_its_own_network_would_keep(folder: Path) -> None:
    plan = replace(PLAN, scenario="steps", base=5, novel=2, steps=3, memory="herding", exemplars=3)
    experiment = Experiment(plan, resolve(str(folder)), device=CPU)
    networks: list[Network] = []
    tasks: list[Task] = []

    def learn(before: Any, task: Task) -> Network:
        network = Network.of(before).widened(len(task.space.classes))
        with torch.no_grad():
            for weight in network.backbone.parameters():  # other features than the base's
                weight.add_(0.5 * weight.std(correction=0) * torch.randn_like(weight))
        networks.append(network.eval())
        tasks.append(task)
        return network

    torch.manual_seed(0)
    for _ in measuring._steps(Baseline("shaken", "", learn, on="network"), experiment, 1):
        pass

    def of_base(pictures: torch.Tensor) -> torch.Tensor:
        return experiment.base.features(pictures)[0]

    def kept(step: int, origin: int) -> set[str]:
        memory = tasks[step - 1].memory
        return set(memory.ids[memory.origin == origin].tolist())

    for step in (1, 2, 3):
        assert kept(step, 0) == herded(experiment, of_base, 0, 3)
    assert kept(2, 1) == kept(3, 1) == herded(experiment, networks[0].features, 1, 3)
    assert kept(3, 2) == herded(experiment, networks[1].features, 2, 3)
    assert kept(2, 1) != herded(experiment, of_base, 1, 3)
    fixed = experiment.memory(2, 1)  # of a method without a network of its own
    assert set(fixed.ids[fixed.origin == 1].tolist()) == herded(experiment, of_base, 1, 3)


def test_of_fewer_herded_exemplars_the_best_are_left(folder: Path) -> None:
    plan = replace(PLAN, scenario="steps", base=3, novel=3, steps=2, memory="herding", total=18)
    experiment = Experiment(plan, resolve(str(folder)), device=CPU)

    def of_base(pictures: torch.Tensor) -> torch.Tensor:
        return experiment.base.features(pictures)[0]

    for step, number in ((1, 6), (2, 3)):
        memory = experiment.memory(step, seed=step)
        assert set(memory.counts().values()) == {number}
        for origin in range(step):
            assert set(memory.ids[memory.origin == origin].tolist()) == herded(experiment, of_base, origin, number)


@pytest.mark.parametrize("name", ["icarl", "bic", "wa", "podnet", "rainbow", "der", "ncm", "featcat-rt", "branchout"])
def test_every_kind_of_method_works_with_herded_exemplars(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLAN, scenario="steps", base=7, novel=2, steps=2, memory="herding", fusion_epochs=1)
    experiment = Experiment(plan, resolve(str(folder)), device=CPU)
    ranked: list[int] = []
    whole = Experiment.ranked
    monkeypatch.setattr(Experiment, "ranked", lambda self, step, rows: ranked.append(step) or whole(self, step, rows))
    assert measure(method_named(name), experiment, 1).points
    assert sorted(ranked) == [0, 1]  # the base's by the base, and the first step's by whoever learned it
    network = method_named(name).baseline is not None and method_named(name).baseline.on == "network"  # type: ignore[union-attr]
    assert set(experiment._ranked) == ({0} if network else {0, 1})


# What counts.


def test_what_a_method_stores_beside_its_parameters_counts(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keeper(nn.Module):
        def __init__(self, network: nn.Module, own: int) -> None:
            super().__init__()
            self.network = network
            self.head = nn.Identity()
            if own:
                self.stored = lambda: own
            else:
                self.head.stored = lambda: 99  # type: ignore[assignment]

        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            return self.network(pictures)  # type: ignore[no-any-return]

    def learn(before: Any, task: Task, own: int | None) -> nn.Module:
        network = Network.of(before).widened(len(task.space.classes))
        return network if own is None else Keeper(network, own)

    counts = []
    for own in (None, 7, 0):
        baseline = Baseline("x", "", partial(learn, own=own), on="network")
        measured = measure(replace(method_named("bic"), baseline=baseline), experiment, 1)
        counts.append(measured.parameters)
    assert [count - counts[0] for count in counts] == [0, 7, 99]


def test_what_draws_nothing_is_measured_once_whatever_seeds_are_asked_for(
    experiment: Experiment, folder: Path, tmp_path: Path
) -> None:
    done = run(job(folder, tmp_path, "pretrained", seeds=(1, 2)), {(str(folder), PLAN): experiment})
    assert done is not None
    row = json.loads(done.written[0].read_text())
    assert (row["seeds"], row["asked_seeds"], len(row["per_seed"])) == ([1], [1, 2], 1)
    assert done.job.missing() == []
    for path in done.written:  # rows from when it was measured for each of them
        path.write_text(json.dumps({**json.loads(path.read_text()), "seeds": [1, 2]}))
    assert done.job.missing() == []


@pytest.mark.parametrize("name", ["confidence-routing", "logitcat-max"])
def test_what_trains_nothing_has_a_branch_for_each_seed(
    name: str, experiment: Experiment, folder: Path, tmp_path: Path
) -> None:
    done = run(job(folder, tmp_path, name, seeds=(1, 2)), {(str(folder), PLAN): experiment})
    assert done is not None
    row = json.loads(done.written[0].read_text())
    assert (row["seeds"], len(row["per_seed"]), row["stage1_per_seed"]) == ([1, 2], 2, True)


def test_our_rows_have_one_file_for_each_goal_and_keep_base_and_new_apart(
    experiment: Experiment, folder: Path, tmp_path: Path
) -> None:
    for name in ("score-fusion-branchout", "score-fusion-reference", "stage-one-dial"):
        done = run(job(folder, tmp_path, name), {(str(folder), PLAN): experiment})
        assert done is not None
        rows = [json.loads(path.read_text()) for path in done.written]
        assert [row["point"] for row in rows] == list(PAPER_GOALS)
        for row in rows:
            metrics = row["metrics"]
            test = experiment.scenario.test(experiment.dataset)
            new = np.isin(test.names, experiment.scenario.branches[1]).mean()
            assert metrics["all"] == pytest.approx((1 - new) * metrics["base"] + new * metrics["novel"], abs=0.01)
            assert metrics["avg"] == pytest.approx((metrics["base"] + metrics["novel"]) / 2, abs=0.01)
            assert set(row["two_fold"]) == set(PAPER_GOALS)
        grid = name == "score-fusion-reference"
        assert all((row["alpha"] is not None) == grid and (row["b"] is None) == grid for row in rows)
        assert {row["views"] for row in rows} == {VIEWS["cpu"] if name == "score-fusion-branchout" else None}


def test_a_dial_for_a_baseline_moves_its_new_classes_only(experiment: Experiment) -> None:
    measured = measure(method_named("logitcat-max"), experiment, 1)
    plain = measured.points["plain"][0].test
    best = measured.points["dial-avg"][0]
    assert best.test.avg is not None
    assert len(best.setting) == 1
    assert plain.base is not None
    assert plain.novel is not None
    assert best.test.base is not None
    assert best.test.novel is not None
    up = np.sign(best.setting[0])
    assert up * (best.test.novel - plain.novel) >= 0 >= up * (best.test.base - plain.base)


def test_a_baselines_curve_is_what_its_scores_give_at_each_setting(
    experiment: Experiment, folder: Path, tmp_path: Path
) -> None:
    done = run(job(folder, tmp_path, "logitcat-max", seeds=(1,)), {(str(folder), PLAN): experiment})
    assert done is not None
    rows = {point: json.loads(path.read_text()) for point, path in done.job.files().items()}
    assert rows["plain"]["curve"] is None
    curve = rows["dial-avg"]["curve"]
    model, _ = experiment.branched(1, PAPER.stage_one)
    test = experiment.scenario.test(experiment.dataset)
    with torch.no_grad():
        scores = model(next(experiment.images(test).plain([np.arange(len(test))]))).double().numpy()
    new = np.isin(experiment.space(1).classes, experiment.scenario.branches[1])
    assert len(curve) > 3
    for point in curve:
        answers = (scores + point["b"] * new).argmax(1)
        truth = accuracies(answers, experiment.labels(test, 1), experiment.space(1))
        for name in ("all", "base", "novel", "avg"):
            assert point[name] == pytest.approx(100 * getattr(truth, name), abs=1e-2)
    assert measure(method_named("pretrained"), experiment, 1).curve == []


def test_a_grids_seconds_are_those_of_one_seed(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(Experiment, "now", lambda self: float(next(clock)))
    monkeypatch.setattr(experiment, "plan", replace(PLAN, fusion_epochs=1))
    recipe = method_named("score-fusion-reference")
    assert measure(recipe, experiment, 1).seconds["fusion"] == 6
    assert measure(recipe, experiment, 1).seconds["cache"] == 6  # for which no feature is made


@pytest.mark.parametrize("name", ["score-fusion-reference", "fa-bic"])
def test_stage_one_is_trained_for_each_seed(
    name: str, experiment: Experiment, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []
    branched = Experiment.branched

    def noted(self: Experiment, step: int, settings: Any, where: str = "last", seed: int | None = None) -> Any:
        seeds.append(seed)
        return branched(self, step, settings, where, seed)

    monkeypatch.setattr(Experiment, "branched", noted)
    done = run(job(folder, tmp_path, name), {(str(folder), PLAN): experiment})
    assert done is not None
    assert seeds == [1, 2]
    heads = [branched(experiment, 1, PAPER.stage_one, seed=seed)[0].fused.heads[-1].weight for seed in seeds]
    assert not torch.equal(heads[0], heads[1])
    row = json.loads(done.written[0].read_text())
    assert row["stage1_per_seed"]
    values = [each["all"] for each in row["per_seed"]]
    assert row["std"]["all"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5, abs=0.002)  # n − 1


def test_rows_say_which_images_are_right(experiment: Experiment, folder: Path, tmp_path: Path) -> None:
    done = run(job(folder, tmp_path, "ncm"), {(str(folder), PLAN): experiment})
    assert done is not None
    row = json.loads(done.job.files()["plain"].read_text())
    right = {part: [unpacked(text) for text in seeds] for part, seeds in row["correct"].items()}
    assert set(right) == {"base", "step 1"}
    assert 100 * np.mean(right["base"]) == pytest.approx(row["both_halves"]["base"], abs=0.01)
    every = np.concatenate([*right["base"], *right["step 1"]])
    assert 100 * every.mean() == pytest.approx(row["both_halves"]["all"], abs=0.01)


def test_steps_that_were_measured_survive_an_interruption(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLAN, scenario="steps", base=7, novel=2, steps=2)
    experiment = Experiment(plan, resolve(str(folder)), device=CPU)
    asked = job(folder, tmp_path, "ncm", plan, (1,))
    with monkeypatch.context() as patch:
        task = Experiment.task

        def interrupted(self: Experiment, step: int, *rest: Any, **more: Any) -> Any:
            if step == 2:
                raise KeyboardInterrupt
            return task(self, step, *rest, **more)

        patch.setattr(Experiment, "task", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(asked, {(str(folder), plan): experiment})
    kept = json.loads(asked.partial.read_text())
    assert asked.missing() == list(asked.files())
    done = run(asked, {(str(folder), plan): experiment})
    assert done is not None
    assert not asked.partial.exists()
    row = json.loads(done.job.files()["dial-avg"].read_text())
    (step,) = kept["unfinished"]["points"]["dial-avg"]
    assert 100 * step["test"]["all"] == pytest.approx(row["per_step"][0][0]["all"], abs=1e-3)
    assert kept["finished"] == {}
    assert kept["about"]["commit"] == row["commit"]


def test_more_seeds_are_measured_for_a_row_that_has_the_first(
    experiment: Experiment, folder: Path, tmp_path: Path
) -> None:
    run(job(folder, tmp_path, "ncm", seeds=(1,)), {(str(folder), PLAN): experiment})
    more = job(folder, tmp_path, "ncm", seeds=(1, 2))
    assert more.missing() == list(more.files())
    run(more, {(str(folder), PLAN): experiment})
    assert not more.missing()
    fewer = job(folder, tmp_path, "ncm", seeds=(1,))
    assert fewer.missing() == []  # a row with more seeds stays
    path = fewer.files()["plain"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "outdated": "why"}))
    with pytest.raises(BranchoutError, match="with seeds"):  # measured again it would lose a seed
        fewer.missing()


def test_faithful_rows_start_from_a_base_of_their_own(folder: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, scenario="steps", base=7, novel=2, steps=2, memory="herding", faithful=True, total=28)
    experiment = Experiment(plan, resolve(str(folder)), device=CPU)
    done = run(job(folder, tmp_path, "icarl", plan, (1,)), {(str(folder), plan): experiment})
    assert done is not None
    assert "base" not in experiment.__dict__  # the shared one was not even trained
    row = json.loads(done.job.files()["plain"].read_text())
    assert row["base_weights"] is None
    assert row["settings"]["faithful"]
    steps = [row["base_model"], *(step["all"] for step in row["per_step"][0])]
    assert row["metrics"]["incremental"] == pytest.approx(np.mean(steps), abs=0.01)
    assert row["base_parameters"] > 1000
    task = experiment.task(1, 1, {0: experiment.training_images(0)})
    assert (task.per_class, task.after, experiment.task(0, 1).after) == (4, 3, 4)
    assert odd(done.job.folder) == []


def test_many_steps_are_measured_after_each(folder: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, scenario="steps", base=7, novel=2, steps=2)
    experiment = Experiment(plan, resolve(str(folder)), device=CPU)
    for name in ("score-fusion-branchout", "score-fusion-reference", "finetune", "ncm"):
        done = run(job(folder, tmp_path, name, plan, (1,)), {(str(folder), plan): experiment})
        assert done is not None
        row = json.loads(done.written[0].read_text())
        steps = row["per_step"][0]
        assert len(steps) == 2
        mean = np.mean([row["base_model"], *(step["all"] for step in steps)])
        assert row["metrics"]["incremental"] == pytest.approx(mean, abs=0.01)
        assert row["metrics"]["all"] == steps[-1]["all"]


def test_what_was_kept_of_a_class_stays_however_many_steps_follow(folder: Path) -> None:
    plan = replace(PLAN, scenario="steps", base=5, novel=2, steps=3, exemplars=3)
    experiment = Experiment(plan, resolve(str(folder)), device=CPU)
    kept = [set(experiment.memory(step, 1).ids.tolist()) for step in (1, 2, 3)]
    assert [len(each) for each in kept] == [15, 21, 27]
    assert kept[0] < kept[1] < kept[2]


def test_exemplars_in_total_are_shared_by_the_classes_so_far(folder: Path) -> None:
    plan = replace(PLAN, scenario="steps", base=7, novel=2, steps=2, total=18)
    experiment = Experiment(plan, resolve(str(folder)), device=CPU)
    assert set(experiment.memory(1, 0).counts().values()) == {2}  # 18 for 7 classes
    assert set(experiment.memory(2, 0).counts().values()) == {2}  # 18 for 9
    assert len(experiment.memory(2, 0).classes) == 9


def test_without_exemplars_a_method_that_needs_them_is_left_out(folder: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, exemplars=0)
    experiment = Experiment(plan, resolve(str(folder)), device=CPU)
    assert len(experiment.memory(1, seed=1)) == 0
    opened = {(str(folder), plan): experiment}
    for method in ("lwf", "logitcat-max", "score-fusion-branchout"):
        done = run(job(folder, tmp_path, method, plan, seeds=(1,)), opened)
        assert done is not None
        assert len(done.written) == len(method_named(method).points())
    done = run(job(folder, tmp_path, "bic", plan, seeds=(1,)), opened)
    assert done is not None
    assert "bic needs exemplars" in done.why_not


def test_features_are_made_once_and_count_for_everyone(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = experiment.branched(1, PAPER.stage_one)
    kept = experiment.memory(1, 3)
    asked = {"views": 2, "seed": 3}
    direct = extract(model, experiment.images(kept), **asked, device=CPU)  # type: ignore[arg-type]
    assert torch.equal(experiment.features(model, kept, **asked), direct)
    monkeypatch.setattr(module, "extract", lambda *a, **k: pytest.fail("made again"))
    before = experiment.now()
    again = experiment.features(experiment.branched(1, PAPER.stage_one)[0], kept, **asked)
    assert torch.equal(again, direct)
    took = next(took for found, took in experiment._features.values() if found is again)
    assert experiment.now() - before > took > 0
    for other, change in ((kept, {"seed": 4}), (kept, {"views": 3}), (experiment.training_images(1), {})):
        with pytest.raises(pytest.fail.Exception, match="made again"):
            experiment.features(model, other, **{**asked, **change})
    with pytest.raises(pytest.fail.Exception, match="made again"):
        experiment.features(experiment.base, kept, **asked)


def test_features_that_would_take_too_much_memory_are_made_again(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment._features.clear()
    tables = [experiment.memory(1, seed) for seed in (5, 6, 7)]
    size = experiment.features(experiment.base, tables[0]).nbytes
    monkeypatch.setattr(module, "KEPT_FEATURES", 2 * size)
    for each in tables[1:]:
        experiment.features(experiment.base, each)
    left = [key[2] for key in experiment._features]
    assert left == [each.fingerprint() for each in tables[1:]]


def test_heads_are_trained_as_long_as_stage_two(folder: Path) -> None:
    dataset = resolve(str(folder))
    for epochs, expected in ((None, 10), (3, 3)):
        task = Experiment(replace(PLAN, fusion_epochs=epochs), dataset, device=CPU).task(1, 1)
        assert task.heads == replace(PAPER.stage_two.optimisation, epochs=expected)


class Seen(module.Gallery):
    """A gallery that remembers by which augmentations its pictures were seen."""

    by: ClassVar[set[Augmentation]] = set()

    def images(self, samples: Samples) -> Any:
        found = super().images(samples)
        views = found.views

        def maps_and_features(batches: Any, augmentation: Augmentation, *rest: Any) -> Any:
            Seen.by.add(augmentation)
            return views(batches, augmentation, *rest)

        found.views = maps_and_features  # type: ignore[method-assign]
        return found


def test_all_that_is_trained_sees_the_augmentation_that_the_plan_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Gallery", Seen)
    monkeypatch.setattr(Seen, "by", set())
    dataset = resolve(str(folder))
    plan = replace(PLAN, augmentation="padded", fusion_epochs=1)
    padded = Experiment(plan, dataset, device=CPU, cache=tmp_path)
    for name in ("joint", "finetune", "logitcat-ft", "score-fusion-layer3-reference", "der"):
        Seen.by.clear()
        measure(method_named(name), padded, 1)
        assert {each.pad for each in Seen.by} == {4}, name
    assert {each.pad for each in (padded.task(1, 1).augmentation, padded.task(1, 1).head_augmentation)} == {4}
    Seen.by.clear()
    assert Experiment(PLAN, dataset, device=CPU, cache=tmp_path).base is not None  # another network than the padded one
    assert {each.pad for each in Seen.by} == {0}


def test_a_network_without_its_last_relu_is_another_one_and_stays_so_on_disk(folder: Path, tmp_path: Path) -> None:
    dataset = resolve(str(folder))
    plan = replace(PLAN, arch="resnet32")
    usual, open_ended = (
        Experiment(replace(plan, last_relu=last), dataset, device=CPU, cache=tmp_path) for last in (True, False)
    )
    assert "last_relu" not in usual.base.arch
    assert open_ended.base.arch["last_relu"] is False
    given = usual.training_images(1)
    assert usual.features(usual.base, given).min() >= 0 > open_ended.features(open_ended.base, given).min()
    again = Experiment(open_ended.plan, dataset, device=CPU, cache=tmp_path)
    assert torch.equal(again.features(again.base, given), open_ended.features(open_ended.base, given))
    assert "last_relu" not in open_ended.trained(open_ended.training_images(0), "resnet10").arch
    assert usual.branched(1, PAPER.stage_one)[0].arch.get("last_relu", True)
    learned, _ = open_ended.branched(1, PAPER.stage_one)
    assert open_ended.features(learned, given)[0, :, 1].min() < 0  # its branch ends as the trunk does


def test_networks_are_trained_from_scratch_by_kernels_that_repeat_themselves(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def trained(*_: object, device: torch.device, **__: object) -> NoReturn:
        asked.append((device, torch.are_deterministic_algorithms_enabled()))
        raise KeyboardInterrupt

    monkeypatch.setattr("branchout.bench.experiment.pretrain", trained)
    experiment = Experiment(PLAN, resolve(str(folder)), device=CPU, cache=tmp_path)
    train = experiment.training_images(0)
    for device in (CPU, torch.device("cuda")):
        experiment.device = device
        monkeypatch.setattr(experiment, "now", lambda: 0.0)  # nothing to wait for
        with pytest.raises(KeyboardInterrupt):
            experiment.trained(train)
    assert asked == [(CPU, False), (torch.device("cuda"), True)]
    assert not torch.are_deterministic_algorithms_enabled()


# Running.


def test_only_what_is_missing_is_made_again(experiment: Experiment, folder: Path, tmp_path: Path) -> None:
    opened = {(str(folder), PLAN): experiment}
    jobs = [job(folder, tmp_path, name, seeds=(1,)) for name in ("ncm", "logitcat-max")]
    for each in jobs:
        run(each, opened)
    paths = [path for each in jobs for path in each.files().values()]
    before = {path: (path.stat().st_mtime_ns, path.read_text()) for path in paths}
    gone = tmp_path / "characters/mine/resnet10/ncm-dial-avg.json"
    gone.unlink()
    finished = run_all(jobs)
    assert [path for done in finished for path in done.written] == [gone]
    again = json.loads(gone.read_text())
    assert again["metrics"] == json.loads(before[gone][1])["metrics"]
    for path, (when, text) in before.items():
        if path != gone:
            assert (path.stat().st_mtime_ns, path.read_text()) == (when, text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"exemplars": 3}, "exemplars = 4, .*has 3"),
        ({"epochs": 2}, "epochs = 1, .*has 2"),
        ({"network": Optimisation(epochs=5, lr=0.03, batch=16)}, r"network\.epochs = 1, .*has 5"),
    ],
)
def test_a_row_made_otherwise_is_not_taken_for_the_one_asked_for(
    change: dict[str, Any], said: str, experiment: Experiment, folder: Path, tmp_path: Path
) -> None:
    asked = job(folder, tmp_path, "ncm", seeds=(1,))
    run(asked, {(str(folder), PLAN): experiment})
    for other, words in (
        (replace(asked, plan=replace(PLAN, **change)), said),
        (replace(asked, seeds=(2,)), r"seeds = \[1\], .*has \[2\]"),
    ):
        with pytest.raises(BranchoutError, match=words):
            run(other, {})
    assert asked.missing() == []


@pytest.mark.parametrize("change", [{"exemplars": 3}, {"pretraining": Optimisation(epochs=3, lr=0.03, batch=32)}])
def test_rows_of_another_plan_get_no_new_ones_beside_them(
    change: dict[str, Any], experiment: Experiment, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(job(folder, tmp_path, "ncm", seeds=(1,)), {(str(folder), PLAN): experiment})
    monkeypatch.setattr(runner, "measure", lambda *a: pytest.fail("something was measured"))
    other = job(folder, tmp_path, "fecam", replace(PLAN, **change))
    elsewhere = job(folder, tmp_path / "else", "fecam", replace(PLAN, **change))
    for pool in (None, ThreadPoolExecutor(1)):
        with pytest.raises(BranchoutError, match=r"ncm-dial-all\.json was measured with .*Delete it, .*--out"):
            run_all([elsewhere, other], executor=pool)
    assert not elsewhere.folder.exists()
    assert job(folder, tmp_path, "fecam", seeds=(1, 2)).missing()  # other seeds, the same plan
    assert job(folder, tmp_path, "ncm", seeds=(1,)).missing() == []


def test_a_row_of_another_recipe_is_not_taken_for_todays(
    experiment: Experiment, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job(folder, tmp_path, "stage-one-dial", seeds=(1,))
    run(asked, {(str(folder), PLAN): experiment})
    stage_one = replace(PAPER.stage_one, optimisation=replace(PAPER.stage_one.optimisation, lr=0.5))
    with monkeypatch.context() as changed:
        changed.setitem(RECIPES, "paper", replace(PAPER, stage_one=stage_one))
        with pytest.raises(BranchoutError, match=r"recipe\.stage_one\.optimisation\.lr = 0\.1, .*has 0\.5"):
            asked.missing()
        row = json.loads(asked.files()["all"].read_text())
        for path in asked.files().values():
            path.write_text(json.dumps({**row, "outdated": "a better rate"}))
        assert asked.missing() == list(PAPER_GOALS)  # to be made again, by today's
    for name, value in (("branch", "layer3"), ("pooler", "average")):
        for path in asked.files().values():
            path.write_text(json.dumps({**row, "settings": {**row["settings"], name: value}}))
        with pytest.raises(BranchoutError, match=f"with {name} = {value}, and"):
            asked.missing()


def test_a_row_that_is_deleted_while_somebody_looks_is_just_missing(folder: Path, tmp_path: Path) -> None:
    asked = job(folder, tmp_path, "ncm", seeds=(1,))
    asked.folder.mkdir(parents=True)
    for name in ("ncm-plain", "fecam-plain"):  # listed, and gone when it is opened
        (asked.folder / f"{name}.json").symlink_to("nowhere")
    assert asked.missing() == list(asked.files())


def test_a_row_whose_figures_are_none_is_no_row(experiment: Experiment, folder: Path, tmp_path: Path) -> None:
    asked = job(folder, tmp_path, "ncm", seeds=(1,))
    run(asked, {(str(folder), PLAN): experiment})
    place = asked.files()["plain"]
    row = json.loads(place.read_text())
    assert row["peak_memory_bytes"] > 1 << 20
    place.write_text(json.dumps({**row, "metrics": {**row["metrics"], "all": "x"}}))
    with pytest.raises(BranchoutError, match=r"cannot be read as a row \(all is 'x'\); delete it and run this again"):
        asked.missing()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts peaks anew")
def test_the_peak_of_memory_is_that_of_a_job() -> None:
    forget_peak_memory()
    before = peak_memory()
    assert before is not None
    large = np.ones(25_000_000)  # 200 MB
    after = peak_memory()
    assert after is not None
    assert after > before + 150e6
    del large
    forget_peak_memory()
    again = peak_memory()
    assert again is not None
    assert again < after - 150e6


def odd(folder: Path) -> list[str]:
    return [path.stem for path in on_another_base({path: read_row(path) for path in sorted(folder.glob("*.json"))})]


def test_rows_that_rest_on_another_base_are_known(folder: Path, tmp_path: Path) -> None:
    jobs = [job(folder, tmp_path / "rows", name, seeds=(1,)) for name in ("ncm", "logitcat-max")]

    def made(each: Job, split: int, cache: str) -> None:
        experiment = Experiment(PLAN, resolve(str(folder)), device=CPU, cache=tmp_path / cache)
        if split != 1:  # stands for a training that does not repeat to the bit
            plan = replace(PLAN, split=split)
            other = Experiment(plan, resolve(str(folder)), device=CPU, cache=tmp_path / cache)
            experiment.base = other.trained(experiment.training_images(0))
        assert run(each, {(str(folder), PLAN): experiment})

    for each in jobs:
        made(each, 1, "one")
    assert odd(jobs[0].folder) == []
    lost = jobs[0].files()["plain"]
    before = json.loads(lost.read_text())
    lost.unlink()
    made(jobs[0], 1, "two")  # the cache is gone, and here the same base comes out again
    assert json.loads(lost.read_text())["base_weights"] == before["base_weights"]
    lost.unlink()
    made(jobs[0], 2, "two")
    assert json.loads(lost.read_text())["base_weights"] != before["base_weights"]
    assert odd(jobs[0].folder) == ["ncm-plain"]
    others = set(jobs[0].folder.glob("*.json")) - {lost}
    accuracy = read_row(lost)["base_model"]
    for told, found in ((accuracy, []), (accuracy + 1, ["ncm-plain"])):  # rows from before it was written down
        for path in others:
            row = {**read_row(path), "base_weights": None, "base_model": told}
            path.write_text(json.dumps(row))
        assert odd(jobs[0].folder) == found


@pytest.mark.parametrize("part", ["backbone", "base_head"])
def test_the_bases_digest_hangs_on_its_network_and_on_its_head(part: str, experiment: Experiment) -> None:
    other = Experiment(PLAN, experiment.dataset, device=CPU)
    other.base = deepcopy(experiment.base)
    assert other.base_weights == experiment.base_weights
    with torch.no_grad():
        next(getattr(other.base, part).parameters()).add_(1e-3)
    del other.base_weights
    assert other.base_weights != experiment.base_weights


def test_a_row_from_before_a_setting_existed_was_made_with_its_default(
    experiment: Experiment, folder: Path, tmp_path: Path
) -> None:
    asked = job(folder, tmp_path, "ncm", seeds=(1,))
    run(asked, {(str(folder), PLAN): experiment})
    for path in asked.files().values():
        row = json.loads(path.read_text())
        assert row["settings"].pop("augmentation") is None
        path.write_text(json.dumps(row))
    assert asked.missing() == []
    with pytest.raises(BranchoutError, match=r"augmentation = None, .*has padded"):
        replace(asked, plan=replace(PLAN, augmentation="padded")).missing()


def test_a_row_of_other_images_is_not_taken_for_this_one_and_an_outdated_one_is_made_again(
    experiment: Experiment, folder: Path, tmp_path: Path
) -> None:
    asked = replace(job(folder, tmp_path, "ncm", seeds=(1,)), images="these")
    opened = {(str(folder), PLAN): experiment}
    run(asked, opened)
    assert asked.missing() == []
    with pytest.raises(BranchoutError, match="measured with other images"):
        replace(asked, images="those").missing()
    place = asked.files()["plain"]
    measured = json.loads(place.read_text())
    place.write_text(json.dumps({**measured, "metrics": {}, "outdated": "its means were mended"}))
    assert asked.missing() == ["plain"]
    run(asked, opened)
    assert json.loads(place.read_text())["metrics"] == measured["metrics"]
    assert asked.missing() == []


def test_the_base_model_is_trained_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Experiment(PLAN, resolve(str(folder)), device=CPU).base
    import branchout.bench.experiment as module

    monkeypatch.setattr(module, "pretrain", lambda *a, **k: pytest.fail("trained again"))
    second = Experiment(PLAN, resolve(str(folder)), device=CPU).base
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_joint_learning_of_two_tables_is_one_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the same images, in whatever order the scenarios name their classes, and counts as if it had just run."""
    dataset = resolve(str(folder))
    plan = replace(PLAN, split=7)
    joint = method_named("joint")
    once = measure(joint, Experiment(plan, dataset, device=CPU), 1)
    import branchout.bench.experiment as module

    other = Experiment(replace(plan, base=7, novel=4), dataset, device=CPU)
    assert other.base is not None
    monkeypatch.setattr(module, "pretrain", lambda *a, **k: pytest.fail("trained again"))
    again = measure(joint, other, 1)
    assert once.points["plain"][0].test.all == pytest.approx(again.points["plain"][0].test.all, abs=0.05)
    assert again.seconds["train"] > 0.1 * once.seconds["train"]  # which also saved the network


def test_every_seed_trains_joint_learning_anew(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import branchout.bench.experiment as module

    experiment = Experiment(PLAN, resolve(str(folder)), device=CPU, cache=tmp_path)
    base, seeds = untrained([*BASE, *NEW]), []
    monkeypatch.setattr(module, "pretrain", lambda *given, seed, **more: seeds.append(seed) or base)
    for seed in (1, 2, 3, 2):
        task = experiment.task(1, seed)
        task.from_scratch(task.everything)  # type: ignore[misc, arg-type]
    assert seeds[0] == PLAN.split
    assert len(set(seeds)) == len(seeds) == 3  # the second time the network of seed 2 is on disk


def test_joint_learning_answers_in_the_order_of_the_label_space(experiment: Experiment) -> None:
    task = experiment.task(1, 1)
    assert task.from_scratch is not None
    assert task.everything is not None
    found = task.from_scratch(task.everything)
    model = method_named("joint").baseline.learn(experiment.base, task)  # type: ignore[union-attr]
    assert model.space.classes == task.space.classes != found.space.classes
    pictures = next(experiment.images(task.new).plain([np.arange(9)]))
    with torch.no_grad():
        ours, theirs = model(pictures), found(pictures)
    order = [found.space.classes.index(name) for name in task.space.classes]
    assert torch.equal(model.base_head.weight, found.base_head.weight[order])
    # A processor may round a product differently in another column.
    torch.testing.assert_close(ours, theirs[:, order])


@pytest.mark.parametrize("memory", ["random", "herding"])
def test_joint_learning_trains_no_base(
    memory: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import branchout.bench.experiment as module

    trained: list[int] = []
    real = module.pretrain
    monkeypatch.setattr(
        module, "pretrain", lambda *given, **more: trained.append(len(given[2])) or real(*given, **more)
    )
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path / "cache"))
    done = run(job(folder, tmp_path, "joint", replace(PLAN, memory=memory), seeds=(1,)), {})
    assert done is not None
    assert trained == [PLAN.base + PLAN.novel]  # type: ignore[operator]
    row = json.loads(done.job.files()["plain"].read_text())
    assert row["base_model"] is row["base_weights"] is None
    assert row["base_parameters"] == row["parameters"] > 0


def test_over_many_steps_joint_learning_is_measured_after_the_last(folder: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, scenario="steps", base=5, novel=3, steps=2)
    done = run(job(folder, tmp_path, "joint", plan, seeds=(1,)), {})
    assert done is not None
    row = json.loads(done.job.files()["plain"].read_text())
    assert row["metrics"]["all"] is not None
    assert row["metrics"]["incremental"] is None  # which would need joint learning after every step
    assert row["per_step"] is None


def test_a_clustered_scenario_is_kept_beside_its_rows(folder: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, scenario="overlap-random-clustered", base=8, novel=3, overlap=1)
    asked = job(folder, tmp_path, "ncm", plan, seeds=(1,))
    run(asked, {})
    kept = json.loads(asked.scenario_file.read_text())
    turned = {name: digits.translate(str.maketrans("01", "10")) for name, digits in kept["sides"].items()}
    asked.scenario_file.write_text(json.dumps({**kept, "sides": turned}))
    again = Experiment(plan, resolve(str(folder)), device=CPU, scenario_file=asked.scenario_file)
    assert again.scenario.sides == turned  # not clustered once more
    assert not job(folder, tmp_path / "other", "ncm", PLAN).scenario_file.exists()


@pytest.fixture(scope="module")
def clustered(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    plan = replace(PLAN, scenario="overlap-random-clustered", base=8, novel=3, overlap=1)
    place = tmp_path_factory.mktemp("drawn") / "table" / "scenario.json"
    assert Experiment(plan, resolve(str(folder)), device=CPU, scenario_file=place).scenario
    return plan, place


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scenario": "overlap-domain-clustered"}, ".*clustered, .*has overlap-domain-clustered"),
        ({"scenario": "overlap-full"}, ".*clustered, .*has overlap-full"),
        ({"base": 7}, "base = 8, .*has 7"),
        ({"novel": 2}, r"novel = \[3\], .*has \[2\]"),
        ({"overlap": 2}, "overlap = 1, .*has 2"),
        ({"split": 3}, "split = 1, .*has 3"),
        ({"pretraining": Optimisation(epochs=3, lr=0.03, batch=32)}, r"network\.optimisation\.epochs = 2, .*has 3"),
        ({"width": 5}, r"network\.width = 8, .*has 5"),
        ({"augmentation": "padded"}, r"network\.augmentation = None, "),
    ],
)
def test_a_clustered_scenario_that_another_plan_drew_is_not_taken(
    change: dict[str, Any], said: str, folder: Path, clustered: tuple[Plan, Path]
) -> None:
    plan, place = clustered
    experiment = Experiment(replace(plan, **change), resolve(str(folder)), device=CPU, scenario_file=place)
    with pytest.raises(BranchoutError, match=rf"scenario\.json was drawn with {said}.* Delete it .*--out"):
        assert experiment.scenario


def test_a_clustered_scenario_fits_plans_that_differ_otherwise_and_one_from_before_by_its_sizes(
    folder: Path, clustered: tuple[Plan, Path], tmp_path: Path
) -> None:
    plan, place = clustered
    dataset = resolve(str(folder))
    drawn = Experiment(plan, dataset, device=CPU, scenario_file=place).scenario
    for change in ({"arch": "resnet18"}, {"exemplars": 9}, {"base": None}, {"epochs": 7}):
        assert Experiment(replace(plan, **change), dataset, device=CPU, scenario_file=place).scenario == drawn
    few = Experiment(replace(plan, kept=5), dataset, device=CPU, scenario_file=place).scenario
    assert (len(few.branches[0]), few.branches[1]) == (5, drawn.branches[1])
    kept = json.loads(place.read_text())
    assert kept.pop("network")["arch"] == "resnet10"
    before = tmp_path / "scenario.json"
    before.write_text(json.dumps(kept))
    longer = replace(plan, pretraining=Optimisation(epochs=3, lr=0.03, batch=32))
    assert Experiment(longer, dataset, device=CPU, scenario_file=before).scenario.sides == drawn.sides
    with pytest.raises(BranchoutError, match=r"drawn with overlap = 1, .*has 2"):
        assert Experiment(replace(plan, overlap=2), dataset, device=CPU, scenario_file=before).scenario


def test_two_runners_keep_one_split(
    folder: Path, clustered: tuple[Plan, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = clustered
    whole, drawing = plan_module.draw_scenario, []

    def slow(*words: Any, **options: Any) -> Any:
        found = whole(*words, **options)
        drawing.append(found)
        time.sleep(0.3)
        turned = str.maketrans("01", "10" if len(drawing) > 1 else "01")  # no two trainings cluster alike
        return replace(found, sides={name: text.translate(turned) for name, text in found.sides.items()})

    monkeypatch.setattr(plan_module, "draw_scenario", slow)
    runners = [
        Experiment(plan, resolve(str(folder)), device=CPU, scenario_file=tmp_path / "scenario.json") for _ in "ab"
    ]
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(Experiment.scenario.func, runners)  # a cached property may let one thread in at a time
    assert one.sides == other.sides
    assert len(drawing) == 1


def test_a_scenario_that_is_not_wholly_written_leaves_no_file(
    folder: Path, clustered: tuple[Plan, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = clustered

    def torn(self: Any, path: Path) -> None:
        path.write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(scenarios.Scenario, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        assert Experiment(plan, resolve(str(folder)), device=CPU, scenario_file=tmp_path / "scenario.json").scenario
    assert not list(tmp_path.glob("*.json"))


def test_a_network_serves_every_copy_of_the_data(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that was trained on one machine can be carried to another, whose copy has other dates and inodes."""
    shutil.copytree(folder, tmp_path / folder.name, copy_function=shutil.copyfile)
    first, second = (
        Experiment(PLAN, resolve(str(place)), device=CPU, cache=tmp_path / "cache")
        for place in (folder, tmp_path / folder.name)
    )
    first.trained(first.training_images(0))
    monkeypatch.setattr(module, "pretrain", lambda *a, **k: pytest.fail("trained again"))
    second.trained(second.training_images(0))


def test_waiting_for_another_runners_network_is_no_time(folder: Path, tmp_path: Path) -> None:
    dataset = resolve(str(folder))
    told: list[Event] = []
    first = Experiment(PLAN, dataset, device=CPU, cache=tmp_path)
    second = Experiment(PLAN, dataset, device=CPU, cache=tmp_path, on_progress=told.append)
    given = first.training_images(0)
    assert len(second.training_images(0)) == len(given)
    start = first.now()
    first.trained(given)
    took = first.now() - start
    (held,) = (tmp_path / "bench").glob(".*.lock")
    with ThreadPoolExecutor(1) as pool:
        with lock(held):
            start = second.now()
            waiting = pool.submit(second.trained, given)
            time.sleep(took + 2)
        waiting.result()
    assert second.now() - start < took + 2
    assert [each.work for each in told if "Waiting" in each.work], "nobody was told why nothing happened"


def test_two_runners_share_the_work(folder: Path, experiment: Experiment, tmp_path: Path) -> None:
    plan = replace(PLAN, split=5)  # whose base nobody has trained yet: one does, the other waits
    jobs = [job(folder, tmp_path, name, seeds=(1,)) for name in ("ncm", "logitcat-max", "logitcat-average")]
    jobs = [replace(each, plan=plan) for each in jobs]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        ended = [future.result() for future in [pool.submit(run_all, jobs), pool.submit(run_all, jobs[::-1])]]
    written = [path for finished in ended for done in finished for path in done.written]
    assert len(written) == len(set(written))
    assert set(written) == {path for each in jobs for path in each.files().values()}


def test_workers_get_whole_experiments_as_long_as_there_are_enough(folder: Path, tmp_path: Path) -> None:
    plans = [replace(PLAN, split=split) for split in (1, 2, 3)]
    jobs = [job(folder, tmp_path, name, plan) for name in ("ncm", "fecam") for plan in plans]
    whole = [[(each.method, each.plan.split) for each in group] for group in grouped(jobs, 3)]
    assert whole == [[(name, split) for name in ("ncm", "fecam")] for split in (1, 2, 3)]
    assert grouped(jobs, 2) == grouped(jobs, 3)
    assert grouped(jobs, 4) == [[each] for each in jobs]


def test_a_group_opens_its_experiment_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import branchout.bench.runner as module

    opened: list[str] = []
    monkeypatch.setattr(module, "resolve", lambda data: opened.append(data) or resolve(data))
    jobs = [job(folder, tmp_path, name, seeds=(1,)) for name in ("ncm", "logitcat-max", "logitcat-average")]
    module._OPENED.clear()
    assert [done.job for done in run_group(jobs)] == jobs
    assert opened == [str(folder)]
    assert not [each for each in jobs if each.missing()]


def test_rows_that_are_there_are_no_work_for_workers(folder: Path, experiment: Experiment, tmp_path: Path) -> None:
    there, absent = (job(folder, tmp_path, name, seeds=(1,)) for name in ("ncm", "logitcat-max"))
    run(there, {(str(folder), PLAN): experiment})

    class Handed(ThreadPoolExecutor):
        handed: ClassVar[list[list[Job]]] = []

        def submit(self, function: Any, /, *words: Any, **options: Any) -> Any:
            self.handed.append(*words)
            return super().submit(function, *words, **options)

    with Handed(1) as pool:
        finished = run_all([there, absent], executor=pool, workers=1)
    assert Handed.handed == [[absent]]
    assert {done.job.method: bool(done.written) for done in finished} == {"ncm": False, "logitcat-max": True}


def test_a_process_runs_one_group_at_a_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once would share torch's random stream, and neither row would be what it is alone."""
    at_it: list[Job] = []

    def noted(asked: Job, opened: runner.Opened) -> None:
        at_it.append(asked)
        time.sleep(0.1)
        assert at_it == [asked]
        at_it.remove(asked)

    monkeypatch.setattr(runner, "run", noted)
    groups = [[job(folder, tmp_path, name)] * 2 for name in ("ncm", "fecam", "ranpac")]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run_group, groups)) == [[], [], []]


def test_rows_can_be_made_by_a_dask_cluster(folder: Path, tmp_path: Path) -> None:
    from distributed import LocalCluster

    from branchout.bench.executor import executor_of

    # Pictures of this size are decoded by as many processes as there are cores; a Dask worker may start none.
    plan = replace(PLAN, size=SMALL + 8, pretraining=replace(PLAN.pretraining, epochs=1))
    jobs = [job(folder, tmp_path, name, plan, seeds=(1,)) for name in ("ncm", "logitcat-max")]
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as cluster,
        executor_of(4, cluster.scheduler_address) as (executor, workers),
    ):
        assert workers == 1  # the cluster's, whatever is said of processes, and however many threads it has
        finished = run_all(jobs, executor=executor, workers=workers)
    assert not [each for each in jobs if each.missing()]
    assert {done.job.method for done in finished} == {"ncm", "logitcat-max"}


def holds_a_lock(process: int) -> bool:
    """Whether a process is measuring a row: its lock is one of its open files (Linux)."""
    found = []
    for each in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(str(each.readlink()))
    return any(name.endswith(".lock") and "resnet10" in name for name in found)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="which process measures a row is read from /proc")
def test_a_cluster_whose_worker_dies_in_a_row_makes_every_row_once(folder: Path, tmp_path: Path) -> None:
    from branchout.bench.executor import executor_of

    plan = replace(PLAN, pretraining=replace(PLAN.pretraining, epochs=1))
    jobs = [job(folder, tmp_path, name, plan, seeds=(1,)) for name in ("ncm", "fecam", "ranpac")]
    files = [path for each in jobs for path in each.files().values()]
    before: dict[Path, int] = {}
    assert Experiment(
        plan, resolve(str(folder))
    ).base  # stopped while it trains the base, a worker would block the other
    with two_workers(tmp_path) as (address, workers), executor_of(2, address) as (executor, number):

        def kill_in_a_row() -> None:
            while True:
                wait_until(lambda: holds_a_lock(workers[0].pid), seconds=300, pause=0.01)
                os.kill(workers[0].pid, signal.SIGSTOP)
                if holds_a_lock(workers[0].pid):  # still; a row's lock is released once to see who else waits
                    break
                os.kill(workers[0].pid, signal.SIGCONT)
            wait_until(lambda: any(path.exists() for path in files), seconds=300, pause=0.01)  # of the other worker
            before.update({path: path.stat().st_mtime_ns for path in files if path.exists()})
            workers[0].kill()
            workers[0].wait()

        with ThreadPoolExecutor(1) as watching:
            watched = watching.submit(kill_in_a_row)
            finished = run_all(jobs, executor=executor, workers=number)
            watched.result()
    assert sorted(done.job.method for done in finished) == sorted(each.method for each in jobs)
    assert all(done.written for done in finished)
    assert not [each for each in jobs if each.missing()]
    assert 0 < len(before) < len(files)
    assert before == {path: path.stat().st_mtime_ns for path in before}  # none was measured twice


def test_a_killed_runner_leaves_nothing_half_done_and_blocks_nobody(folder: Path, tmp_path: Path) -> None:
    asked = "--scenario disjoint --base-classes 8 --novel-classes 3 --method finetune --width 8 --size 32"
    words = [sys.executable, "-m", "branchout", "bench", *asked.split(), "--data", str(folder), "--out", str(tmp_path)]
    place = tmp_path / folder.name / "disjoint-8+3" / "resnet10"
    runner = subprocess.Popen([*words, "--epochs", "400"], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not (place / ".finetune.lock").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1)
    assert runner.poll() is None
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    assert (place / ".finetune.lock").exists()
    assert not list(tmp_path.rglob("*.json"))
    subprocess.run([*words, "--epochs", "1"], check=True, timeout=360, stdout=subprocess.DEVNULL)
    assert (place / "finetune-plain.json").exists()


# The figures.


def test_fewer_base_classes_leave_the_new_ones_the_same(folder: Path) -> None:
    whole, more, fewer = (
        Experiment(replace(PLAN, kept=kept), resolve(str(folder)), device=CPU) for kept in (None, 6, 3)
    )
    bases = [set(each.scenario.branches[0]) for each in (fewer, more, whole)]
    assert bases[0] < bases[1] < bases[2]
    assert bases[0] != set(sorted(bases[2])[:3])  # drawn, not the first of the alphabet
    assert fewer.scenario.branches[1] == whole.scenario.branches[1]
    assert set(fewer.halves(1)[1].classes) == {*fewer.scenario.branches[0], *fewer.scenario.branches[1]}


@pytest.mark.parametrize("where", ["fc", "layer4", "stem"])
def test_new_classes_alone_are_asked_about_nothing_else(
    where: str, experiment: Experiment, folder: Path, tmp_path: Path
) -> None:
    done = run(job(folder, tmp_path, f"alone-{where}", seeds=(1,)), {(str(folder), PLAN): experiment})
    assert done is not None
    (path,) = done.written
    row = json.loads(path.read_text())
    assert row["metrics"]["base"] is None
    assert row["metrics"]["novel"] == row["metrics"]["all"]
    cloned = row["parameters"] - sum(p.numel() for p in experiment.base.backbone.parameters())
    assert (cloned == 0) == (where == "fc")
