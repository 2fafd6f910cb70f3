"""Compaction: fewer branches, the same classes and goals, runs that survive a stop."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import BASE, CPU, LATER, NEW, exemplars, fixed_batch, logits, same, snapshot, some, untrained

from branchout import api
from branchout.data import augment
from branchout.data.augment import Augmentation
from branchout.data.images import ResidentImages
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.labels import LabelSpace
from branchout.method import distil
from branchout.method.choose import balanced_biases
from branchout.method.compact import CompactConfig, Compaction
from branchout.method.dial import dial_frontier
from branchout.method.distil import (
    MIXED_FROM,
    SEEN,
    VIEWS,
    Student,
    Teacher,
    common_branch_point,
    compaction_loss,
    epochs_for,
    groups_of,
    merged_step,
    merged_steps,
)
from branchout.method.recipes import BRANCHOUT
from branchout.method.running.compaction_plan import forecast_seconds
from branchout.method.running.engine import OnnxEngine
from branchout.method.running.speeds import Speeds
from branchout.model.checkpoint import SavedModel, StepPoints
from branchout.model.classifier import Step
from branchout.training.loop import Event

ALL = (*BASE, *NEW, *LATER)


class SeenError(Exception):
    """What a replaced function was called with."""


@pytest.fixture(scope="module")
def memory(train: Samples) -> Samples:
    return exemplars(train, ALL, per_class=8)


@pytest.fixture(scope="module")
def small(extended_twice: api.Model, memory: Samples, val: Samples) -> api.Model:
    return extended_twice.compact(memory, val=val, epochs=20)


def test_one_branch_remains_and_classes_stay_in_their_order(extended_twice: api.Model, small: api.Model) -> None:
    assert small.classes == extended_twice.classes
    assert len(small.classifier.steps) == 1
    assert set(small.classifier.space.overlap) == {BASE[0]}  # NEW[0] was in both steps and has one column now
    assert same(snapshot(small.classifier.backbone), snapshot(extended_twice.classifier.backbone))
    assert same(snapshot(small.classifier.base_head), snapshot(extended_twice.classifier.base_head))


def test_it_predicts_nearly_as_well_and_is_smaller(small: api.Model) -> None:
    found = small.compaction
    assert found is not None
    assert found.before.accuracies is not None
    assert found.after.accuracies is not None
    # Of 56 images up to 7 are lost; how many depends on how a processor rounds. A model that guesses loses 14.
    assert found.after.accuracies.all > found.before.accuracies.all - 0.16
    assert (found.before.branches, found.after.branches) == (2, 1)
    assert found.after.parameters < found.before.parameters
    assert found.after.bytes < found.before.bytes
    assert found.after.images_per_second > 0


def test_accuracies_are_those_of_the_models_on_the_test_half(
    extended_twice: api.Model, small: api.Model, memory: Samples, val: Samples
) -> None:
    found = small.compaction
    assert found is not None
    assert found.before.accuracies is not None
    assert found.after.accuracies is not None
    assert found.images == len(val) // 2
    halves = Compaction(extended_twice.saved, memory, CompactConfig(), val=val, device=CPU).split
    for model, told in ((extended_twice, found.before.accuracies), (small, found.after.accuracies)):
        said = [answer[0][0] for answer in model.predict([halves.test.read(n) for n in range(len(halves.test))])]
        assert told.all == pytest.approx(np.mean(np.array(said) == halves.test.names))


def test_goals_can_still_be_chosen(small: api.Model, tmp_path: Path) -> None:
    saved = api.Model(small.saved, None, CPU).save(tmp_path / "small")
    for goal in ("all", "avg", "balanced", "novel", "base"):
        saved.tune(goal)
    loaded = api.load(tmp_path / "small")
    assert loaded.saved.step_points[-1].goal == "base"
    assert loaded.saved.history[-1]["what"] == "compact"
    assert loaded.classes == small.classes


def test_the_goal_of_the_model_stays_unless_it_is_out_of_reach(
    extended_twice: api.Model, memory: Samples, val: Samples
) -> None:
    def with_goal(goal: str) -> api.Model:
        *earlier, last = extended_twice.saved.step_points
        return api.Model(replace(extended_twice.saved, step_points=(*earlier, replace(last, goal=goal))), None, CPU)

    kept = with_goal("novel>=0.1").compact(memory, val=val, epochs=1)
    assert kept.saved.step_points[-1].goal == "novel>=0.1"
    lost = with_goal("all>=0.9999").compact(memory, val=val, epochs=1)
    assert lost.saved.step_points[-1].goal == "balanced"
    assert lost.compaction is not None
    assert any("all>=0.9999" in line for line in lost.compaction.warnings)


def test_no_overlap_and_two_of_three_branches(extended: api.Model, train: Samples, val: Samples) -> None:
    third = extended.extend(train.of_classes(LATER[:2]), memory=exemplars(train, [*BASE, *NEW]), epochs=1, views=1)
    third = third.extend(
        train.of_classes(LATER[2:]), memory=exemplars(train, [*BASE, *NEW, *LATER[:2]]), epochs=1, views=1
    )
    small = third.compact(exemplars(train, ALL), val=val, branches=2, epochs=2)
    assert [step.names for step in small.classifier.steps] == [
        tuple(name for step in third.classifier.steps[:2] for name in step.names),
        third.classifier.steps[2].names,
    ]
    assert len(small.saved.step_points) == 2
    assert all(delta is None for delta in small.classifier.fused.deltas)
    assert small.saved.model(1).space.classes == third.saved.model(2).space.classes


def test_a_later_branch_leaves_the_first_at_its_balanced_point_whatever_the_goal(train: Samples) -> None:
    first, second = [*NEW, *LATER[:2]], LATER[2:]
    curve = dial_frontier(np.zeros((1, 2)), np.zeros(1, dtype=np.int64), LabelSpace.of("a", "b")).to_dict()
    old = SavedModel(untrained(BASE, NEW, LATER[:2], second), (StepPoints(curve, [], 0, "novel"),) * 3)
    run = Compaction(old, exemplars(train, ALL), CompactConfig(branches=2), device=CPU)
    _, one, _, _ = run.choose(untrained(BASE, first), [])
    (balanced,) = balanced_biases(one, 1)
    far = replace(one, point=int(np.abs(np.array(one.frontier["settings"])[:, 0] - balanced).argmax()))
    assert abs(far.biases(1)[0] - balanced) > 0.1
    _, two, _, _ = run.choose(untrained(BASE, first, second), [far])
    assert balanced_biases(two, 2)[0] == pytest.approx(balanced, abs=1e-5)


def test_unlabelled_images_are_learned_from_too(
    extended_twice: api.Model, memory: Samples, val: Samples, train: Samples, tmp_path: Path
) -> None:
    from PIL import Image

    (tmp_path / "more" / "deep").mkdir(parents=True)
    for n in range(12):
        Image.fromarray(train.read(n)[..., 0]).save(tmp_path / "more" / "deep" / f"{n}.png")
    (tmp_path / "more" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    (tmp_path / "more" / "something.png").write_text("text")
    plain = extended_twice.compact(memory, val=val, epochs=1)
    more = extended_twice.compact(memory, val=val, epochs=1, images=tmp_path / "more")
    assert more.compaction is not None
    for name in ("broken.png", "something.png"):
        assert any(name in line for line in more.compaction.warnings)
    assert not same(snapshot(plain.classifier.branches), snapshot(more.classifier.branches))


@pytest.mark.parametrize("views", [0, 16], ids=["new views in every epoch, as on a GPU", "cached views"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    views: int,
    extended_twice: api.Model,
    memory: Samples,
    val: Samples,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(VIEWS, "cpu", views)
    monkeypatch.setitem(MIXED_FROM, "cpu", 1)

    def stop(event: Event) -> None:
        if event.work == "Distilling the branches" and event.done == 2:
            raise KeyboardInterrupt

    whole = extended_twice.compact(memory, val=val, epochs=4, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        extended_twice.compact(memory, val=val, epochs=4, out=tmp_path / "broken", on_progress=stop)
    assert not (tmp_path / "broken").exists()
    with pytest.raises(BranchoutError, match="seed"):
        extended_twice.compact(memory, val=val, epochs=4, seed=1, out=tmp_path / "broken")
    seen: list[int] = []
    told: list[str] = []
    extended_twice.compact(
        memory,
        val=val,
        epochs=4,
        out=tmp_path / "broken",
        announce=told.append,
        on_progress=lambda event: seen.append(event.done) if event.work == "Distilling the branches" else None,
    )
    assert seen == [3, 4]
    assert re.search("in 4 epochs, of which 2 are done: about .* more", told[0])
    again = api.load(tmp_path / "broken")
    assert torch.equal(logits(whole.classifier, fixed_batch()), logits(again.classifier, fixed_batch()))
    assert not (tmp_path / ".broken.work").exists()


# What cannot be compacted.


def test_refusals_say_what_was_found(
    base: api.Model, extended: api.Model, extended_twice: api.Model, memory: Samples
) -> None:
    with pytest.raises(BranchoutError, match="no steps"):
        base.compact(memory.of_classes(BASE))
    with pytest.raises(BranchoutError, match="1 step,"):
        extended.compact(memory.of_classes([*BASE, *NEW]))
    with pytest.raises(BranchoutError, match="--branches from 1 to 1"):
        extended_twice.compact(memory, branches=2)
    with pytest.raises(BranchoutError, match="no images of the 7 classes"):
        extended_twice.compact(memory.of_classes(BASE[1:]))
    with pytest.raises(BranchoutError, match="does not know: dragon"):
        extended_twice.compact(memory.rename({BASE[3]: "dragon"}))


@pytest.mark.parametrize(
    ("setting", "least"),
    [
        ({"branches": 1.5}, 1),
        ({"branches": 0}, 1),
        ({"branches": True}, 1),
        ({"epochs": "3"}, 1),
        ({"epochs": 0}, 1),
        ({"seed": None}, 0),
        ({"seed": -1}, 0),
    ],
)
def test_settings_that_are_no_whole_numbers_are_refused_at_once(
    setting: dict[str, object], least: int, extended_twice: api.Model
) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(BranchoutError, match=f"{name} .*whole number.*{least}, found {value!r}"):
        extended_twice.compact("nowhere", **setting)  # type: ignore[arg-type]


def test_classes_without_images_keep_their_columns(extended_twice: api.Model, memory: Samples, val: Samples) -> None:
    with pytest.warns(UserWarning, match="3 classes") as caught:
        small = extended_twice.compact(memory.of_classes([*BASE, *NEW]), val=val, epochs=1)
    assert {warning.filename for warning in caught} == {__file__}  # the line that can be changed
    assert small.classes == extended_twice.classes
    assert small.compaction is not None
    assert any("3 classes" in line for line in small.compaction.warnings)


def test_only_images_of_added_classes(extended_twice: api.Model, memory: Samples) -> None:
    small = extended_twice.compact(memory.of_classes([*NEW, *LATER]), epochs=1)
    assert small.classes == extended_twice.classes
    assert small.frontier.chosen_on == "pseudo"


def test_only_images_of_added_classes_and_two_branches_left(train: Samples) -> None:
    old = api.Model(three_steps(NEW, LATER[:2], LATER[2:]), None, CPU)
    small = old.compact(exemplars(train, [*NEW, *LATER], per_class=8), branches=2, epochs=1)
    assert small.frontier.chosen_on == "pseudo"
    assert len(small.classifier.steps) == 2


def three_steps(*branches: Sequence[str]) -> SavedModel:
    curve = dial_frontier(np.zeros((1, 2)), np.zeros(1, dtype=np.int64), LabelSpace.of("a", "b")).to_dict()
    return SavedModel(untrained(BASE, *branches), (StepPoints(curve, [], 0, "balanced"),) * 3)


def test_a_last_step_that_added_no_class_of_its_own(train: Samples) -> None:
    """Each of the two branches has images, although all classes of the second are classes of the first."""
    old = three_steps(NEW, LATER, NEW[:1])
    kept = exemplars(train, ALL, per_class=8)
    for origin in (1, 3, -1):  # all of the first step, all of the last, unknown
        placed = kept.with_origin(np.where(kept.mask(NEW[:1]), origin, -1))
        run = Compaction(old, placed, CompactConfig(branches=2), device=CPU)
        for number, names in ((1, {*NEW, *LATER}), (2, set(NEW[:1]))):
            assert set(run.split.new.select(run.split.new.origin == number).classes) <= names
            assert (run.split.new.origin == number).any()
    small = api.Model(old, None, CPU).compact(kept, branches=2, epochs=1)
    assert [step.names for step in small.classifier.steps] == [(*NEW, *LATER), NEW[:1]]


def test_several_branches_of_one_class_share_its_images(train: Samples) -> None:
    curve = dial_frontier(np.zeros((1, 2)), np.zeros(1, dtype=np.int64), LabelSpace.of("a", "b")).to_dict()
    one = NEW[:1]
    old = SavedModel(untrained(BASE, LATER, LATER[:1], one, NEW[:2], one), (StepPoints(curve, [], 0, "balanced"),) * 5)
    kept = exemplars(train, [*BASE, *LATER, *one], per_class=8)
    placed = kept.with_origin(np.where(kept.mask(one), 4, -1))
    run = Compaction(old, placed, CompactConfig(branches=4), device=CPU)
    assert set(run.split.new.origin.tolist()) == {1, 2, 3, 4}


def test_a_branch_that_would_have_no_images_is_refused_before_anything_is_trained(
    train: Samples, tmp_path: Path
) -> None:
    old = three_steps(NEW, LATER[:2], LATER[2:])
    kept = exemplars(train, [*BASE, *NEW, *LATER[:2]], per_class=8)
    with pytest.raises(BranchoutError, match=f"too few images.*{LATER[2]}.*--branches 1"):
        api.Model(old, None, CPU).compact(kept, branches=2, epochs=1, out=tmp_path / "small")
    assert not list(tmp_path.iterdir())


# The parts.


def test_shared_classes_are_divided_by_the_larger_logit(
    extended_twice: api.Model, train: Samples, memory: Samples
) -> None:
    compaction = Compaction(extended_twice.saved, memory, CompactConfig(), device=CPU)
    images = some(train, {BASE[0]: 4, BASE[1]: 2, NEW[1]: 2})
    found = dict(zip(images.ids, compaction.origins(images), strict=True))
    columns = extended_twice.evaluate(images).columns
    offsets = extended_twice.classifier.fused.bias.numpy()
    space = extended_twice.classifier.space
    for n, name in enumerate(images.names):
        owners = [d for d, names in enumerate(space.branches) if name in names]
        logit = {d: columns[n, space.slice_of(d)][space.branches[d].index(name)] + offsets[d] for d in owners}
        assert found[images.ids[n]] == max(logit, key=logit.__getitem__)
    told = images.with_origin(2)
    assert compaction.origins(told).tolist() == [2] * len(images)


@pytest.mark.parametrize(("steps", "branches"), [(10, 1), (10, 3), (5, 4), (2, 1)])
def test_groups_hold_every_step_once_in_order(steps: int, branches: int) -> None:
    groups = groups_of(steps, branches)
    assert [n for group in groups for n in group] == list(range(1, steps + 1))
    assert len(groups) == branches
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


@pytest.mark.parametrize(
    ("points", "expected"),
    [(("last", "last"), "last"), (("layer4", "layer3"), "layer3"), (("fc", "fc"), "fc"), (("fc", "last"), "layer4")],
)
def test_the_earliest_branch_point_is_taken(points: Sequence[str], expected: str) -> None:
    assert common_branch_point(untrained(BASE), points) == expected


def test_new_branches_correct_the_logits_before_them_if_old_ones_did(
    extended_twice: api.Model, memory: Samples, val: Samples
) -> None:
    assert [step.correction is not None for step in extended_twice.classifier.steps] == [False, True]
    (step,) = extended_twice.compact(memory, val=val, epochs=1).classifier.steps
    assert step.correction is not None
    assert step.correction.weight.shape[1] == len(BASE)
    assert step.correction.weight.any(0).all()
    model = untrained(BASE, NEW, LATER[:2], LATER[2:])
    space = LabelSpace.of(BASE, NEW, LATER)
    merged = merged_steps(model.rebuilt(()), model.steps, [[1], [2, 3]], space, "last")
    columns = [step.correction.weight.shape[1] for step in merged if step.correction is not None]
    assert columns == [len(BASE), len(BASE) + len(NEW)]
    (alone,) = merged_steps(model.rebuilt(()), model.steps[:1], [[1]], LabelSpace.of(BASE, NEW), "last")
    assert alone.correction is None


def test_a_merged_step_is_the_mean_of_branches_with_all_rows() -> None:
    model = untrained(BASE, NEW, (*LATER, NEW[0]))
    names = (*NEW, *LATER)
    merged = merged_step(model, model.steps, names, "last")
    one, other, mean = (step.branch.own_state_dict() for step in (*model.steps, merged))
    for key, value in mean.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, (one[key] + other[key]) / 2)
    for number, name in enumerate(names):
        step: Step = model.steps[1] if name in model.steps[1].names else model.steps[0]
        assert torch.equal(merged.head.weight[number], step.head.weight[step.names.index(name)])


def test_teacher_and_student_give_the_logits_of_their_models() -> None:
    model = untrained(BASE, NEW, LATER)
    model.fused.set_bias([1.0, -1.0])
    x, z_base, taught = Teacher(model, 3, BRANCHOUT.stage_one, device=CPU)(fixed_batch())
    torch.testing.assert_close(taught, logits(model, fixed_batch()))
    space = LabelSpace.of(BASE, NEW, LATER)
    start = model.steps[0].start
    x, z_base, taught = Teacher(model, start, BRANCHOUT.stage_one, device=CPU)(fixed_batch())
    student = Student(model.steps, space, "max", [1.0, -1.0]).eval()
    torch.testing.assert_close(student(x, z_base), taught)
    assert compaction_loss(taught, taught, [torch.tensor([1, 2])]).item() == pytest.approx(0, abs=1e-6)


def test_the_loss_is_its_formula_image_by_image() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 6), torch.randn(3, 6)
    steps = [[2, 3], [5, 2, 4]]
    total = 0.0
    for z, t in zip(student / 2, teacher / 2, strict=True):
        for weight, classes in ((1, range(6)), *((3, of_step) for of_step in steps)):
            p, q = (np.exp([float(v[n]) for n in classes]) for v in (t, z))
            p, q = p / p.sum(), q / q.sum()
            total += weight * 4 * float(sum(p * np.log(p / q)))
    found = compaction_loss(student, teacher, [torch.tensor(classes) for classes in steps])
    assert found.item() == pytest.approx(total / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("device", "images", "expected"),
    [("cpu", 1000, 160), ("cpu", 100, 320), ("cuda", 4000, 320), ("cuda", 100, 640), ("cpu", 10**6, 12)],
)
def test_fewer_images_are_seen_more_often(device: str, images: int, expected: int) -> None:
    assert epochs_for(images, torch.device(device)) == expected


@pytest.mark.parametrize(("epochs", "mixed"), [(MIXED_FROM["cpu"] - 1, False), (MIXED_FROM["cpu"], True)])
def test_only_images_that_are_seen_often_are_mixed(
    epochs: int, mixed: bool, extended_twice: api.Model, memory: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    def views(self: object, order: object, augmentation: Augmentation, *args: object) -> None:
        raise SeenError(augmentation)

    monkeypatch.setattr(ResidentImages, "views", views)
    with pytest.raises(SeenError) as seen:
        Compaction(extended_twice.saved, memory, CompactConfig(epochs=epochs), device=CPU).distil()
    assert seen.value.args[0].mixed == mixed


def test_photos_keep_the_hue_that_stage_one_trains_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(frozen: Teacher, *args: object, **options: object) -> None:
        raise SeenError(frozen.augmentation)

    monkeypatch.setattr(distil, "TrunkOutputs", shown)
    photos = SimpleNamespace(kind="photo", preprocessing=SimpleNamespace(size=224))
    with pytest.raises(SeenError) as seen:
        distil.distil(photos, None, [], 0, [], epochs=MIXED_FROM["cpu"], views=0, seed=0, device=CPU)  # type: ignore[arg-type]
    (augmentation,) = seen.value.args
    assert augmentation.mixed
    assert augmentation.hue == BRANCHOUT.stage_one.most_hue < augment.for_kind("photo", 224).hue


def test_each_old_step_is_distilled_within_its_own_classes(
    extended_twice: api.Model, memory: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NEW[0] is a class of both steps, BASE[0] of the base and the second; the second step corrects the base."""

    def shown(z: torch.Tensor, taught: torch.Tensor, steps: Sequence[torch.Tensor]) -> None:
        raise SeenError([[extended_twice.classes[n] for n in classes] for classes in steps])

    monkeypatch.setattr(distil, "compaction_loss", shown)
    with pytest.raises(SeenError) as seen:
        Compaction(extended_twice.saved, memory, CompactConfig(epochs=1), device=CPU).distil()
    model = extended_twice.classifier
    assert model.steps[1].correction is not None
    assert seen.value.args[0] == [*(list(step.names) for step in model.steps), list(model.space.branches[0])]
    steps = [replace(step, correction=None) for step in model.steps]
    plain = replace(extended_twice.saved, classifier=model.rebuilt(steps))
    with pytest.raises(SeenError) as seen:
        Compaction(plain, memory, CompactConfig(epochs=1), device=CPU).distil()
    assert seen.value.args[0] == [list(step.names) for step in model.steps]


def test_many_steps_count_no_more_than_ten() -> None:
    torch.manual_seed(0)
    z, taught, classes = torch.randn(4, 5), torch.randn(4, 5), torch.tensor([1, 3])
    ten, forty = (compaction_loss(z, taught, [classes] * steps) for steps in (10, 40))
    assert ten.item() == pytest.approx(forty.item(), rel=1e-6)


def test_plan_and_history_have_the_epochs_that_the_images_need(
    extended_twice: api.Model, memory: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        SEEN, "cpu", 15 * len(Compaction(extended_twice.saved, memory, CompactConfig(), device=CPU).learned)
    )
    told: list[str] = []
    small = extended_twice.compact(memory, announce=told.append)
    assert "into 1 in 15 epochs" in told[0]
    assert "frozen part in torch" in told[0]
    assert (small.saved.history[-1]["epochs"], small.saved.history[-1]["engine"]) == (15, "torch")


@pytest.mark.parametrize(
    ("size", "gpu", "views", "done", "expected"),
    [
        (32, False, 16, 0, 10 * (0.5 + 16 * 3 + 20 * 2 * 7)),  # small images are decoded once
        (224, False, 16, 0, 10 * (16 * 0.5 + 16 * 3 + 20 * 2 * 7)),
        (224, True, 0, 0, 10 * (0.5 + 20 * 3 + 20 * 2 * 7)),  # the frozen part runs in every epoch
        (32, False, 16, 15, 10 * (0.5 + 16 * 3 + 5 * 2 * 7)),  # cached views are computed again
        (224, True, 0, 15, 10 * (0.5 + 5 * 3 + 5 * 2 * 7)),
        (32, False, 16, 20, 0),
    ],
)
def test_the_forecast_counts_all_that_is_computed(size: int, gpu: bool, views: int, done: int, expected: float) -> None:
    run = SimpleNamespace(
        views=views, epochs=20, config=CompactConfig(branches=2), where="last", learned=range(10),
        base=SimpleNamespace(preprocessing=SimpleNamespace(size=size)),
    )  # fmt: skip
    speeds = Speeds(1.0, 3.0, {"last": 7.0}, 0.0, cores=2, gpu=gpu)
    assert forecast_seconds(run, speeds, done) == pytest.approx(expected)  # type: ignore[arg-type]


def test_onnxruntime_runs_the_frozen_part_where_asked(
    extended_twice: api.Model, memory: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OnnxEngine.__call__
    images = 0

    def counted(self: OnnxEngine, batch: torch.Tensor) -> dict[int, torch.Tensor]:
        nonlocal images
        images += len(batch)
        return run(self, batch)

    monkeypatch.setattr(OnnxEngine, "__call__", counted)
    config = CompactConfig(epochs=1)
    (in_torch,), _ = Compaction(extended_twice.saved, memory, config, device=CPU).distil()
    assert not images
    monkeypatch.setenv("BRANCHOUT_ENGINE", "onnxruntime")
    compaction = Compaction(extended_twice.saved, memory, config, device=CPU)
    (step,), _ = compaction.distil()
    assert images >= len(compaction.learned) * compaction.views
    for one, other in zip(step.branch.parameters(), in_torch.branch.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)


def test_a_refused_run_leaves_nothing_that_stands_in_the_way(
    extended_twice: api.Model, memory: Samples, train: Samples, tmp_path: Path
) -> None:
    with pytest.raises(BranchoutError, match="too few"):
        extended_twice.compact(exemplars(train, ALL, per_class=1), epochs=1, out=tmp_path / "small")
    assert not list(tmp_path.iterdir())
    extended_twice.compact(memory, epochs=1, out=tmp_path / "small")


def test_what_is_wrong_with_the_images_is_said_before_training(extended_twice: api.Model, memory: Samples) -> None:
    said: list[str] = []

    def note(event: Event) -> None:
        said.append(event.work)

    lacking = memory.of_classes([*BASE[2:], *NEW, *LATER[1:]])
    small = extended_twice.compact(lacking, epochs=1, warn=said.append, on_progress=note)
    assert small.compaction is not None
    first = said.index("Distilling the branches")
    for problem in small.compaction.warnings:
        assert said.index(problem) < first
    assert any(LATER[0] in line and "added by steps" in line for line in said[:first])
    assert any(BASE[1] in line and "only the base" in line for line in said[:first])


def test_added_classes_that_validation_lacks_are_named(
    extended_twice: api.Model, memory: Samples, val: Samples
) -> None:
    whole, lacking = (
        Compaction(extended_twice.saved, memory, CompactConfig(), val=val.of_classes(names), device=CPU).notices
        for names in (ALL, [name for name in ALL if name != LATER[1]])
    )
    assert not any("--val has no images" in line for line in whole)
    assert any(line.startswith("--val has no images for 1 class") and LATER[1] in line for line in lacking)


def test_images_that_choose_or_measure_are_not_learned_from(extended_twice: api.Model, memory: Samples) -> None:
    plain = Compaction(extended_twice.saved, memory, CompactConfig(), device=CPU)
    held = len(plain.split.dev) + len(plain.split.test)
    more = Compaction(extended_twice.saved, memory, CompactConfig(), unlabelled=memory, device=CPU)
    assert len(more.learned) == len(plain.learned) + len(memory) - held
    assert any(f"{held} images" in line for line in more.notices)
    only = Compaction(extended_twice.saved, memory, CompactConfig(), unlabelled=plain.split.dev, device=CPU)
    assert only.unlabelled is None


def test_a_saved_model_is_not_changed(extended_twice: api.Model, memory: Samples, val: Samples) -> None:
    saved: SavedModel = extended_twice.saved
    held, deltas = snapshot(saved.classifier), [f.point for f in saved.step_points]
    before = logits(extended_twice.classifier, fixed_batch())
    extended_twice.compact(memory, val=val, epochs=1)
    assert same(held, snapshot(saved.classifier))
    assert deltas == [f.point for f in saved.step_points]
    assert torch.equal(before, logits(extended_twice.classifier, fixed_batch()))


def test_a_model_of_several_branches_tells_of_its_compaction_once(train: Samples, tmp_path: Path) -> None:
    curve = dial_frontier(np.zeros((1, 2)), np.zeros(1, dtype=np.int64), LabelSpace.of("a", "b")).to_dict()
    points = (StepPoints(curve, [], 0, "balanced"),) * 3
    old = SavedModel(untrained(BASE, NEW, LATER[:2], LATER[2:]), points, ({"what": "pretrain"},) * 4)
    kept = exemplars(train, [*BASE, *NEW, *LATER], per_class=8)
    api.Model(old, None, CPU).compact(kept, branches=2, epochs=1, out=tmp_path / "small")
    card = (tmp_path / "small" / "README.md").read_text()
    assert "compacted from 3 step branches to 2" in card
    assert card.split("## How it was made")[1].count("compact:") == 1
