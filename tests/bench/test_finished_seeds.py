"""A run that was stopped continues from the seeds it had finished, if nothing they depend on has changed."""

import json
import os
import signal
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from helpers import CPU
from hypothesis import given
from hypothesis import strategies as st
from test_runner import PLAN, folder, job  # noqa: F401 – a fixture

from branchout.bench import finished_seeds, runner
from branchout.bench import rows as results
from branchout.bench.experiment import Experiment
from branchout.bench.job import Job
from branchout.bench.measure import Measured
from branchout.bench.methods import method_named
from branchout.bench.plan import Plan
from branchout.bench.runner import run
from branchout.data.datasets import resolve
from branchout.errors import DoesNotApply
from branchout.evaluate.two_fold import Scored
from branchout.files import write_json
from branchout.method.recipes import RECIPES
from branchout.metrics import Accuracies

STEPS = replace(PLAN, scenario="steps", base=7, novel=2, steps=2, fusion_epochs=1)
FAITHFUL = replace(STEPS, memory="herding", faithful=True, total=28)


class Stop(BaseException):
    pass


def stop(_: object) -> NoReturn:
    raise Stop


class Recorder:
    """Stands for `measure`: notes what is measured, and may stop after the first step of one seed."""

    def __init__(self, patch: pytest.MonkeyPatch, stop: int | None = None) -> None:
        self.found: dict[int, Measured] = {}
        self.began: list[int] = []
        self.stop, self.original = stop, runner.measure
        patch.setattr(runner, "measure", self)

    def __call__(self, method: Any, experiment: Any, seed: int, on_step: Any) -> Measured:
        def stopping(measured: Measured) -> None:
            on_step(measured)
            if seed == self.stop:
                raise Stop

        self.began.append(seed)
        self.found[seed] = self.original(method, experiment, seed, stopping)
        return self.found[seed]


def measured_in(
    asked: Job, patch: pytest.MonkeyPatch, stop: int | None = None, experiment: Experiment | None = None
) -> Recorder:
    """Run a job with an experiment just opened, as another process would."""
    experiment = experiment or Experiment(asked.plan, resolve(asked.data), device=CPU)
    with patch.context() as within:
        recorder = Recorder(within, stop)
        if stop is None:
            assert run(asked, {(asked.data, asked.plan): experiment})
        else:
            with pytest.raises(Stop):
                run(asked, {(asked.data, asked.plan): experiment})
    return recorder


@pytest.fixture(autouse=True)
def _commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no file of the package had changed."""
    monkeypatch.setenv("BRANCHOUT_COMMIT", "one")


def rows_of(asked: Job) -> dict[str, dict[str, Any]]:
    """The rows, without what no two runs have in common."""
    found = {path.name: json.loads(path.read_text()) for path in asked.files().values()}
    for row in found.values():
        for name in ("seconds", "peak_memory_bytes", "command"):
            del row[name]
    return found


# Continuing.


@pytest.mark.parametrize(
    ("method", "plan"),
    [
        ("ncm", PLAN),
        ("finetune", STEPS),
        ("score-fusion-branchout", STEPS),
        ("score-fusion-reference", STEPS),
        ("icarl", FAITHFUL),
    ],
)
def test_a_run_stopped_in_its_second_seed_ends_in_the_same_rows(
    method: str,
    plan: Plan,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole, asked = (job(folder, tmp_path / name, method, plan) for name in ("whole", "stopped"))
    assert measured_in(whole, monkeypatch).began == [1, 2]
    before = measured_in(asked, monkeypatch, stop=2)
    assert before.began == [1, 2]
    assert not any(path.exists() for path in asked.files().values())
    with caplog.at_level("INFO", "branchout.bench"):
        after = measured_in(asked, monkeypatch)
    assert after.began == [2]
    assert caplog.messages == [f"{method} resumes after 1 of 2 seeds."]
    assert rows_of(asked) == rows_of(whole)
    assert not asked.partial.exists()
    row = results.read_row(next(iter(asked.files().values())))
    taken = [each.seconds for each in (before.found[1], after.found[2])]
    assert row["seconds"] == {part: np.median([each[part] for each in taken]) for part in taken[0]}


def test_a_method_that_does_not_apply_leaves_no_file(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = job(folder, tmp_path, "ncm")

    def refuses(method: Any, experiment: Any, seed: int, on_step: Any) -> None:
        on_step(Measured({}))
        assert asked.partial.exists()
        raise DoesNotApply("two steps")

    monkeypatch.setattr(runner, "measure", refuses)
    done = run(asked, {})
    assert done is not None
    assert done.why_not == "two steps"
    assert not asked.partial.exists()


def test_rows_that_could_not_be_written_are_made_of_what_was_measured(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = job(folder, tmp_path, "ncm")
    with monkeypatch.context() as patch:
        patch.setattr(runner, "peak_memory", lambda: 10**15)
        patch.setattr(runner, "others_beside", lambda: True)
        patch.setattr(results, "write_together", stop)
        with pytest.raises(Stop):
            run(asked, {})
    assert measured_in(asked, monkeypatch).began == []
    row = results.read_row(asked.files()["plain"])
    assert (row["peak_memory_bytes"], row["gpu_shared"], row["seeds"]) == (10**15, True, [1, 2])


def test_what_uses_no_seeds_is_not_measured_again_either(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = job(folder, tmp_path, "pretrained")
    with monkeypatch.context() as patch:
        patch.setattr(results, "write_together", stop)
        with pytest.raises(Stop):
            run(asked, {})
    assert measured_in(asked, monkeypatch).began == []
    assert results.read_row(asked.files()["plain"])["seeds"] == [1]


def test_a_killed_command_continues(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    asked = "--scenario disjoint --base-classes 8 --novel-classes 3 --method finetune --width 8 --size 32 --epochs 10"
    words = [sys.executable, "-m", "branchout", "bench", *asked.split(), "--seeds", "1,2,3", "--all-seeds"]
    words += ["--data", str(folder), "--out", str(tmp_path)]
    place = tmp_path / folder.name / "disjoint-8+3" / "resnet10"
    started = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 300

    def finished() -> dict[str, Any]:
        path = place / "finetune.partial"
        return json.loads(path.read_text())["finished"] if path.exists() else {}  # type: ignore[no-any-return]

    while not finished() and time.monotonic() < until:
        assert started.poll() is None
        time.sleep(0.01)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    kept = finished()
    assert 0 < len(kept) < 3
    assert not list(place.glob("*.json"))
    told = subprocess.run(words, check=True, timeout=360, capture_output=True, text=True).stdout
    assert f"finetune resumes after {len(kept)} of 3 seeds." in told
    row = results.read_row(place / "finetune-plain.json")
    first = kept["1"]["points"]["plain"][0]["test"]["all"]
    assert row["per_seed"][0]["all"] == results.percent(first)
    assert (row["seeds"], len(row["per_seed"])) == ([1, 2, 3], 3)
    assert not (place / "finetune.partial").exists()


# Agreeing.


@pytest.fixture(scope="module")
def experiment(folder: Path) -> Experiment:  # noqa: F811
    return Experiment(PLAN, resolve(str(folder)), device=CPU)


@pytest.fixture(scope="module")
def kept(folder: Path, experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> bytes:  # noqa: F811
    """The file of a run that was stopped in its second seed."""
    asked = job(folder, tmp_path_factory.mktemp("kept"), "ncm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRANCHOUT_COMMIT", "one")
        measured_in(asked, patch, stop=2, experiment=experiment)
    return asked.partial.read_bytes()


def measured_after(kept: bytes, asked: Job, experiment: Experiment, patch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that are measured where that file is."""
    asked.folder.mkdir(parents=True)
    asked.partial.write_bytes(kept)
    return measured_in(asked, patch, experiment=experiment).began


def test_more_seeds_than_before_may_be_asked_for_and_others(
    kept: bytes,
    experiment: Experiment,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases: list[tuple[tuple[int, ...], list[int]]] = [((1,), []), ((3, 1, 2), [3, 2]), ((3, 4), [3, 4])]
    for number, (seeds, measured) in enumerate(cases):
        whole, asked = (job(folder, tmp_path / f"{name} {number}", "ncm", seeds=seeds) for name in ("whole", "kept"))
        assert measured_after(kept, asked, experiment, monkeypatch) == measured
        assert measured_in(whole, monkeypatch, experiment=experiment).began == list(seeds)
        assert rows_of(asked) == rows_of(whole)


@pytest.mark.parametrize("changed", ["commit", "version", "hardware", "torch"])
def test_seeds_that_other_code_measured_are_measured_again(
    changed: str,
    kept: bytes,
    experiment: Experiment,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if changed == "commit":
        monkeypatch.setenv("BRANCHOUT_COMMIT", "two")
    elif changed == "version":
        monkeypatch.setattr(results, "__version__", "0")
    elif changed == "hardware":
        monkeypatch.setattr(results, "hardware", lambda: "an abacus")
    else:
        monkeypatch.setattr(results, "version", lambda name: "0" if name == "torch" else version(name))
    assert measured_after(kept, job(folder, tmp_path, "ncm"), experiment, monkeypatch) == [1, 2]


@pytest.mark.parametrize(("commit", "measured"), [("unknown", [2]), ("one-dirty", [1, 2])])
def test_an_installed_package_continues_and_one_with_changes_does_not(
    commit: str,
    measured: list[int],
    experiment: Experiment,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BRANCHOUT_COMMIT", commit)
    asked = job(folder, tmp_path, "ncm")
    measured_in(asked, monkeypatch, stop=2, experiment=experiment)
    assert measured_in(asked, monkeypatch, experiment=experiment).began == measured


def test_seeds_of_another_base_plan_scenario_or_images_are_measured_again(
    kept: bytes,
    experiment: Experiment,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def again(name: str, experiment: Experiment = experiment, **change: Any) -> list[int]:
        asked = replace(job(folder, tmp_path / name, "ncm"), **change)
        return measured_after(kept, asked, experiment, monkeypatch)

    assert again("same") == [2]
    assert again("images", images="others") == [1, 2]
    fewer = replace(PLAN, exemplars=3)
    assert again("plan", Experiment(fewer, experiment.dataset, device=CPU), plan=fewer) == [1, 2]
    other = Experiment(PLAN, experiment.dataset, device=CPU)
    other.base = deepcopy(experiment.base)
    assert again("same base", other) == [2]
    with torch.no_grad():
        next(other.base.parameters()).add_(1e-3)
    del other.base_weights
    assert again("base", other) == [1, 2]
    drawn = Experiment(PLAN, experiment.dataset, device=CPU)
    drawn.base = experiment.base
    drawn.train = replace(drawn.train, origin=1 - drawn.train.origin)  # as a scenario that was drawn again
    about = runner._depends_on(job(folder, tmp_path, "ncm"), method_named("ncm"), drawn, results.provenance())
    place = tmp_path / "file"
    place.write_bytes(kept)
    assert finished_seeds.read(place, about) == {}


def test_seeds_of_another_method_or_recipe_are_measured_again(
    experiment: Experiment,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def about(name: str) -> dict[str, Any]:
        return runner._depends_on(job(folder, tmp_path, name), method_named(name), experiment, results.provenance())

    name, place = "score-fusion-branchout", tmp_path / "file"
    finished_seeds.write(place, about("ncm"), {1: Measured({})})
    assert list(finished_seeds.read(place, about("ncm"))) == [1]
    assert finished_seeds.read(place, about("fecam")) == {}
    finished_seeds.write(place, about(name), {1: Measured({})})
    assert list(finished_seeds.read(place, about(name))) == [1]
    recipe = RECIPES["branchout"]
    stage_one = replace(recipe.stage_one, optimisation=replace(recipe.stage_one.optimisation, lr=0.5))
    monkeypatch.setitem(RECIPES, "branchout", replace(recipe, stage_one=stage_one))
    assert finished_seeds.read(place, about(name)) == {}


# The file.

ABOUT = {"commit": "one", "settings": {"novel": (3, 4), "lr": 0.1}, "base_weights": None}
shares = st.floats(0, 1)
maybe = st.none() | shares
accuracies = st.builds(Accuracies, shares, maybe, maybe, st.lists(maybe, max_size=3).map(tuple), maybe, shares)
numbers = st.floats(allow_nan=False, allow_infinity=False)
pairs = st.lists(numbers, max_size=2).map(tuple)
images = st.lists(st.booleans(), min_size=1, max_size=20).map(lambda right: np.array(right, dtype=np.bool_))
scored = st.builds(Scored, st.text(), pairs, accuracies, shares, shares, pairs, accuracies, images)
named = st.dictionaries(st.text(), numbers, max_size=3)
measured = st.builds(
    Measured,
    st.dictionaries(st.text(), st.lists(scored, max_size=3), max_size=3),
    named,
    st.integers(),
    named,
    st.lists(named, max_size=2),
    st.none() | scored,
    st.integers(),
    st.none() | st.integers(),
    st.booleans(),
)


def every_scored(given: Measured) -> list[Scored]:
    return [each for steps in given.points.values() for each in steps] + ([given.first] if given.first else [])


@given(st.dictionaries(st.integers(), measured, max_size=3), st.none() | measured)
def test_what_was_written_is_read_exactly(
    tmp_path_factory: pytest.TempPathFactory, finished: dict[int, Measured], unfinished: Measured | None
) -> None:
    place = tmp_path_factory.getbasetemp() / "round.partial"
    finished_seeds.write(place, ABOUT, finished, unfinished)
    found = finished_seeds.read(place, ABOUT)
    assert found == finished
    assert repr(found) == repr(finished)  # -0.0 is not 0.0, nor 1 the number 1.0, nor a list a tuple
    for seed, each in finished.items():
        for one, other in zip(every_scored(each), every_scored(found[seed]), strict=True):
            assert other.right.dtype == np.bool_
            assert np.array_equal(one.right, other.right)


@given(st.data())
def test_a_damaged_file_is_no_file(kept: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    place = tmp_path_factory.getbasetemp() / "damaged.partial"
    place.write_bytes(kept)
    about = json.loads(kept)["about"]
    whole = finished_seeds.read(place, about)
    assert list(whole) == [1]
    at = data.draw(st.integers(0, len(kept.rstrip()) - 1))
    place.write_bytes(kept[:at])
    assert finished_seeds.read(place, about) == {}
    if not kept[at : at + 1].isspace():
        place.write_bytes(
            kept[:at] + bytes([kept[at] ^ data.draw(st.sampled_from([1, 2, 4, 8, 128]))]) + kept[at + 1 :]
        )
        found = finished_seeds.read(place, about)
        assert not found or repr(found) == repr(whole)  # the last digit of a number may change nothing


def test_another_figure_is_noticed(kept: bytes, tmp_path: Path) -> None:
    place, content = tmp_path / "changed.partial", json.loads(kept)
    for change in ({"parameters": 1}, {"seconds": {"train": 0.0}}, {"curve": []}, {"points": {}}):
        saved = {**content["finished"]["1"], **change}
        write_json(place, {**content, "finished": {"1": saved}})
        assert finished_seeds.read(place, content["about"]) == {}
    write_json(place, content)
    assert list(finished_seeds.read(place, content["about"])) == [1]


nonsense = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("finished"), inner, max_size=3),
)


@given(nonsense)
def test_nonsense_is_no_finished_seed(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    place = tmp_path_factory.getbasetemp() / "nonsense.partial"
    write_json(place, content)
    assert finished_seeds.read(place, ABOUT) == {}
    about = json.loads(json.dumps(ABOUT))
    for finished in (content, {"1": content}, {"1": {"points": {"plain": [content]}, "first": None}}):
        saved = {"about": about, "finished": finished}
        write_json(place, {**saved, "checksum": finished_seeds._checksum(saved)})
        assert finished_seeds.read(place, ABOUT) == {}


def test_the_file_of_an_earlier_version_and_none_at_all_have_no_finished_seeds(tmp_path: Path) -> None:
    place = tmp_path / "ncm.partial"
    assert finished_seeds.read(place, ABOUT) == {}
    write_json(place, {"method": "ncm", "table": "mine", "seeds": [1], "settings": {}, "points": {}, "commit": "one"})
    assert finished_seeds.read(place, ABOUT) == {}
    place.unlink()
    place.mkdir()
    assert finished_seeds.read(place, ABOUT) == {}
