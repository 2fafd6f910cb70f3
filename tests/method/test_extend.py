"""The pipeline: who trains, chooses and reports; points that keep what they promise; runs that survive kills."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from browsing import with_fixed_dial
from helpers import BASE, CPU, LATER, NEW, exemplars, fixed_batch, logits, some, untrained

from branchout import api
from branchout.data.images import in_order, open_images
from branchout.data.samples import Samples, concatenate
from branchout.errors import BranchoutError
from branchout.labels import LabelSpace
from branchout.method.choose import apply_point
from branchout.method.config import ExtendConfig
from branchout.method.extend import Extension, needs_deltas
from branchout.method.frontier import Frontier
from branchout.method.running.effort import Effort, Plan
from branchout.method.split import DataSplit
from branchout.model.classifier import Classifier

OVERLAPPING = (*NEW, BASE[2], BASE[5])


# Operating points keep what they promise.


def slow_figures(model: Classifier, samples: Samples, space: LabelSpace) -> dict[str, float | None]:
    """Accuracies of a model on images, image by image."""
    images = open_images(samples, model.preprocessing, torch.device("cpu"))
    said = []
    with torch.no_grad():
        for batch in images.plain(in_order(len(samples), 13)):
            said += [space.classes[n] for n in model(batch).argmax(1)]
    owners = {name: [d for d, names in enumerate(space.branches) if name in names] for name in space.classes}
    parts: dict[str, list[bool]] = {"all": []}
    steps: dict[object, list[bool]] = {}
    for name, answer in zip(samples.names, said, strict=True):
        part = "overlap" if len(owners[name]) > 1 else "base" if owners[name] == [0] else "novel"
        for key in ("all", part):
            parts.setdefault(key, []).append(answer == name)
        steps.setdefault(part if part != "novel" else owners[name][0], []).append(answer == name)
    figures: dict[str, float | None] = {k: float(np.mean(v)) for k, v in parts.items()}
    figures["avg"] = float(np.mean([np.mean(v) for v in steps.values()]))
    return {key: figures.get(key) for key in ("all", "base", "novel", "overlap", "avg")}


def approx(figures: dict[str, float | None]) -> dict[str, object]:
    return {key: None if value is None else pytest.approx(value) for key, value in figures.items()}


def test_the_chosen_point_of_the_dial_keeps_its_word_on_the_dev_images(
    base: api.Model, extended: api.Model, train: Samples, val: Samples
) -> None:
    material = base.prepare(train.of_classes(NEW), memory=exemplars(train), val=val.of_classes([*BASE, *NEW])).split
    loaded = api.load(extended.folder)
    assert loaded.frontier.images == len(material.dev)
    space = loaded.classifier.space
    for goal in ("balanced", "all", "avg", "novel", "base"):
        points = replace(loaded.saved.step_points[0], point=loaded.frontier.choose(goal))
        model = replace(loaded.saved, step_points=(points,)).model()
        assert slow_figures(model, material.dev, space) == approx(loaded.frontier.at(points.point))
    measured = extended.saved.history[-1]["measured"]
    after = slow_figures(loaded.classifier, material.test, space)
    assert {key: measured["after"][key] for key in after} == approx(after)
    before = slow_figures(base.classifier, material.test.of_classes(BASE), base.classifier.space)
    assert measured["before"]["base"] == pytest.approx(before["base"])
    assert measured["images"] == len(material.test)


def test_the_second_step_keeps_its_word_too(
    extended: api.Model, extended_twice: api.Model, train: Samples, val: Samples
) -> None:
    new = train.of_classes([*LATER, BASE[0], NEW[0]])
    material = extended.prepare(new, memory=exemplars(train, [*BASE, *NEW]), val=val).split
    loaded = api.load(extended_twice.folder)
    points = loaded.saved.step_points[1]
    assert loaded.classifier.space.overlap == (BASE[0], NEW[0])
    assert len(points.deltas) == 1  # classes overlap, so deltas were learned
    assert slow_figures(loaded.classifier, material.dev, loaded.classifier.space) == approx(
        loaded.frontier.at(points.point)
    )
    after = slow_figures(loaded.classifier, material.test, loaded.classifier.space)
    measured = loaded.saved.history[-1]["measured"]
    assert {key: measured["after"][key] for key in after} == approx(after)


@pytest.mark.parametrize(("recipe", "names"), [("paper", OVERLAPPING), ("reference", NEW)])
def test_every_kept_point_of_a_grid_keeps_its_word(
    recipe: str, names: Sequence[str], base: api.Model, train: Samples, val: Samples, tmp_path: Path
) -> None:
    new, held = train.of_classes(names), val.of_classes([*BASE, *NEW])
    base.extend(new, memory=exemplars(train), val=held, recipe=recipe, epochs=2, goal="avg", out=tmp_path / "m")
    material = base.prepare(new, memory=exemplars(train), val=held).split
    grown = api.load(tmp_path / "m")
    frontier, saved = grown.frontier, grown.saved.step_points[0]
    assert frontier.kind == "grid"
    assert 1 <= len(frontier) == len(saved.deltas) < 36
    assert frontier.balanced_by == ("mean" if recipe == "paper" else "product")
    points = [frontier.at(n) for n in range(len(frontier))]
    for one in points:
        for other in points:
            no_worse = all((other[m] or 0) >= (one[m] or 0) for m in ("base", "novel", "overlap"))
            assert other is one or not no_worse  # no point beats, or repeats, another
    for point, promised in enumerate(points):
        apply_point(grown.classifier, replace(saved, point=point))
        assert slow_figures(grown.classifier, material.dev, grown.classifier.space) == approx(promised)
    assert recipe != "paper" or len(frontier) > 1
    assert points[saved.point]["avg"] == max(p["avg"] for p in points)


def test_conditions_choose_the_best_point_that_meets_them(extended: api.Model, val: Samples, tmp_path: Path) -> None:
    frontier = with_fixed_dial(extended, val.of_classes(extended.classes), tmp_path / "v2").frontier
    points = [frontier.at(n) for n in range(len(frontier))]
    reached = sorted({p["novel"] for p in points})
    assert len(reached) > 1
    for wanted in (reached[0], reached[1] - 0.01, reached[-1]):
        found = points[frontier.choose(f"novel >= {wanted:.12f}")]
        best = max(p["all"] for p in points if p["novel"] >= wanted - 1e-9)
        assert found["novel"] >= wanted - 1e-9
        assert found["all"] == best
    assert frontier.choose("novel>=15%") == frontier.choose("novel>=0.15") == frontier.choose("novel>=15")


def test_an_extension_meets_its_goal(base: api.Model, train: Samples, val: Samples) -> None:
    settings = {"memory": exemplars(train), "val": val.of_classes([*BASE, *NEW]), "epochs": 1, "views": 1}
    grown = base.extend(train.of_classes(NEW), goal="novel>=0.2", **settings)
    points = grown.saved.step_points[0]
    assert points.goal == "novel>=0.2"
    assert grown.frontier.at(points.point)["novel"] >= 0.2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"goal": "fame"}, "no goal is called 'fame'. A goal is one of all, avg"),
        ({"goal": "novel>=2000"}, "cannot be"),
        ({"recipe": "mine"}, "no recipe is called 'mine'; known are: paper"),
    ],
)
def test_a_typo_is_answered_before_anything_is_trained(
    options: dict[str, str], words: str, base: api.Model, train: Samples, tmp_path: Path
) -> None:
    with pytest.raises(BranchoutError, match=words):
        base.extend(train.of_classes(NEW), out=tmp_path / "m", on_progress=pytest.fail, **options)
    assert list(tmp_path.iterdir()) == []


# Deltas, memory, few images.


def test_deltas_are_learned_when_they_should_be(base: api.Model, train: Samples, val: Samples) -> None:
    def deltas(names: Sequence[str], memory: Samples | None = None, **options: object) -> int:
        held = val.of_classes([*BASE, *NEW])
        grown = base.extend(train.of_classes(names), memory=memory, val=held, epochs=1, views=1, **options)
        assert grown.frontier.kind == "dial"
        return len(grown.saved.step_points[0].deltas)

    assert deltas(NEW, exemplars(train)) == 0
    assert deltas(NEW, exemplars(train), fuse=True) == 1
    assert deltas(OVERLAPPING, exemplars(train)) == 1
    assert deltas(NEW, None) == 1


def test_a_model_that_was_balanced_by_deltas_goes_on_with_deltas(base: api.Model, train: Samples, val: Samples) -> None:
    everything = val.of_classes([*BASE, *NEW, *LATER])
    for fuse, expected in ((False, 0), (True, 1)):
        first = base.extend(
            train.of_classes(NEW),
            memory=exemplars(train),
            val=val.of_classes([*BASE, *NEW]),
            epochs=1,
            views=1,
            fuse=fuse,
        )
        kept = exemplars(train, [*BASE, *NEW])
        second = first.extend(train.of_classes(LATER), memory=kept, val=everything, epochs=1, views=1)
        assert len(second.saved.step_points[-1].deltas) == expected


def test_classes_that_earlier_steps_share_do_not_count_for_a_later_one(train: Samples) -> None:
    """A class that the first step shares with the base is no reason to train deltas for a step that shares none."""
    model = untrained(BASE, (*NEW, BASE[0]))
    memory = exemplars(train, [*BASE, *NEW])

    def needed(*names: str) -> bool:
        split = DataSplit.of(model.space, train.of_classes(names), memory, None, 0)
        return needs_deltas(model, model.space.extend(names), split, ExtendConfig())

    assert not needed(*LATER)
    assert needed(*LATER, BASE[0])


def test_classes_that_get_new_images_are_not_said_to_be_forgotten(extended: api.Model, train: Samples) -> None:
    for names, expected in ((NEW, 0), (LATER, 1)):
        told = extended.prepare(train.of_classes(names), memory=exemplars(train)).warnings
        assert sum("may be forgotten" in line for line in told) == expected


def test_where_no_exemplar_trains_old_images_do_not_end_training(base: api.Model, train: Samples, val: Samples) -> None:
    for memory in (None, exemplars(train)):
        split = DataSplit.of(base.saved.classifier.space, train.of_classes(NEW), memory, val.of_classes([*BASE, *NEW]))
        _, old = Extension(base.saved.model(), split, ExtendConfig(), device=CPU).data.held_out()
        assert (old is None) == (memory is None)


def test_stand_ins_are_calibrated_on_images_that_did_not_train(base: api.Model, train: Samples) -> None:
    """Also where every old class had an image, and that of some was held out."""
    split = DataSplit.of(base.saved.classifier.space, train.of_classes(NEW), exemplars(train), None, 0)
    assert split.calibration is None
    extension = Extension(base.saved.model(), split, ExtendConfig(epochs=1, views=1), device=CPU)
    step, _ = extension.train_branch()
    model = extension.base.extended(step)
    read: list[Samples] = []
    features = extension.data.features
    with patch.object(
        extension.data, "features", lambda model, samples: read.append(samples) or features(model, samples)
    ):
        extension.data.pseudo(model, 0, torch.tensor([0]))
    trained, others = read
    assert trained is split.new
    assert set(others.ids) == set(split.dev.of_classes(NEW).ids)


def test_only_classes_without_images_get_stand_ins(base: api.Model, train: Samples) -> None:
    """Exemplars of three old classes are used as they are; the other five are made up."""
    memory = exemplars(train, BASE[:3])
    extension = Extension(
        base.saved.model(),
        DataSplit.of(base.saved.classifier.space, train.of_classes(NEW), memory, None, 0),
        ExtendConfig(epochs=1, views=1),
        device=CPU,
    )
    assert extension.needs_deltas()
    learned, _ = extension.train_branch()
    model = extension.base.extended(learned)
    _, labels = extension.choice().dev(model)
    counts = np.bincount(labels, minlength=len(model.space.classes))
    held = extension.split.dev.counts()
    for name, count in zip(model.space.classes, counts.tolist(), strict=True):
        assert count == held.get(name, 10 if name in BASE else 0)
    seen = torch.from_numpy(model.space.index(list(BASE)))
    assert [len(part) for part in extension.data.pseudo(model, 0, seen)] == [0, 0, 0]


@pytest.mark.parametrize("stops", [False, True])
def test_images_that_ended_training_do_not_measure(stops: bool, base: api.Model, train: Samples) -> None:
    model = base.saved.model()
    split = DataSplit.of(model.space, train.of_classes(NEW), exemplars(train), None, 0)
    assert split.chosen_on == "held-out"
    plan = Plan("last", Effort(1, epochs=3, stops=stops))
    found = Extension(model, split, ExtendConfig(), device=CPU, plan=plan).run()
    assert found.measured is not None
    assert found.measured.images == len(split.test) + (0 if stops else len(split.dev))
    assert found.measured.before is not None
    branch = found.model.steps[-1].branch
    assert all(parameter.grad is None for parameter in branch.parameters())  # memory that nothing needs


@pytest.mark.parametrize("recipe", ["branchout", "paper"])
def test_without_any_old_image_it_works_and_says_what_it_rests_on(
    recipe: str, base: api.Model, train: Samples, tmp_path: Path
) -> None:
    grown = base.extend(train.of_classes(NEW), out=tmp_path / "m", epochs=2, recipe=recipe)
    assert grown.frontier.chosen_on == "pseudo"
    assert api.load(tmp_path / "m").frontier.chosen_on == "pseudo"
    assert grown.saved.history[-1]["chosen on"] == "pseudo"
    assert grown.saved.history[-1]["exemplars kept"] == 0
    assert not np.isnan(grown.frontier.accuracies["base"]).any()
    material = base.prepare(train.of_classes(NEW)).split
    assert grown.frontier.images == len(material.dev) + 10 * len(BASE)
    assert "images of old classes is not measured" in (tmp_path / "m" / "README.md").read_text(encoding="utf-8")
    assert grown.saved.history[-1]["measured"]["before"] == {}


def test_a_second_step_without_any_old_image(extended: api.Model, train: Samples) -> None:
    grown = extended.extend(train.of_classes(LATER), epochs=1, views=1)
    assert grown.frontier.chosen_on == "pseudo"
    assert grown.classifier.space.branches == (BASE, NEW, LATER)


@pytest.mark.parametrize("kept", [[*BASE, *NEW], BASE])
def test_a_second_step_without_validation_images_leaves_the_first_where_it_was(
    kept: Sequence[str], train: Samples
) -> None:
    """Kept images trained the first step, so they cannot say where it should be; with validation images it may move."""
    base, model = untrained(BASE, NEW), untrained(BASE, NEW, LATER)
    base.fused.set_bias(-1.25)
    split = DataSplit.of(base.space, train.of_classes(LATER), exemplars(train, kept), None)
    assert split.chosen_on == "held-out"
    _, points, measured = Extension(base, split, ExtendConfig(), device=CPU).choose_and_measure(model, None)
    first, second = points.biases(2)
    assert second - first == pytest.approx(points.frontier["balanced_at"] + 1.25)
    assert measured is not None
    given = replace(split, chosen_on="dev")
    _, points, _ = Extension(base, given, ExtendConfig(), device=CPU).choose_and_measure(model, None)
    assert "balanced_at" not in points.frontier


def test_a_second_step_leaves_the_first_at_its_balanced_point_whatever_was_chosen(
    extended: api.Model, train: Samples
) -> None:
    chosen = api.Model(extended.saved, None, CPU)
    balanced = chosen.classifier.fused.bias[1].item()
    chosen.classifier.fused.set_bias(balanced + 1)  # as at the point of another goal
    grown = chosen.extend(train.of_classes(LATER), memory=exemplars(train, [*BASE, *NEW]), epochs=1, views=1)
    assert grown.saved.step_points[-1].goal == "balanced"
    assert grown.classifier.fused.bias[1].item() == pytest.approx(balanced, abs=1e-5)


def test_very_few_images_are_enough(base: api.Model, train: Samples) -> None:
    few = some(train, {NEW[0]: 1, NEW[1]: 2, NEW[2]: 3})
    grown = base.extend(few, memory=some(train, dict.fromkeys(BASE, 3)), epochs=1)
    assert grown.classes == (*BASE, *NEW)
    assert grown.frontier.chosen_on == "held-out"
    alone = base.extend(some(train, {NEW[0]: 3}), epochs=1)
    assert alone.saved.history[-1]["measured"] is None  # the one image held out chose the point


# The base stays as it was.


def test_the_base_is_the_same_after_three_extensions(
    base: api.Model, train: Samples, val: Samples, tmp_path: Path
) -> None:
    pictures = fixed_batch()
    first = base.saved.model()
    answers, features = logits(first, pictures), first.features(pictures)[0].clone()
    model = base
    teach = [(*NEW[:2], BASE[0]), (NEW[2], BASE[1]), LATER]
    for number, (names, where) in enumerate(zip(teach, ("last", "layer4.0.conv2", "layer3"), strict=True), 1):
        known = exemplars(train, model.classes)
        held = val.of_classes([*model.classes, *names])
        out = tmp_path / f"v{number + 1}"
        model = model.extend(train.of_classes(names), memory=known, val=held, branch=where, epochs=2, out=out)
        for now in (model.saved, api.load(out).saved):
            old = now.model(0)
            assert torch.equal(logits(old, pictures), answers)
            assert torch.equal(old.features(pictures)[0], features)
            assert torch.equal(now.model().features(pictures)[0], features)
    assert torch.equal(logits(base.classifier, pictures), answers)
    assert torch.equal(logits(api.load(base.folder).classifier, pictures), answers)


# Runs that are stopped.


def test_another_run_into_the_same_folder_is_refused_by_what_differs(
    base: api.Model, train: Samples, tmp_path: Path
) -> None:
    out = tmp_path / "m"

    def stop(event: object) -> None:
        raise KeyboardInterrupt

    settings: dict[str, object] = {"memory": exemplars(train), "epochs": 2, "views": 1, "out": out}
    with pytest.raises(KeyboardInterrupt):
        base.extend(train.of_classes(NEW), on_progress=stop, **settings)
    assert not out.exists()
    for change, words in (
        ({"epochs": 3}, "epochs: 2 before, 3 now"),
        ({"seed": 5}, "seed: 0 before, 5 now"),
        ({"recipe": "paper"}, "recipe: branchout before, paper now"),
        ({"branch": "fc"}, "branch: not given before, fc now"),
        ({"pooler": "average"}, "pooler: max before, average now"),
        ({"memory": None}, "memory: checksum [0-9a-f]{8} before, none now"),
        ({"memory": exemplars(train, BASE, 4)}, "memory: checksum [0-9a-f]+ before, checksum [0-9a-f]+ now"),
    ):
        with pytest.raises(BranchoutError, match=words) as caught:
            base.extend(train.of_classes(NEW), on_progress=pytest.fail, **(settings | change))
        assert str(tmp_path / ".m.work") in str(caught.value)
    with pytest.raises(BranchoutError, match=r"new images: checksum [0-9a-f]+ before, checksum [0-9a-f]+ now"):
        base.extend(train.of_classes(NEW[:2]), **settings)
    base.extend(train.of_classes(NEW), **settings)
    assert api.load(out).classes == (*BASE, *NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    with pytest.raises(BranchoutError, match="already exists"):
        base.extend(train.of_classes(NEW), **settings)


def test_a_goal_out_of_reach_can_be_lowered_without_training_again(
    base: api.Model, train: Samples, val: Samples, tmp_path: Path
) -> None:
    settings = {"memory": exemplars(train), "val": val.of_classes([*BASE, *NEW]), "epochs": 2, "out": tmp_path / "m"}
    with pytest.raises(BranchoutError, match="cannot be reached"):
        base.extend(train.of_classes(NEW), goal="all>=1", **settings)
    trained = []
    base.extend(train.of_classes(NEW), goal="all", on_progress=lambda event: trained.append(event.work), **settings)
    assert "Training the new branch" not in trained
    assert api.load(tmp_path / "m").saved.step_points[0].goal == "all"


RUN = """
import sys
import numpy as np
import torch
torch.set_num_threads(1)
from branchout import api
from branchout.data.samples import ArrayPixels, Samples
base, tables, out = sys.argv[1:]
kept = np.load(tables)
table = {n: Samples.build(ArrayPixels(kept[n]), kept[n + "_names"], kept[n + "_ids"]) for n in ("new", "memory", "val")}
print("ready", flush=True)
api.load(base).extend(table["new"], memory=table["memory"], val=table["val"], epochs=30, views=2, out=out)
"""


def test_a_run_killed_three_times_gives_the_model_of_one_that_was_not(
    base: api.Model, train: Samples, val: Samples, tmp_path: Path
) -> None:
    tables = {"new": train.of_classes(OVERLAPPING), "memory": exemplars(train), "val": val.of_classes([*BASE, *NEW])}
    arrays = {}
    for name, table in tables.items():
        pixels = np.stack([table.read(n) for n in range(len(table))])
        arrays |= {
            name: pixels,
            f"{name}_names": np.array(table.names.tolist()),
            f"{name}_ids": np.array(table.ids.tolist()),
        }
    np.savez(tmp_path / "tables.npz", **arrays)

    def start(out: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RUN, str(base.folder), str(tmp_path / "tables.npz"), str(tmp_path / out)]
        environment = os.environ | {"BRANCHOUT_CACHE": str(tmp_path / f"cache of {out}")}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    unbroken = start("unbroken")
    checkpoint = tmp_path / ".broken.work" / "branch.safetensors"
    seen = -1
    for kill in range(3):
        run = start("broken")
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        # The first kill falls as soon as there is a checkpoint, the others a few epochs on.
        patience = 1 + 4 * kill
        while patience and run.poll() is None and time.monotonic() < deadline:
            changed = checkpoint.stat().st_mtime_ns if checkpoint.exists() else -1
            patience -= changed != seen
            seen = changed
            time.sleep(0.001)
        assert run.poll() is None, "the run ended before it could be killed"
        run.send_signal(signal.SIGKILL)
        run.wait(60)
        assert not (tmp_path / "broken").exists()
        assert checkpoint.exists()
    last = start("broken")
    assert last.wait(120) == 0
    assert unbroken.wait(120) == 0
    assert not (tmp_path / ".broken.work").exists()

    files = sorted(path.name for path in (tmp_path / "unbroken").glob("*.safetensors"))
    assert files == ["base.safetensors", "fusion-1.safetensors", "step-1.safetensors"]
    for name in files:
        assert (tmp_path / "unbroken" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes(), name
    one, other = (api.load(tmp_path / name).saved for name in ("unbroken", "broken"))
    assert one.step_points[0].frontier == other.step_points[0].frontier
    assert one.step_points[0].point == other.step_points[0].point
    assert one.step_points[0].goal == other.step_points[0].goal
    assert one.history[-1]["losses"] == other.history[-1]["losses"]
    assert len(one.history[-1]["losses"]) == 30


def test_frontiers_survive_plain_data(extended: api.Model) -> None:
    frontier = extended.frontier
    again = Frontier.from_dict(frontier.to_dict())
    assert np.array_equal(again.settings, frontier.settings)
    assert all(np.array_equal(again.accuracies[m], frontier.accuracies[m], equal_nan=True) for m in frontier.accuracies)


def test_joined_tables_of_different_sources_extend_too(base: api.Model, train: Samples, val: Samples) -> None:
    halves = [train.of_classes(NEW[:1]), val.of_classes(NEW[1:])]
    grown = base.extend(concatenate(halves), memory=exemplars(train), epochs=1, views=1)
    assert grown.classes == (*BASE, *NEW)
