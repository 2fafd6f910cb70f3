"""The pipeline: stage I → features → stage II → frontier → choice → measurement (paper, section 3.3).

Symbols: M_b → `base` · D_n, E → `split` · Φ_n, W_n → `Step` · W_dd' → `TrainedDeltas` · α, β or b → `Frontier`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from branchout.data import memory as memory_rules
from branchout.data.images import Images
from branchout.data.samples import Samples, concatenate
from branchout.labels import LabelSpace
from branchout.method.choose import apply_point, balanced_biases, choose_point, cross_fit, measure_goals
from branchout.method.class_means import choose_share, class_means
from branchout.method.config import ExtendConfig
from branchout.method.features import predictions
from branchout.method.frontier import Frontier
from branchout.method.head_only import train_head
from branchout.method.recipes import MEANS_IMAGES, MEANS_SHARE, recipe_named
from branchout.method.results import Extended, Measured
from branchout.method.running.effort import Plan, trains_head_alone, usual_effort
from branchout.method.running.engine import use_engine
from branchout.method.score_fusion import head_layout, stage2_data
from branchout.method.split import DataSplit
from branchout.method.stage1 import train_branch
from branchout.method.stage2 import TrainedDeltas, train_grid
from branchout.method.step_data import StepImages
from branchout.metrics import Accuracies, accuracies
from branchout.model.checkpoint import StepPoints
from branchout.model.class_means import ClassMeans
from branchout.model.classifier import Classifier, Step
from branchout.model.staged import branch_point
from branchout.training import processes
from branchout.training.device import give_back_memory
from branchout.training.loop import Event, OnProgress, silent


class Extension(StepImages):
    """The whole method, for one step. Its methods are the steps, in order; everything frozen is computed once."""

    def __init__(
        self,
        base: Classifier,
        split: DataSplit,
        config: ExtendConfig,
        *,
        device: torch.device,
        plan: Plan | None = None,
        work: Path | None = None,
        cache: Path | None = None,
        images: Callable[[Samples], Images] | None = None,
        earlier_biases: Sequence[float] | None = None,
        on_progress: OnProgress = silent,
    ) -> None:
        """`plan` replaces the branch of `config` and what this device is usually given.

        `work` is a folder for checkpoints, from which a run that was stopped resumes, `cache` one for features;
        `images` opens samples in another way. `earlier_biases` are those of the base's steps at its point for
        `balanced`, by default those that it has now: a point chosen for another goal says nothing about where steps
        belong.
        """
        super().__init__(base, split, config, device=device, cache=cache, images=images, on_progress=on_progress)
        self.work = work
        self.earlier_biases = base.fused.bias[1:].tolist() if earlier_biases is None else earlier_biases
        replay = recipe_named(config.recipe).stage_one.replay
        self.plan = plan or Plan(config.where, usual_effort(base, config.where, device, replay=replay))
        self.recipe = config.full_recipe(self.plan.effort.epochs, self.plan.effort.batch)

    def run(self) -> Extended:
        engine = use_engine(self.base, self.plan.engine, [branch_point(self.base.backbone, self.plan.branch).start])
        try:
            return replace(self.run_stages(), engine=engine)
        finally:
            self.base.engine = None

    def run_stages(self) -> Extended:
        times = [time.perf_counter()]
        step, losses = self.train_branch()
        give_back_memory()
        times.append(time.perf_counter())
        model = self.base.extended(step).to(self.device)
        model.engine = self.base.engine
        trained = self.train_deltas(model) if self.needs_deltas() else None
        times.append(time.perf_counter())
        if self.needs_class_means():
            model, points, measured = self.choose_with_class_means(model, step, trained)
        else:
            points, measured = self.choose_and_measure(model, trained)
        apply_point(model, points)
        times.append(time.perf_counter())
        seconds = dict(zip(("stage1", "fusion", "choice"), np.diff(times).tolist(), strict=True))
        model.engine = None
        return Extended(model, points, measured, losses, seconds)

    def train_branch(self) -> tuple[Step, list[float]]:
        """Stage I."""
        split, effort, views = self.split, self.plan.effort, self.config.views
        exemplars = None if split.memory is None else self.labelled(split.memory)
        sources = (self.base, split.new.classes, self.labelled(split.new), self.recipe.stage_one)
        replay = self.recipe.stage_one.replay
        if replay and trains_head_alone(self.base, self.plan.branch):
            return train_head(
                *sources,
                exemplars=exemplars,
                seed=self.config.seed,
                views=effort.views,
                exemplar_views=effort.exemplar_views,
                cache_limit=self.config.memory_bytes,
                device=self.device,
                on_progress=self.on_progress,
            )
        return train_branch(
            *sources,
            exemplars=exemplars,
            where=self.plan.branch,
            seed=self.config.seed,
            views=effort.views if views is None else views,
            exemplar_views=effort.exemplar_views if replay else None,
            exemplar_share=effort.exemplar_share if replay else 1.0,
            cache_limit=self.config.memory_bytes,
            compressed=effort.compressed,
            held_out=self.held_out() if effort.stops else None,
            device=self.device,
            checkpoint=self.work / "branch.safetensors" if self.work else None,
            on_progress=self.on_progress,
        )

    def needs_deltas(self) -> bool:
        return needs_deltas(self.base, self.space, self.split, self.config)

    def train_deltas(self, model: Classifier) -> TrainedDeltas:
        """Stage II, on exemplars of all classes; pseudo-exemplars stand for old classes without images."""
        settings, config = self.recipe.stage_two, self.config
        kept = memory_rules.keep(self.split.new, per_class=config.exemplars, seed=config.seed)
        seen = kept if self.split.memory is None else concatenate([self.split.memory, kept])
        features = self.features(model, seen, settings.views)
        labels, origin = self.on_device(seen), torch.from_numpy(seen.origin).to(self.device)
        made = self.pseudo(model, config.seed, labels)
        if len(made.labels):
            features = torch.cat([made.features.expand(len(features), *made.features.shape), features], dim=1)
            labels, origin = torch.cat([made.labels, labels]), torch.cat([made.origin, origin])
        return train_grid(
            head_layout(model),
            [stage2_data(model, features, labels, origin)],
            settings,
            seed=config.seed,
            per_class=config.exemplars,
            memory_limit=config.memory_bytes,
            on_epoch=lambda done, total: self.on_progress(Event("Training the deltas", done, total)),
        )

    def needs_class_means(self) -> bool:
        """Where the head is linear and every class of earlier steps has images. With average pooling, a class that
        several branches know would get another logit, although the largest new one stays."""
        known = {*self.split.new.classes, *(() if self.split.memory is None else self.split.memory.classes)}
        averaged = self.base.fused.pooler.kind == "average" and len(self.space.overlap) > 0
        linear = isinstance(self.base.base_head, nn.Linear) and self.recipe.stage_one.replay
        return linear and not averaged and set(self.added()) <= known

    def added(self) -> list[str]:
        """The classes of earlier steps."""
        return [name for step in self.base.steps for name in step.names]

    def choose_with_class_means(
        self, model: Classifier, step: Step, trained: TrainedDeltas | None
    ) -> tuple[Classifier, StepPoints, Measured | None]:
        """The model with class means, its operating point and accuracies.

        The point for `balanced` is found without class means and stays. Images that were held out choose and measure
        first. Then they are added to the means: with a handful of images of each class, a fifth more counts.
        """
        balanced, _ = self.choose_and_measure(model, trained, goal="balanced")
        apply_point(model, balanced)
        biases = balanced_biases(balanced, len(model.steps))
        seen = [self.features_of_new(model, part) for part in (self.split.new, self.split.memory) if part is not None]
        means = class_means(model, *_joined(seen), biases)
        share = 0.0 if means is None else processes.from_main(self.share(model, means))
        if means is None or not share:
            return model, *self.choose_and_measure(model, trained)

        def with_means(means: ClassMeans) -> Classifier:
            made = self.base.extended(replace(step, class_means=means.at(share))).to(self.device)
            made.engine = self.base.engine
            return made

        points, measured = self.choose_and_measure(with_means(means), trained, biases)
        if self.split.held_out_images:
            seen += [self.features_of_new(model, part) for part in self.split.held_out_images]
            means = class_means(model, *_joined(seen), biases) or means
        return with_means(means), points, measured

    def features_of_new(self, model: Classifier, samples: Samples) -> tuple[Tensor, Tensor]:
        """Features and labels of the images of new classes, of this step and of earlier ones; some of each class."""
        samples = samples.of_classes([*self.split.new.classes, *self.added()])
        samples = memory_rules.keep(samples, per_class=MEANS_IMAGES, seed=self.config.seed) if len(samples) else samples
        return self.features(model, samples)[0] if len(samples) else torch.empty(0), self.on_device(samples)

    def share(self, model: Classifier, means: ClassMeans) -> float:
        """How much the class means count. The test half has no say where dev images also ended the training."""
        both = self.split.held_out_images and not self.plan.effort.stops
        held = concatenate([self.split.dev, self.split.test]) if both else self.split.dev
        held = held.of_classes(self.split.new.classes)
        if not len(held):
            return MEANS_SHARE
        return choose_share(means, model, self.features(model, held)[0], self.on_device(held))

    def choose_and_measure(
        self,
        model: Classifier,
        trained: TrainedDeltas | None,
        biases: list[float] | None = None,
        goal: str | None = None,
    ) -> tuple[StepPoints, Measured | None]:
        """The operating point, and its accuracies. With `biases`, those of all steps at the balanced point are known.

        Validation images that were given choose with one half and measure with the other. Images held out from
        training are few: all of them choose, and each half is measured at the point that the other half chooses; only
        the test half if the dev half also chose the end of training.
        """
        chosen_on = self.split.chosen_on
        both = chosen_on == "held-out" and self.recipe.dial and len(self.split.test) > 0
        halves = [self.dev(model)]
        if both:
            halves.append((self.features(model, self.split.test)[0], self.labels(self.split.test)))
        features, labels = torch.cat([half[0] for half in halves]), np.concatenate([half[1] for half in halves])
        held_new = self.held_new(model)
        # Earlier steps keep their biases: kept images trained them, so their logits on those are too large. Deltas
        # change all logits; biases are then found anew, unless only new images can place them.
        keeps = self.base.steps and chosen_on != "dev" and (trained is None or held_new is not None)
        earlier_biases = self.earlier_biases if keeps else None
        points, frontier = choose_point(
            model,
            trained,
            features,
            labels,
            recipe=self.recipe,
            goal=goal or self.config.goal,
            chosen_on=chosen_on,
            held_new=held_new,
            earlier_biases=biases[:-1] if biases else earlier_biases,
            newest=biases[-1] if biases else None,
        )
        if not both:
            return points, self.measure(model, points, frontier)
        stops = self.plan.effort.stops  # the dev images chose the end of training: they measure nothing
        before = self.before(self.split.test if stops else concatenate([self.split.dev, self.split.test]))
        measured = cross_fit(
            model, (halves[0], halves[1]), points, frontier, before, second_only=stops, earlier_biases=earlier_biases
        )
        return points, measured

    def held_new(self, model: Classifier) -> tuple[Tensor, np.ndarray] | None:
        """Held-out images of the new classes, for a linear head without old images that could choose."""
        if self.split.chosen_on != "pseudo" or not isinstance(self.base.base_head, nn.Linear):
            return None
        held = concatenate([part for part in (self.split.dev, self.split.calibration) if part])
        held = held.of_classes(self.split.new.classes)
        return self.features(model, held)[0], self.labels(held)

    def dev(self, model: Classifier) -> tuple[Tensor, np.ndarray]:
        """Features and labels of the dev images, with pseudo-exemplars of the old classes if most have no images."""
        features = self.features(model, self.split.dev)[0]
        labels = self.labels(self.split.dev)
        if self.split.chosen_on != "pseudo":
            return features, labels
        # With another seed than stage II's: what trained must not choose.
        made = self.pseudo(model, self.config.seed + 1, self.on_device(self.split.dev))
        return torch.cat([made.features, features]), np.concatenate([made.labels.cpu().numpy(), labels])

    def measure(self, model: Classifier, points: StepPoints, frontier: Frontier) -> Measured | None:
        """Before and after on the held-out test images."""
        test = self.split.test
        if not len(test):
            return None
        features = self.features(model, test)[0]
        return measure_goals(model, features, self.labels(test), points, frontier, self.before(test))

    def before(self, samples: Samples) -> Accuracies | None:
        """Accuracies of the base on the images of its own classes; None where there are none."""
        old = samples.of_classes(self.base.space.classes)
        if not len(old):
            return None
        answers = predictions(self.base, self.features(self.base, old)[0])
        return accuracies(answers, self.labels(old), self.space)


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Features and labels of several parts; those without images are left out."""
    found = [part for part in parts if len(part[1])]
    return torch.cat([part[0] for part in found]), torch.cat([part[1] for part in found])


def needs_deltas(base: Classifier, space: LabelSpace, split: DataSplit, config: ExtendConfig) -> bool:
    """Always in the paper's recipes. In ours if more than `few_shared` of the new classes overlap, if the model already
    has deltas, or if old classes lack images and the head is cosine: with a linear head the dial alone does as well,
    and stage II over a thousand classes is slow. `space` is the label space after this step.
    """
    settings = recipe_named(config.recipe).stage_two
    always = settings.when == "always" or config.fuse
    lacking = (split.chosen_on == "pseudo" or split.memory is None) and not isinstance(base.base_head, nn.Linear)
    # Deltas of earlier steps changed the scale of the logits, so later steps train them too.
    begun = any(delta is not None for delta in base.fused.deltas)
    shared = len(space.overlap) > settings.few_shared * len(split.new.classes)
    return always or lacking or begun or shared
