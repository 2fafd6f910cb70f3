"""Stage I: what trains and what does not, and the loss against one computed class by class."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import BASE, CPU, LATER, NEW, SIZES, exemplars, fixed_batch, same, snapshot, untrained
from stage1_case import labelled, settings_of
from torch import Tensor, nn

from branchout import api
from branchout.data import augment
from branchout.data.images import in_order, open_images, shuffled
from branchout.data.samples import Samples
from branchout.method import new_branch, stage1
from branchout.method.frozen import Frozen
from branchout.method.recipes import BRANCHOUT, PAPER, Stage1
from branchout.method.stage1 import batch_sizes, train_branch
from branchout.model.classifier import Classifier, Step
from branchout.model.staged import branch_point
from branchout.training.loop import seed_for
from branchout.training.optimisation import scale_to_dataset

PLACES = ("last", "layer3", "layer4.0.conv2", "fc")


# What trains.


@pytest.mark.parametrize("recipe", [PAPER.stage_one, BRANCHOUT.stage_one], ids=["paper", "branchout"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("start", ["base", "after a step"])
def test_only_the_branch_and_the_new_head_train(
    recipe: Stage1, where: str, start: str, models: dict[str, Classifier], train: Samples
) -> None:
    model = models[start]
    before = snapshot(model)
    assert any("running_mean" in key for key in before)
    assert any("fused.heads.0" in key for key in before)
    torch.manual_seed(0)
    new = labelled(model, LATER, train.of_classes(LATER))
    old = labelled(model, LATER, exemplars(train))
    step, _ = train_branch(
        model, LATER, new, settings_of(recipe, epochs=1), exemplars=old, where=where, device=CPU, seed=3
    )
    assert same(snapshot(model), before)

    fresh = new_branch.Branch.clone(model.backbone, branch_point(model.backbone, where))
    unchanged, moved = fresh.own_state_dict(), step.branch.own_state_dict()
    assert all(not torch.equal(unchanged[key], moved[key]) for key in unchanged)
    shared = {key for key in step.branch.state_dict() if key not in moved}
    place = model.backbone.state_dict()
    assert all(torch.equal(step.branch.state_dict()[key], place[key]) for key in shared)
    if where == "fc":
        assert list(step.branch.parameters()) == []
        assert step.branch.state_dict() == {}
    if where == "layer4.0.conv2":
        assert {key.rsplit(".", 1)[0] for key in moved} == {"layer4.0.conv2", "layer4.0.bn2"}
        assert shared


def test_a_branch_that_clones_nothing_trains_its_head(models: dict[str, Classifier], train: Samples) -> None:
    model = models["base"]
    new = labelled(model, NEW, train.of_classes(NEW))
    heads = []
    for lr in (0.0, 0.1):
        settings = settings_of(PAPER.stage_one, lr=lr, weight_decay=0.0)
        step, losses = train_branch(model, NEW, new, settings, where="fc", device=CPU)
        heads.append(step.head.weight.detach().clone())
    assert (heads[0] - heads[1]).abs().min(1).values.max() > 0  # rows of all classes moved
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(*heads, strict=True))
    grown = model.extended(step)
    assert len(grown.features(torch.zeros(1, 1, 32, 32))) == 1
    assert grown.parameter_counts()["step 1"] == 0
    assert losses[-1] < losses[0] + 0.1


def test_stage_one_learns(base: api.Model, train: Samples) -> None:
    model = base.saved.model()
    settings = settings_of(PAPER.stage_one, epochs=60, lr=0.5, schedule="cosine")
    step, losses = train_branch(model, NEW, labelled(model, NEW, train.of_classes(NEW)), settings, views=4, device=CPU)
    assert losses[-1] < 0.7 * losses[0]
    test = train.of_classes(NEW)
    step.branch.freeze()
    grown = model.extended(step)
    with torch.no_grad():
        pictures = torch.cat(list(open_images(test, SIZES, CPU).plain(in_order(len(test), 50))))
        own = grown.fused.frozen_columns(grown.features(pictures))[:, len(BASE) :]
    assert (own.argmax(1).numpy() == test.labels).mean() > 0.6


def test_the_seed_decides(models: dict[str, Classifier], train: Samples) -> None:
    model = models["base"]
    new, old = labelled(model, NEW, train.of_classes(NEW)), labelled(model, NEW, exemplars(train))
    runs = []
    for seed in (1, 1, 2):
        step, losses = train_branch(
            model, NEW, new, settings_of(BRANCHOUT.stage_one), exemplars=old, seed=seed, device=CPU
        )
        runs.append((losses, snapshot(step.branch) | snapshot(step.head)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


@pytest.mark.parametrize(
    ("start", "recipe", "where", "remembers", "corrects"),
    [
        ("base", BRANCHOUT.stage_one, "last", True, False),
        ("after a step", BRANCHOUT.stage_one, "last", True, True),
        ("after a step", BRANCHOUT.stage_one, "fc", True, False),
        ("after a step", BRANCHOUT.stage_one, "last", False, False),
        ("after a step", replace(BRANCHOUT.stage_one, corrections_after=None), "last", True, False),
        ("after a step", PAPER.stage_one, "last", True, False),
        ("after a step, linear", BRANCHOUT.stage_one, "last", True, False),
    ],
    ids=["first step", "second step", "head alone", "no exemplars", "never", "paper", "linear"],
)
def test_branches_of_later_steps_learn_to_correct_earlier_logits(
    start: str,
    recipe: Stage1,
    where: str,
    remembers: bool,
    corrects: bool,
    models: dict[str, Classifier],
    train: Samples,
) -> None:
    model = models[start]
    new = labelled(model, LATER, train.of_classes(LATER))
    old = labelled(model, LATER, exemplars(train, model.space.classes, 4)) if remembers else None
    step, _ = train_branch(model, LATER, new, settings_of(recipe, epochs=1), exemplars=old, where=where, device=CPU)
    assert (step.correction is not None) == corrects
    if corrects:  # not where it would be larger than the branch
        columns = step.branch.parameter_count // model.backbone.features
        for many in (columns, columns + 1):
            wide = untrained([f"{n}" for n in range(many - len(NEW))], NEW)
            assert new_branch.learns_correction(wide, step.branch, recipe) == (many == columns)
    if step.correction is not None:
        assert step.correction.weight.shape == (model.backbone.features, model.space.columns)
        assert step.correction.weight.any(0).all()  # every earlier logit is corrected


# The loss.


def test_corrections_enter_the_cross_entropies_and_not_the_distillation(models: dict[str, Classifier]) -> None:
    model = models["after a step"]
    made = new_branch.initial_branch(
        model, LATER, None, "last", settings=BRANCHOUT.stage_one, exemplars=True, seed=0, device=CPU
    ).eval()  # type: ignore[arg-type]
    frozen = Frozen(model, model.steps[0].start, BRANCHOUT.stage_one, device=CPU)
    x, z = frozen(fixed_batch(6))
    space = model.space.extend(LATER)
    y = torch.from_numpy(space.index([*LATER[:2], BASE[0], BASE[3], NEW[0], NEW[1]]))
    assert made.correction is not None
    nn.init.normal_(made.correction.weight)
    with torch.no_grad():
        loss = stage1.stage1_loss(stage1.Batch(x, z, y, 2), made, BRANCHOUT.stage_one)
        h = made.features(x)
        u = torch.stack([4 * v / v.norm() for v in h])
        columns = torch.cat([z + u @ made.correction.weight, made.head(h)], dim=1)
        expected = sum(nll(columns[i], int(y[i])) for i in range(2)) / 2
        expected += sum(nll(columns[i], int(y[i])) for i in range(2, 6)) / 4
        for teacher, student in zip(z, made.copied_logits(h), strict=True):
            p, q = (teacher / 2).softmax(0), (student / 2).softmax(0)
            expected += 2**2 * (p * (p.log() - q.log())).sum() / len(z)
    assert loss.item() == pytest.approx(float(expected), rel=1e-5)


def cosine_logits(h: Tensor, rows: Tensor) -> Tensor:
    """16·cos, pair by pair."""
    return torch.stack([torch.stack([16 * (v @ r) / (v.norm() * r.norm()) for r in rows]) for v in h])


def nll(logits: Tensor, target: int) -> Tensor:
    return logits.exp().sum().log() - logits[target]


def slow_loss(
    model: Classifier, step: Step, names: tuple[str, ...], pictures: Tensor, labels: list[int], new: int, recipe: str
) -> float:
    """The loss of one batch (`new` new pictures, then exemplars), straight from its definition, in eval-mode trunk."""
    space = model.space.extend(names)
    end = len(model.backbone.names)
    clone = nn.Sequential(*copy.deepcopy(model.backbone._stages()[step.start :])).train()
    with torch.no_grad():
        trunk = model.backbone.run(pictures, 0, step.start)
        branched = [earlier for earlier in model.steps if earlier.start < end]
        features = [model.backbone.run(pictures)]
        features += [earlier.branch(model.backbone.run(pictures, 0, earlier.start)) for earlier in branched]
        heads = [head.weight for head in model.fused.heads]
        frozen = torch.cat(
            [cosine_logits(features[f], w) for f, w in zip(model.fused.feature_of, heads, strict=True)], dim=1
        )
        h = clone(trunk)
        own = cosine_logits(h, step.head.weight)
        if recipe == "paper":
            return float(sum(nll(own[i], names.index(space.classes[labels[i]])) for i in range(new)) / new)
        total = torch.zeros(())
        if len(pictures) > new:
            columns = torch.cat([frozen, own], dim=1)
            each = []
            for i, row in enumerate(columns):
                owners = space.class_of_column.tolist()
                if i < new:  # must win in the new branch; an old column of the same class does not compete
                    mine = frozen.shape[1] + names.index(space.classes[labels[i]])
                    rivals = [c for c, o in enumerate(owners) if c == mine or o != labels[i]]
                    each.append(nll(row[rivals], rivals.index(mine)))
                    continue
                best = [max(row[c] for c, o in enumerate(owners) if o == k) for k in range(len(space.classes))]
                each.append(nll(torch.stack(best), labels[i]))
            total = sum(each[:new]) / new + sum(each[new:]) / (len(each) - new)
        else:
            total = sum(nll(own[i], names.index(space.classes[labels[i]])) for i in range(new)) / new
        mine = torch.cat([cosine_logits(h, w) for w in heads], dim=1)
        divergence = torch.zeros(())
        for teacher, student in zip(frozen, mine, strict=True):
            p, q = (teacher / 2).softmax(0), (student / 2).softmax(0)
            divergence = divergence + (p * (p.log() - q.log())).sum()
        return float(total + 2**2 * divergence / len(pictures))


@pytest.mark.parametrize(
    ("recipe", "remembers"),
    [("paper", True), ("branchout", True), ("branchout", False)],
    ids=["paper", "replay", "replay without memory"],
)
@pytest.mark.parametrize(
    ("start", "names"),
    [
        ("base", LATER),
        ("base", (BASE[1], *LATER[:2], BASE[6])),
        ("after a step", (LATER[0], NEW[1], BASE[2])),
        ("after an fc step", LATER),
    ],
    ids=["disjoint", "overlapping", "second step", "after fc"],
)
def test_loss_is_the_written_out_one(
    recipe: str, remembers: bool, start: str, names: tuple[str, ...], models: dict[str, Classifier], train: Samples
) -> None:
    model, seed = models[start], 11
    names = tuple(sorted(names))  # as sample tables have them
    new = labelled(model, names, train.of_classes(names))
    old = labelled(model, names, exemplars(train, model.space.classes, 4)) if remembers else None
    stage = {"paper": PAPER, "branchout": BRANCHOUT}[recipe].stage_one
    still = settings_of(stage, epochs=1, lr=0.0)
    step, losses = train_branch(model, names, new, still, exemplars=old, seed=seed, device=CPU)

    size = scale_to_dataset(still.optimisation, len(new.labels)).batch
    order = shuffled(len(new.labels), size, seed_for(seed, 0, 0), drop_last=True)
    views = augment.for_kind("glyph", 32)
    parts = [list(new.images.views(order, views, seed_for(seed, 0, 2)))]
    labels = [[new.labels[i] for i in order]]
    if recipe == "branchout" and old is not None:
        drawn = stage1.draws(len(old.labels), size, len(order), seed_for(seed, 0, 1))
        parts.append(list(old.images.views(drawn, views, seed_for(seed, 0, 3))))
        labels.append([old.labels[i] for i in drawn])
    expected = [
        slow_loss(
            model,
            step,
            names,
            torch.cat([part[n] for part in parts]),
            np.concatenate([part[n] for part in labels]).tolist(),
            size,
            recipe,
        )
        for n in range(len(order))
    ]
    assert len(order) > 1
    assert losses == [pytest.approx(np.mean(expected), rel=2e-4)]


def test_a_batch_has_more_exemplars_where_new_images_are_few() -> None:
    assert batch_sizes([1224, 1600], 122, 1.0, 1 / 3, 256) == [122, 122]
    assert batch_sizes([120, 1900], 16, 1.0, 1 / 3, 256) == [16, 91]  # 7 steps draw a third of 1,900
    assert batch_sizes([120, 1900], 16, 1.0, 1 / 3, 64) == [16, 64]
    assert batch_sizes([120, 1900], 16, 0.5, 0.0, 256) == [16, 8]
    assert batch_sizes([120], 16, 1.0, 1 / 3, 256) == [16]
    assert batch_sizes([3, 1], 3, 0.1, 0.0, 256) == [3, 1]


def test_exemplars_are_drawn_evenly() -> None:
    drawn = stage1.draws(7, 5, 6, 0)
    assert [len(batch) for batch in drawn] == [5] * 6
    counts = np.bincount(np.concatenate(drawn), minlength=7)
    assert counts.max() - counts.min() <= 1


# Cached views.


@pytest.mark.parametrize("compressed", [False, True])
def test_held_out_maps_are_compressed_where_that_is_asked_for(compressed: bool, train: Samples) -> None:
    model = untrained(BASE)
    new, old = labelled(model, NEW, train.of_classes(NEW)), labelled(model, NEW, exemplars(train))
    settings = BRANCHOUT.stage_one
    start = new_branch.initial_branch(model, NEW, new, "last", settings=settings, seed=0, device=CPU)
    frozen = Frozen(model, branch_point(model.backbone, "last").start, settings, device=CPU)
    held_out = stage1.HeldOut(start, frozen, new, old, compressed=compressed)
    assert held_out.batch.x.dtype == (torch.int8 if compressed else torch.float32)
    assert held_out.batch.z.dtype == torch.float32  # logits are kept in full
    exact = stage1.HeldOut(start, frozen, new, old, compressed=False)()
    assert held_out() == pytest.approx(exact, rel=1e-2)


def test_a_finished_stage_one_is_read_back_without_running_the_trunk(
    models: dict[str, Classifier], train: Samples, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, settings = models["base"], settings_of(BRANCHOUT.stage_one)
    new, old = labelled(model, NEW, train.of_classes(NEW)), labelled(model, NEW, exemplars(train))
    calls = []
    run = Frozen.__call__
    monkeypatch.setattr(Frozen, "__call__", lambda frozen, images: (calls.append(len(images)), run(frozen, images))[1])
    results = []
    for _ in range(2):
        step, losses = train_branch(
            model, NEW, new, settings, exemplars=old, views=2, device=CPU, checkpoint=tmp_path / "c.safetensors"
        )
        results.append((losses, snapshot(step.branch) | snapshot(step.head), len(calls)))
        calls.clear()
    assert results[0][2] > 0
    assert results[1][2] == 0
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


# Linear heads.
