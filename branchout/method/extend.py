"""The pipeline: stage I → features → stage II → the frontier → a choice, measured on images that chose nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from branchout.data import memory as memory_rules
from branchout.data.images import Images, open_images
from branchout.data.samples import Samples, concatenate
from branchout.errors import BranchoutError
from branchout.labels import LabelSpace
from branchout.method import frontier as frontiers
from branchout.method.config import ExtendConfig
from branchout.method.features import extract
from branchout.method.frontier import Frontier
from branchout.method.pseudo import pseudo_exemplars
from branchout.method.recipes import Recipe, recipe_named
from branchout.method.stage1 import Labelled, train_branch
from branchout.method.stage2 import Fused, fuse, fusion_data, grid_answers, problem_of
from branchout.metrics import PAPER_GOALS, accuracies
from branchout.model.checkpoint import Deltas, Fusion
from branchout.model.classifier import Classifier, Step
from branchout.training.loop import Event, Report, silent

VIEWS = {"cuda": 15, "cpu": 4}
"""Cached views in stage I: more cost memory and the time to make them, fewer cost accuracy."""
HELD_OUT = 0.2
"""Share of each class held out when no validation images are given."""


@dataclass(frozen=True)
class DataSplit:
    """The images of an extension, divided so that what trains, what chooses and what reports are never the same."""

    new: Samples
    memory: Samples | None
    dev: Samples
    test: Samples
    measured: str
    """Where base accuracy comes from: `dev` images given, `held-out` ones, `pseudo` if most old classes have none."""


@dataclass(frozen=True)
class Outcome:
    """What an extension made."""

    model: Classifier
    step: Step
    fusion: Fusion
    measured: dict[str, Any] | None
    """Before and after on the test images, and each goal's point; None where there are too few images to report."""
    losses: list[float]
    seconds: dict[str, float]


def divide(model: Classifier, new: Samples, memory: Samples | None, val: Samples | None, seed: int) -> DataSplit:
    """Validation images are halved into dev and test; without any, some of the new and kept images are held out."""
    known = set(model.space.classes)
    if memory is not None:
        strangers = sorted(set(memory.classes) - known)
        if strangers:
            raise BranchoutError(
                f"--memory holds classes the base does not know: {_listed(strangers)}. It must hold old images, in "
                f"folders named as the base's {len(known):,} classes; new classes belong into the first folder"
            )
    rng = np.random.default_rng(seed)
    if val is not None:
        strangers = sorted(set(val.classes) - known - set(new.classes))
        if strangers:
            raise BranchoutError(f"--val holds classes that are neither old nor new: {_listed(strangers)}")
        if not set(val.classes) & set(new.classes):
            raise BranchoutError("--val holds no image of the new classes; add some, or leave --val out")
        held = val
    else:
        new, held = _hold_out(new, rng)
        if not len(held):
            raise BranchoutError(
                "there are too few new images to hold any out: no class has three. Add images, or give some with --val"
            )
    measured = "held-out" if val is None else "dev"
    old = known - set(new.classes) or known  # where all old classes get a new look, they are measured by it
    if memory is not None and (val is None or not set(held.classes) & old):
        memory, kept_back = _hold_out(memory, rng)
        held = concatenate([held, kept_back]) if len(kept_back) else held
        measured = "held-out"
    covered = len(set(held.classes) & old)
    # Images held out of a few old classes say little about all of them; whoever gives --val knows what is in it.
    if not covered or (measured == "held-out" and 2 * covered < len(old)):
        measured = "pseudo"
    # New and old are halved apart, each beginning with dev: what chooses must see both.
    is_new = np.isin(held.names, list(new.classes))
    first = np.zeros(len(held), dtype=bool)
    for part in (np.flatnonzero(is_new), np.flatnonzero(~is_new)):
        first[part] = _half(held.labels[part], rng)
    step = len(model.steps) + 1
    if memory is not None:
        # Samples that know where they came from keep it; those of a folder belong to the branch that first knew them.
        owners = {name: d for d in reversed(range(step)) for name in model.space.branches[d]}
        by_class = np.array([owners[name] for name in memory.classes])[memory.labels]
        told = (memory.origin >= 0) & (memory.origin < step)
        memory = memory.placed(np.where(told, memory.origin, by_class))
    return DataSplit(new.placed(step), memory, held.select(first), held.select(~first), measured)


def _hold_out(samples: Samples, rng: np.random.Generator) -> tuple[Samples, Samples]:
    """A fifth of each class, at least one image where three or more are there."""
    back = np.zeros(len(samples), dtype=bool)
    for label in range(len(samples.classes)):
        members = rng.permutation(np.flatnonzero(samples.labels == label))
        count = max(1, round(HELD_OUT * len(members))) if len(members) >= 3 else 0
        back[members[:count]] = True
    return samples.select(~back), samples.select(back)


def _half(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A mask of half the images of each class; odd ones fall to either side in turn, first to the one marked."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    mask = np.zeros(len(labels), dtype=bool)
    mask[order[::2]] = True
    return mask


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class Extension:
    """One run of the pipeline. Its methods are the steps, in order; everything frozen is computed once."""

    def __init__(
        self,
        base: Classifier,
        material: DataSplit,
        request: ExtendConfig,
        *,
        device: torch.device,
        work: Path | None = None,
        cache: Path | None = None,
        images: Callable[[Samples], Images] | None = None,
        report: Report = silent,
    ) -> None:
        self.base = base.to(device)
        self.material = material
        self.request = request
        self.device = device
        self.work = work
        self.cache = cache
        self.images = images or (lambda samples: open_images(samples, base.preprocessing, device, cache=cache))
        self.report = report
        self.space: LabelSpace = base.space.extend(material.new.classes)
        self.recipe = self._recipe()

    def _recipe(self) -> Recipe:
        recipe = recipe_named(self.request.recipe)
        if self.request.epochs is None:
            return recipe
        optimisation = replace(recipe.stage_one.optimisation, epochs=self.request.epochs)
        return replace(recipe, stage_one=replace(recipe.stage_one, optimisation=optimisation))

    def run(self) -> Outcome:
        clock = time.perf_counter
        start = clock()
        step, losses = self.train_branch()
        learned = clock()
        model = self.base.extended(step).to(self.device)
        fused = self.fuse(model) if self.fuses() else None
        joined = clock()
        fusion, points = self.choose(model, fused)
        apply_fusion(model, fusion)
        measured = self.measure(model, fusion, points)
        seconds = {"stage1": learned - start, "fusion": joined - learned, "choice": clock() - joined}
        return Outcome(model, step, fusion, measured, losses, seconds)

    # Stage I.

    def labelled(self, samples: Samples) -> Labelled:
        return Labelled(self.images(samples), self.labels(samples))

    def labels(self, samples: Samples) -> np.ndarray:
        """Class numbers of the label space after this step."""
        return self.space.index(samples.classes)[samples.labels]

    def train_branch(self) -> tuple[Step, list[float]]:
        views = self.request.views
        if views is None:
            views = VIEWS.get(self.device.type, 4)
        memory = self.material.memory
        return train_branch(
            self.base,
            self.material.new.classes,
            self.labelled(self.material.new),
            self.recipe.stage_one,
            exemplars=self.labelled(memory) if memory is not None else None,
            where=self.request.branch,
            seed=self.request.seed,
            views=views,
            device=self.device,
            checkpoint=self.work / "branch.safetensors" if self.work else None,
            report=self.report,
        )

    # Stage II.

    def fuses(self) -> bool:
        """Always in the paper's recipes; in ours if classes overlap, if most old classes lack images, or once begun."""
        unseen = self.material.measured == "pseudo" or self.material.memory is None
        # Branches that were balanced by deltas speak at other volumes without them.
        unseen = unseen or any(delta is not None for delta in self.base.fused.deltas)
        return self.recipe.stage_two.when == "always" or self.request.fuse or unseen or bool(self.space.overlap)

    def features(self, model: Classifier, samples: Samples, views: int = 0) -> Tensor:
        return extract(
            model,
            self.images(samples),
            views=views,
            seed=self.request.seed,
            device=self.device,
            cache=self.cache,
            fingerprint=samples.fingerprint(),
            report=self.report,
        )

    def fuse(self, model: Classifier) -> Fused:
        settings = self.recipe.stage_two
        kept = memory_rules.keep(self.material.new, per_class=self.request.exemplars, seed=self.request.seed)
        memory = self.material.memory
        seen = kept if memory is None else concatenate([memory, kept])
        features = self.features(model, seen, settings.views)
        labels = torch.from_numpy(self.labels(seen)).to(self.device)
        origin = torch.from_numpy(seen.origin).to(self.device)
        made, made_labels, made_origin = self.pseudo(model, self.request.seed, labels)
        if len(made):
            features = torch.cat([made.expand(len(features), *made.shape), features], dim=1)
            labels, origin = torch.cat([made_labels, labels]), torch.cat([made_origin, origin])
        data = fusion_data(model, features, labels, origin)
        total = settings.optimisation.epochs
        return fuse(
            problem_of(model),
            [data],
            settings,
            seed=self.request.seed,
            per_class=self.request.exemplars,
            on_epoch=lambda done, of: self.report(Event("fuse", done, max(of, total))),
        )

    # The choice.

    def choose(self, model: Classifier, fused: Fused | None) -> tuple[Fusion, Frontier]:
        """The frontier on dev images, and the goal's point on it."""
        features, labels = self.dev(model)
        beaten: dict[str, Any] = {}
        if self.recipe.dial or fused is None:
            deltas = [] if fused is None else [_on_cpu(fused.at(0, 0))]
            model.fused.deltas = list(deltas[0]) if deltas else [None] * len(model.fused.heads)
            with torch.no_grad():
                columns = model.fused.columns(features.unbind(1)).double().cpu().numpy()
            pooler = model.fused.pooler.kind
            shifts: tuple[float, ...] = ()
            if len(model.steps) > 1:
                shifts = tuple(frontiers.step_shifts(columns, labels, self.space, pooler).tolist())
                columns = frontiers.shifted(columns, self.space, shifts)
            curve = frontiers.dial_frontier(
                columns, labels, self.space, pooler, balanced_by=self.recipe.balanced, measured=self.material.measured
            )
            points = curve.select(curve.pareto())  # no goal would pick another
        else:
            answers = grid_answers(model, features, fused, 0).cpu().numpy()
            whole = frontiers.grid_frontier(answers, labels, self.space, fused.grid, self.recipe.balanced)
            kept = whole.pareto()
            points = replace(whole.select(kept), measured=self.material.measured)
            deltas = [_on_cpu(fused.at(0, int(n))) for n in kept]
            shifts = ()
            # For looking at only: nobody will want to move there, so their deltas are not kept.
            beaten["beaten"] = whole.select(np.setdiff1d(np.arange(len(whole)), kept)).to_dict()
        point = points.choose(self.request.goal)
        return Fusion(points.to_dict() | beaten, deltas, point, self.request.goal, shifts), points

    def dev(self, model: Classifier) -> tuple[Tensor, np.ndarray]:
        """Features and labels of the dev images, with made-up ones of the old classes if there are none."""
        features = self.features(model, self.material.dev)[0]
        labels = self.labels(self.material.dev)
        if self.material.measured != "pseudo":
            return features, labels
        # Another seed than stage II's: what trained must not choose.
        made, made_labels, _ = self.pseudo(model, self.request.seed + 1, torch.from_numpy(labels).to(self.device))
        return torch.cat([made, features]), np.concatenate([made_labels.cpu().numpy(), labels])

    def pseudo(self, model: Classifier, seed: int, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Made-up exemplars of the old classes that have no image among those `seen`: features, labels and origins."""
        old = torch.from_numpy(self.space.index(self.base.space.classes)).to(self.device)
        if torch.isin(old, seen).all():
            return torch.empty(0), torch.empty(0), torch.empty(0)
        new = self.material.new
        fresh = self.material.dev.of_classes(new.classes)
        tables = [
            (self.features(model, part)[0], torch.from_numpy(self.labels(part)).to(self.device))
            for part in (new, fresh if len(fresh) else new)
        ]
        made, labels, origin = pseudo_exemplars(model, tables[0], tables[1], self.request.exemplars, seed)
        unseen = ~torch.isin(labels, seen)
        return made[unseen], labels[unseen], origin[unseen]

    def measure(self, model: Classifier, fusion: Fusion, points: Frontier) -> dict[str, Any] | None:
        """Before and after on the test images, at the chosen point and at the point of every plain goal."""
        test = self.material.test
        if not len(test):
            return None
        features = self.features(model, test)[0]
        labels = self.labels(test)
        after = accuracies(_answers(model, features), labels, self.space)
        measured: dict[str, Any] = {"images": len(test), "after": asdict(after), "before": {}, "goals": {}}
        old = test.of_classes(self.base.space.classes)
        if len(old):
            before = accuracies(_answers(self.base, self.features(self.base, old)[0]), self.labels(old), self.space)
            measured["before"] = asdict(before)
        for goal in PAPER_GOALS:
            point = points.choose(goal)
            apply_fusion(model, replace(fusion, point=point))
            scored = asdict(accuracies(_answers(model, features), labels, self.space))
            measured["goals"][goal] = {"point": point, **scored}
        apply_fusion(model, fusion)
        return measured


def apply_fusion(model: Classifier, fusion: Fusion) -> None:
    """Set a model's deltas and dial to a fusion's chosen point."""
    deltas = fusion.chosen_deltas()
    model.fused.deltas = [None] * len(model.fused.heads) if deltas is None else list(deltas)
    model.fused.set_bias(fusion.offsets(len(model.steps)))


@torch.no_grad()
def _answers(model: Classifier, features: Tensor) -> np.ndarray:
    answers: np.ndarray = model.fused(features.unbind(1)).argmax(1).cpu().numpy()
    return answers


def _on_cpu(deltas: list[Tensor]) -> Deltas:
    return [delta.cpu().contiguous() for delta in deltas]
