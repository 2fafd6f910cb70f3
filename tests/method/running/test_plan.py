"""Which branch, views and epochs fit the time that an extension is given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import BASE, LATER, NEW, SIZES, exemplars
from safetensors.torch import load_file
from torch import nn

from branchout import api
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.method.config import ExtendConfig
from branchout.method.extend import Extension
from branchout.method.running import measure_speed
from branchout.method.running import plan as planning
from branchout.method.running.effort import BRANCHES, FULL, HEADS, LARGE_INPUTS, SMALL_INPUTS, Effort, Plan
from branchout.method.running.forecast import added_bytes
from branchout.method.running.plan import choose_plan, keep_plan, kept_plan, make_plan, options
from branchout.method.running.speeds import HEAD_EVALUATIONS, Counts, Speeds, frozen_passes, seconds_for
from branchout.method.split import DataSplit
from branchout.model.classifier import Classifier
from branchout.training.optimisation import Optimisation

CPU = torch.device("cpu")
FLOWERS = Counts(1224, 1600, 706, 400, 102, 1000, fused=False, linear=True)
QUIET = Speeds(0.008, 0.006, {"fc": 1e-6, "last": 0.005, "layer3": 0.02}, 0.0, cores=2)


@pytest.fixture(scope="module")
def linear(base: api.Model) -> Classifier:
    """A model whose head is linear, as those of ImageNet networks are."""
    model = base.saved.classifier
    torch.manual_seed(0)
    return Classifier(model.arch, model.backbone, nn.Linear(model.backbone.features, len(BASE)), BASE, SIZES, "glyph")


# The arithmetic of a forecast.


def test_every_image_that_is_computed_with_is_counted() -> None:
    cosine = replace(FLOWERS, linear=False)
    assert frozen_passes(Effort(4, exemplar_views=1), cosine) == 4 * 1224 + 1600 + 1224 + 706 + 400
    assert frozen_passes(Effort(4), cosine) == 4 * 1224 + 3 * 1600 + 1224 + 706 + 400  # pools of the same size
    assert frozen_passes(Effort(2), replace(cosine, memory=0)) == 2 * 1224 + 1224 + 706 + 400
    class_means = 1224 + 2 * (706 - 400)
    assert frozen_passes(Effort(4), FLOWERS) == frozen_passes(Effort(4), cosine) + class_means


def test_seconds_add_up() -> None:
    passes = frozen_passes(LARGE_INPUTS, FLOWERS)
    each = 0.006 + 0.008 / 2  # decoding takes cores from the network
    trained = 15 * (1224 + 10 * 61) * 0.005  # ten steps of 122 new images and half as many exemplars
    assert seconds_for(LARGE_INPUTS, "last", FLOWERS, QUIET) == pytest.approx(passes * each + trained)
    on_gpu = replace(QUIET, gpu=True)
    assert seconds_for(LARGE_INPUTS, "last", FLOWERS, on_gpu) == pytest.approx(passes * 0.006 + trained)
    alone = replace(FLOWERS, memory=0)
    expected = frozen_passes(LARGE_INPUTS, alone) * each + 15 * 1224 * 0.005
    assert seconds_for(LARGE_INPUTS, "last", alone, QUIET) == pytest.approx(expected)
    rows = 8 * 1224 + 4 * 1600
    head = frozen_passes(HEADS[-1], FLOWERS) * each + HEAD_EVALUATIONS * rows * 1e-6
    assert seconds_for(HEADS[-1], "fc", FLOWERS, QUIET) == pytest.approx(head)
    assert seconds_for(LARGE_INPUTS, "last", replace(FLOWERS, fused=True), replace(QUIET, fusing=1.0)) > 400


def test_few_new_images_train_with_a_third_of_the_exemplars_in_every_epoch() -> None:
    few = replace(FLOWERS, new=120)
    on_cpu = replace(LARGE_INPUTS, batch=64)
    frozen = frozen_passes(on_cpu, few) * (0.006 + 0.008 / 2)
    trained = 15 * (120 + 7 * 64) * 0.005  # seven steps of 16, and a batch has no more exemplars than 64
    assert seconds_for(on_cpu, "last", few, QUIET) == pytest.approx(frozen + trained)
    cosine = replace(few, linear=False)
    frozen, trained = frozen_passes(on_cpu, cosine) * (0.006 + 0.008 / 2), 15 * (120 + 7 * 8) * 0.005
    assert seconds_for(on_cpu, "last", cosine, QUIET) == pytest.approx(frozen + trained)


# The choice.


def timed(base: Classifier, config: ExtendConfig, slower: float = 1.0) -> list[Plan]:
    speeds = replace(QUIET, reading=slower * 0.008, frozen=slower * 0.006,
                     training={name: slower * value for name, value in QUIET.training.items()})  # fmt: skip
    return [replace(p, seconds=seconds_for(p.effort, p.branch, FLOWERS, speeds)) for p in options(base, config, CPU)]


@pytest.mark.parametrize("minutes", [0.5, 2, 5, 10, 25, 600])
def test_more_minutes_never_train_less(linear: Classifier, minutes: float) -> None:
    config = ExtendConfig(minutes=minutes)
    choices = timed(linear, config)
    chosen = choose_plan(choices, config)
    fitting = [plan for plan in choices if (plan.seconds or 0) <= 60 * minutes]
    assert replace(chosen, more="", too_short="") == (
        fitting[-1] if fitting else min(choices, key=lambda plan: plan.seconds or 0)
    )
    longer = choose_plan(choices, replace(config, minutes=2 * minutes))
    ranks = [choices.index(replace(plan, more="", too_short="")) for plan in (chosen, longer)]
    assert ranks == sorted(ranks)


def test_what_more_time_would_train_is_what_it_trains(linear: Classifier) -> None:
    config = ExtendConfig(minutes=4)
    chosen = choose_plan(timed(linear, config), config)
    advised = float(chosen.more.split("--minutes ")[1].split(":")[0])
    assert advised > 4
    better = choose_plan(timed(linear, config), replace(config, minutes=advised))
    assert better.described() in chosen.more
    most = choose_plan(timed(linear, config), replace(config, minutes=1e6))
    assert (most.branch, most.effort, most.more) == ("layer3", BRANCHES[-1], "")


def test_without_minutes_a_cpu_gets_seven_and_clones_the_last_stage_at_most(linear: Classifier) -> None:
    config = ExtendConfig()
    for slower in (0.01, 1, 3, 10):
        chosen = choose_plan(timed(linear, config, slower), config)
        assert chosen.branch in ("fc", "last")
        assert (chosen.seconds or 0) <= 420 or slower == 10
        advised = float(chosen.more.split("--minutes ")[1].split(":")[0])
        assert 60 * advised >= (chosen.seconds or 0)
    assert choose_plan(timed(linear, config, 0.01), config).effort == BRANCHES[-1]


def test_a_limit_that_no_plan_keeps_is_said_with_the_smallest_that_is_enough(linear: Classifier) -> None:
    config = ExtendConfig(minutes=0.5)
    choices = timed(linear, config)
    chosen = choose_plan(choices, config)
    assert chosen.too_short in list(chosen.lines())
    least = float(chosen.too_short.split("--minutes ")[2])
    assert not choose_plan(choices, replace(config, minutes=least)).too_short
    assert choose_plan(choices, replace(config, minutes=least - 1)).too_short
    assert "7 minutes" in choose_plan(timed(linear, ExtendConfig(), slower=10), ExtendConfig()).too_short


def test_where_nothing_limits_the_time_no_limit_is_named(
    base: api.Model, train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = base.saved.model()
    split = DataSplit.of(model.space, train.of_classes(NEW), exemplars(train), None, 0)
    slow = replace(QUIET, training={"last": 100.0}, table_bytes={"last": 1})
    monkeypatch.setattr(planning, "measure_speeds", lambda *_, **__: slow)
    plan = make_plan(model, split, ExtendConfig(), CPU, timed=True)
    assert plan.seconds is not None
    assert plan.seconds > 60 * planning.DEFAULT_MINUTES
    assert (plan.too_short, plan.more) == ("", "")


def test_what_the_user_sets_is_in_every_option(linear: Classifier) -> None:
    for minutes in (None, 100.0):
        assert {plan.branch for plan in options(linear, ExtendConfig(branch="last", minutes=minutes), CPU)} == {"last"}
    assert {plan.branch for plan in options(linear, ExtendConfig(branch="layer2"), CPU)} == {"layer2"}
    chosen = options(linear, ExtendConfig(epochs=3, views=5), CPU)
    assert {(plan.effort.views, plan.effort.epochs) for plan in chosen} == {(5, 3)}
    assert {plan.branch for plan in chosen} == {"last", "layer3"}  # a head alone has no epochs
    assert options(linear, ExtendConfig(branch="fc"), CPU) == [Plan("fc", effort) for effort in HEADS]


def test_a_gpu_gets_whole_maps_and_the_batches_of_the_recipe(linear: Classifier) -> None:
    plans = options(linear, ExtendConfig(minutes=5), torch.device("cuda"))
    efforts = [plan.effort for plan in plans if plan.branch == "last"]
    assert efforts[-1] == FULL
    assert len(efforts) > 3
    assert {(effort.compressed, effort.batch) for effort in efforts} == {(False, None)}


@pytest.mark.parametrize("minutes", [0, -5, float("nan"), float("inf")])
def test_minutes_must_be_a_number_above_0(minutes: float) -> None:
    with pytest.raises(BranchoutError, match=f"minutes.*{minutes:g}"):
        ExtendConfig(minutes=minutes)


def test_what_takes_too_much_memory_on_a_cpu_is_no_option(
    linear: Classifier, train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = DataSplit.of(linear.space, train.of_classes(NEW), exemplars(train), None, 0)
    rows = planning.table_rows(BRANCHES[0], Counts.of(linear, split, ExtendConfig()))
    for room, expected in ((rows, BRANCHES[1]), (100 * rows, BRANCHES[-1])):
        found = replace(QUIET, table_bytes={"fc": 0, "last": planning.MOST_CACHED // room, "layer3": 10**12})
        with monkeypatch.context() as patch:
            patch.setattr(planning, "measure_speeds", lambda *_, found=found, **__: found)
            plan = make_plan(linear, split, ExtendConfig(minutes=1000), CPU)
        assert (plan.branch, plan.effort, plan.more) == ("last", expected, "")
    found = replace(QUIET, table_bytes={"fc": 0, "last": 10**12, "layer3": 10**12})
    monkeypatch.setattr(planning, "measure_speeds", lambda *_, **__: found)
    plan = make_plan(linear, split, ExtendConfig(minutes=1000), CPU)
    assert (plan.branch, plan.effort) == ("fc", HEADS[-1])
    assert "180 MB" in plan.more
    assert "--branch last" in plan.more


@pytest.mark.parametrize(("config", "fused"), [({}, False), ({"fuse": True}, True), ({"recipe": "paper"}, True)])
def test_a_forecast_counts_stage_two_where_it_is_trained(
    config: dict[str, object], fused: bool, linear: Classifier, train: Samples
) -> None:
    split = DataSplit.of(linear.space, train.of_classes(NEW), exemplars(train), None, 0)
    asked = ExtendConfig(**config)  # type: ignore[arg-type]
    assert Counts.of(linear, split, asked).fused == fused
    assert Extension(linear, split, asked, device=CPU).needs_deltas() == fused
    without = added_bytes(linear, split, ExtendConfig(), "last")
    assert (added_bytes(linear, split, asked, "last") > without) == fused


def test_the_size_of_a_second_step_is_forecast(extended: api.Model, extended_twice: api.Model, train: Samples) -> None:
    model = extended.saved.classifier
    new = train.of_classes([*LATER, BASE[0], NEW[0]])
    split = DataSplit.of(model.space, new, exemplars(train, model.space.classes), None, 0)
    assert extended_twice.folder is not None
    saved = [load_file(extended_twice.folder / f"{part}-2.safetensors") for part in ("step", "fusion")]
    added = sum(tensor.nbytes for tensors in saved for tensor in tensors.values())
    assert "correction/weight" in saved[0]
    assert added_bytes(model, split, ExtendConfig(), "last") == added


# In an extension.


def test_small_inputs_are_trained_as_ever_and_nothing_is_measured(
    base: api.Model, train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "measure_speeds", lambda *_, **__: pytest.fail("something was measured"))
    model = base.saved.classifier
    split = DataSplit.of(model.space, train.of_classes(NEW), exemplars(train), None, 0)
    plan = make_plan(model, split, ExtendConfig(), CPU)
    assert plan == Plan("last", SMALL_INPUTS, "torch")
    assert list(plan.lines()) == []


def test_a_plan_is_measured_announced_kept_and_used(
    base: api.Model, train: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    config = ExtendConfig(minutes=5, epochs=1)
    prepared = base.prepare(train.of_classes(NEW), memory=exemplars(train), config=config)

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(api.model, "Extension", stopped)
        with pytest.raises(KeyboardInterrupt):
            base.extend_prepared(prepared, out=tmp_path / "v2", announce=said.append)
    assert said[0].startswith("plan: train ")
    kept = kept_plan(tmp_path / ".v2.work")
    assert kept is not None
    with monkeypatch.context() as patch:
        patch.setattr(planning, "measure_speeds", lambda *_, **__: pytest.fail("it was measured again"))
        model = base.extend_prepared(prepared, out=tmp_path / "v2", announce=said.append)
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    event = json.loads((tmp_path / "v2" / "branchout.json").read_text())["history"][-1]
    assert (event["branch"], event["engine"]) == (kept.branch, kept.engine)
    assert event["effort"]["views"] == kept.effort.views
    assert len(event["losses"]) == 1
    assert model.classifier.steps[0].where == kept.branch


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"branch": "last", "effort": {"views": 4, "ears": 2}}'])
def test_a_plan_that_cannot_be_read_is_made_again_and_said(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_plan(tmp_path, Plan("last", LARGE_INPUTS, "torch", 5.0, "more"))
    assert kept_plan(tmp_path) == Plan("last", LARGE_INPUTS, "torch", 5.0, "more")
    (tmp_path / "plan.json").write_text(content)
    assert kept_plan(None) is None
    assert not caplog.text
    assert kept_plan(tmp_path) is None
    assert str(tmp_path / "plan.json") in caplog.text


def test_training_is_measured_in_batches_as_large_as_those_of_stage_one(
    linear: Classifier, train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = DataSplit.of(linear.space, train.of_classes(NEW), exemplars(train), None, 0)
    steps: list[object] = []

    def timed(work: object, _: torch.device) -> float:
        steps.append(work)
        return 0.5 if len(steps) == 5 else 0.01

    monkeypatch.setattr(measure_speed, "_timed", timed)
    monkeypatch.setattr(measure_speed, "scale_to_dataset", lambda *_: Optimisation(1, batch=30))
    assert measure_speed._training(linear, split, "last", CPU) == 0.01 / 32  # 16, 32; 64 is more than 30 + 30
    monkeypatch.setattr(measure_speed, "scale_to_dataset", lambda *_: Optimisation(1, batch=3000))
    assert measure_speed._training(linear, split, "last", CPU) == 0.5 / 64  # 16, 32 and 64: too long to go on


def test_measuring_training_on_a_cpu_takes_little_memory(
    linear: Classifier, train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = DataSplit.of(linear.space, train.of_classes(NEW), exemplars(train), None, 0)
    monkeypatch.setattr(measure_speed, "_timed", lambda *_: 0.01)
    monkeypatch.setattr(measure_speed, "scale_to_dataset", lambda *_: Optimisation(1, batch=3000))
    monkeypatch.setattr(measure_speed, "kept_bytes", lambda *_: 16 * 1000)
    monkeypatch.setattr(measure_speed, "MOST_KEPT", 32 * 1000)
    assert measure_speed._training(linear, split, "last", CPU) == 0.01 / 32  # 64 images would keep 64,000 bytes


def test_what_a_step_keeps_is_counted_once() -> None:
    x = torch.ones(10, 3, requires_grad=True)

    def step() -> None:
        (x * x).exp().sum().backward()

    assert measure_speed.kept_bytes(step) == 2 * 10 * 3 * 4  # x and the result of exp


def test_weights_are_not_counted_as_kept_for_each_image() -> None:
    layer, x = nn.Linear(3, 1000, bias=False), torch.ones(10, 3, requires_grad=True)
    assert measure_speed.kept_bytes(lambda: layer(x).sum().backward(), [layer]) == 10 * 3 * 4


def test_a_plan_says_what_is_cloned(base: api.Model) -> None:
    def described(branch: str) -> str:
        return Plan.of(base.classifier, branch, SMALL_INPUTS).described()

    assert described("last").startswith("the last stage")
    assert described("fc").startswith("a new head")
    assert described("layer3").startswith("the network from layer3 on")
    assert described("layer4.0.conv2").startswith("the module layer4.0.conv2")
