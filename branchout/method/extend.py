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

from branchout.data import memory as memory_rules
from branchout.data.images import Images
from branchout.data.samples import Samples, concatenate
from branchout.labels import LabelSpace
from branchout.method.choose import apply_point
from branchout.method.config import ExtendConfig
from branchout.method.head_only import train_head
from branchout.method.recipes import recipe_named
from branchout.method.results import Extended
from branchout.method.running.effort import Plan, trains_head_alone, usual_effort
from branchout.method.running.engine import use_engine
from branchout.method.score_fusion import head_layout, stage2_data
from branchout.method.split import DataSplit
from branchout.method.stage1 import train_branch
from branchout.method.stage2 import TrainedDeltas, train_grid
from branchout.method.step_choice import Chosen, StepChoice
from branchout.method.step_data import StepImages
from branchout.model.classifier import Classifier, Step
from branchout.model.staged import branch_point
from branchout.training.device import give_back_memory
from branchout.training.loop import Event, OnProgress, silent


class Extension:
    """The whole method, for one step. Its methods are the steps, in order; everything frozen is computed once."""

    def __init__(
        self,
        base: Classifier,
        split: DataSplit,
        config: ExtendConfig,
        *,
        device: torch.device,
        space: LabelSpace | None = None,
        plan: Plan | None = None,
        work: Path | None = None,
        cache: Path | None = None,
        images: Callable[[Samples], Images] | None = None,
        earlier_biases: Sequence[float] | None = None,
        on_progress: OnProgress = silent,
    ) -> None:
        """`space` is the label space after this step, where it has classes without images. `plan` replaces the branch
        of `config` and what this device is usually given.

        `work` is a folder for checkpoints, from which a run that was stopped resumes, `cache` one for features;
        `images` opens samples in another way. `earlier_biases` are those of the base's steps at its point for
        `balanced`, by default those that it has now: a point chosen for another goal says nothing about where steps
        belong.
        """
        self.data = StepImages(
            base, split, config, device=device, space=space, cache=cache, images=images, on_progress=on_progress
        )
        self.base, self.split, self.config = self.data.base, split, config
        self.device, self.work, self.on_progress = device, work, on_progress
        self.earlier_biases = base.fused.bias[1:].tolist() if earlier_biases is None else earlier_biases
        usual = usual_effort(base, config.where, device, replay=config.replays)
        self.plan = plan or Plan.of(base, config.where, usual)
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
        model, points, measured = self.choose_and_measure(model, trained)
        apply_point(model, points)
        times.append(time.perf_counter())
        seconds = dict(zip(("stage1", "fusion", "choice"), np.diff(times).tolist(), strict=True))
        model.engine = None
        return Extended(model, points, measured, losses, seconds)

    def train_branch(self) -> tuple[Step, list[float]]:
        """Stage I."""
        split, effort, views = self.split, self.plan.effort, self.config.views
        exemplars = None if split.memory is None else self.data.labelled(split.memory)
        settings, new = self.recipe.stage_one, self.data.labelled(split.new)
        if settings.replay and trains_head_alone(self.base, self.plan.branch):
            return train_head(
                self.base,
                split.new.classes,
                new,
                settings,
                exemplars=exemplars,
                seed=self.config.seed,
                views=effort.views,
                exemplar_views=effort.exemplar_views,
                cache_limit=self.config.memory_bytes,
                device=self.device,
                on_progress=self.on_progress,
            )
        return train_branch(
            self.base,
            split.new.classes,
            new,
            settings,
            exemplars=exemplars,
            where=self.plan.branch,
            seed=self.config.seed,
            views=effort.views if views is None else views,
            exemplar_views=effort.exemplar_views if settings.replay else None,
            exemplar_share=effort.exemplar_share if settings.replay else 1.0,
            cache_limit=self.config.memory_bytes,
            compressed=effort.compressed,
            held_out=self.data.held_out() if effort.stops else None,
            device=self.device,
            checkpoint=self.work / "branch.safetensors" if self.work else None,
            on_progress=self.on_progress,
        )

    def needs_deltas(self) -> bool:
        return needs_deltas(self.base, self.data.space, self.split, self.config)

    def train_deltas(self, model: Classifier) -> TrainedDeltas:
        """Stage II, on exemplars of all classes; pseudo-exemplars stand for old classes without images."""
        settings, config = self.recipe.stage_two, self.config
        kept = memory_rules.keep(self.split.new, per_class=config.exemplars, seed=config.seed)
        seen = kept if self.split.memory is None else concatenate([self.split.memory, kept])
        features = self.data.features(model, seen, settings.views)
        labels, origin = self.data.on_device(seen), torch.from_numpy(seen.origin).to(self.device)
        made = self.data.pseudo(model, config.seed, labels)
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

    def choose_and_measure(self, model: Classifier, trained: TrainedDeltas | None, goal: str | None = None) -> Chosen:
        """The model with class means where they help, its operating point for the goal, and its accuracies there."""
        return self.choice(goal).choose_and_measure(model, trained)

    def choice(self, goal: str | None = None) -> StepChoice:
        return StepChoice(
            self.data,
            self.recipe,
            goal or self.config.goal,
            dev_ended_training=self.plan.effort.stops,
            earlier_biases=self.earlier_biases,
        )


def needs_deltas(base: Classifier, space: LabelSpace, split: DataSplit, config: ExtendConfig) -> bool:
    """Always in the paper's recipes. In ours if more than `few_shared` of the new classes overlap, if the model already
    has deltas, or if old classes lack images and the head is cosine: with a linear head the dial alone does as well,
    and stage II over a thousand classes is slow. `space` is the label space after this step.
    """
    settings = recipe_named(config.recipe).stage_two
    always = settings.when == "always" or config.fuse
    lacking = (split.chosen_on == "pseudo" or split.memory is None) and not base.has_linear_head
    # Deltas of earlier steps changed the scale of the logits, so later steps train them too.
    begun = any(delta is not None for delta in base.fused.deltas)
    newest = space.branches[-1]
    shared = set(space.overlap) & set(newest)
    return always or lacking or begun or len(shared) > settings.few_shared * len(newest)
