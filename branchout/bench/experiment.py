"""One scenario on one dataset, and what all methods of a table share: base model, branches, exemplars, dev and test.

What several rows share is computed once: networks are kept on disk under a hash of all they depend on, branches of the
paper's stage I and features stay in memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from branchout.baselines.task import Task
from branchout.bench import scenario_file
from branchout.bench.base_model import open_base
from branchout.bench.plan import Plan
from branchout.data import augment
from branchout.data import memory as memory_rules
from branchout.data.augment import Augmentation
from branchout.data.datasets import Dataset
from branchout.data.images import SMALL, Gallery, Images
from branchout.data.preprocess import Preprocessing
from branchout.data.samples import Samples, concatenate, digest
from branchout.data.scenarios import CLUSTERED, Scenario
from branchout.disk_cache import cache_folder
from branchout.errors import BranchoutError
from branchout.evaluate.two_fold import Scored
from branchout.files import lock
from branchout.labels import LabelSpace
from branchout.method.features import extract, predictions, weights_digest
from branchout.method.new_branch import Labelled
from branchout.method.recipes import PAPER, Stage1
from branchout.method.running.effort import VIEWS
from branchout.method.stage1 import train_branch
from branchout.model import bases, checkpoint
from branchout.model.architectures import describe
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier, Step
from branchout.model.heads import CosineHead
from branchout.model.manifest import is_saved_model
from branchout.model.staged import Backbone
from branchout.training.device import wait_for
from branchout.training.loop import Event, OnProgress, best_device, seed_for, silent
from branchout.training.optimisation import Optimisation, settings_dict
from branchout.training.pretrain import pretrain
from branchout.training.repeatable import repeatable

CLUSTERING = "resnet10"
"""The network that clusters the images of a clustered scenario."""
KEPT_FEATURES = 1 << 30
"""Bytes of features that stay in memory for other methods."""


class Experiment:
    """A plan applied to a dataset."""

    def __init__(
        self,
        plan: Plan,
        dataset: Dataset,
        *,
        device: torch.device | None = None,
        cache: Path | None = None,
        scenario_file: Path | None = None,
        on_progress: OnProgress = silent,
    ) -> None:
        """`scenario_file` keeps the scenario if it is clustered."""
        self.plan = plan
        self.scenario_file = scenario_file if plan.scenario in CLUSTERED else None
        self.dataset = dataset
        self.device = device or best_device()
        self.cache = cache or cache_folder()
        self.on_progress = on_progress
        self.saved_base = None if plan.model is None else open_base(plan.model)
        if self.saved_base is not None and self.saved_base.weights != plan.weights:
            raise BranchoutError(
                f"the base model {plan.model} was replaced since this experiment was planned; run the command again"
            )
        self.kind = dataset.kind if self.saved_base is None else self.saved_base.classifier.kind
        self.preprocessing = (
            Preprocessing.from_scratch(self.kind, plan.size)
            if self.saved_base is None
            else self.saved_base.classifier.preprocessing
        )
        self.gallery = Gallery(self.preprocessing, self.device, self.cache)
        self._branches: dict[tuple[Stage1, str, int, int], tuple[Step, float]] = {}
        self._features: dict[tuple[Any, ...], tuple[Tensor, float]] = {}
        self._ranked: dict[int, Samples] = {}
        self._reused_seconds = 0.0
        """What reused networks and features took when they were computed, less the time spent waiting for others."""

    # The images of each step.

    @cached_property
    def scenario(self) -> Scenario:
        place = self.scenario_file
        if place is None:
            found = self._drawn()
        else:
            found = scenario_file.draw_once(place, self.plan, self._training(CLUSTERING), self._drawn)
        return scenario_file.with_fewer_base_classes(found, self.plan)

    def _drawn(self) -> Scenario:
        """A clustered scenario by the features of a ResNet10 trained on all classes: one split for all rows."""
        if self.saved_base is not None:
            return self.saved_base.scenario(self.plan, self.dataset)
        everything, features = self.dataset.train, None
        if self.plan.scenario in CLUSTERED:
            network = self.trained(everything, CLUSTERING)
            features = extract(network, self.images(everything), device=self.device)[0, :, 0].cpu().numpy()
        return self.plan.draw(self.dataset, features=features)

    @cached_property
    def train(self) -> Samples:
        train = self.scenario.train(self.dataset)
        if self.plan.size <= SMALL:
            self.images(train)  # decodes all at once
        return train

    @property
    def steps(self) -> int:
        return len(self.scenario.branches) - 1

    def space(self, step: int) -> LabelSpace:
        """The label space after `step` steps."""
        return self.scenario.space.upto(step)

    def training_images(self, step: int) -> Samples:
        """The training images of the base (0) or of one step."""
        return self.train.select(self.train.origin == step)

    def memory(self, step: int, seed: int, rankings: Mapping[int, Samples] | None = None) -> Samples:
        """The exemplars that step `step` may use: some of every class of the base and of each step before.

        With herding they are the first of `rankings`, by step; the base model ranks the steps that these lack.
        """
        number = self.per_class(step)
        # Step by step, so that the exemplars of a class do not depend on how many steps follow.
        tables = [self.kept(t, number, seed, rankings) for t in range(step if number else 0)]
        return concatenate(tables) if tables else self.train.select(np.zeros(0, dtype=np.int64))

    def kept(self, step: int, number: int, seed: int, rankings: Mapping[int, Samples] | None = None) -> Samples:
        """`number` exemplars of each class of the base (0) or of one step."""
        if self.plan.memory == "random":
            return memory_rules.keep(self.training_images(step), per_class=number, seed=seed)
        ranked = (rankings or {}).get(step)
        if ranked is None:
            if step not in self._ranked:
                of_base = self.features(self.base, self.training_images(step))[0, :, 0]
                self._ranked[step] = self.ranked(step, of_base.cpu().numpy())
            ranked = self._ranked[step]
        places = [np.flatnonzero(ranked.labels == label)[:number] for label in np.unique(ranked.labels)]
        return ranked.select(np.concatenate(places))

    def ranked(self, step: int, features: np.ndarray) -> Samples:
        """The images of the base (0) or of one step that herding keeps, class by class, the best first.

        As many as any step may use: herding chooses one after the other, so fewer are the first of them.
        """
        most = self.per_class(max(step, 1))
        return memory_rules.keep(self.training_images(step), per_class=most, rule=self.plan.memory, rows=features)

    def per_class(self, step: int) -> int:
        """How many exemplars of each class step `step` may use."""
        if self.plan.total is None:
            return self.plan.exemplars
        return max(self.plan.total // self.space(max(step - 1, 0)).columns, 1)

    def images(self, samples: Samples) -> Images:
        return self.gallery.images(samples)

    def labels(self, samples: Samples, step: int) -> np.ndarray:
        return self.space(step).index(list(samples.classes))[samples.labels]

    def halves(self, step: int) -> tuple[Samples, Samples]:
        """Dev and test images of the classes known after `step` steps."""
        return self.scenario.dev(self.dataset, step), self.scenario.test(self.dataset, step)

    def augmentation(self, *, few: bool = False) -> Augmentation:
        """The augmentation of all training; with `few`, of training on the images of one step."""
        return augment.for_kind(self.kind, self.preprocessing.size, few=few, named=self.plan.augmentation)

    def task(
        self, step: int, seed: int, rankings: Mapping[int, Samples] | None = None, *, exemplars: bool = True
    ) -> Task:
        """A step as a baseline sees it, or the base (0); `rankings` are its own, where exemplars are herded.

        A method that needs no `exemplars` gets none: to herd them, the base would have to be trained.
        """
        return Task(
            space=self.space(step),
            new=self.training_images(step),
            memory=self.memory(step if exemplars else 0, seed, rankings),
            images=self.images,
            kind=self.kind,
            size=self.plan.size,
            preprocessing=self.preprocessing,
            network=self.plan.network,
            pretraining=self.plan.pretraining,
            heads=self.fusion(PAPER.stage_two.optimisation),
            per_class=self.per_class(step),
            after=self.per_class(step + 1),
            everything=self.train.select(self.train.origin <= step),
            from_scratch=partial(self.trained, seed=seed),
            untrained=self._untrained,
            features=self.features,
            augmented=self.plan.augmentation,
            seed=seed,
            device=self.device,
            on_progress=self.on_progress,
        )

    # Networks, branches and features, computed once.

    def _described(self) -> dict[str, Any]:
        plan = self.plan
        return describe(plan.arch, self.preprocessing, width=plan.width, last_relu=plan.last_relu)

    def _untrained(self) -> Backbone:
        return bases.rebuild(self._described())[0]

    @cached_property
    def base(self) -> Classifier:
        if self.saved_base is None or self.plan.kept is not None:
            return self.trained(self.training_images(0))
        self.scenario  # noqa: B018 – fails here if the model does not fit the data
        return self.saved_base.classifier.on_device(self.device)

    @cached_property
    def shape_of_base(self) -> Classifier:
        """A network of the base's shape, whose weights do not count."""
        if self.saved_base is not None:
            return self.saved_base.classifier
        described, classes = self._described(), self.scenario.branches[0]
        backbone, _ = bases.rebuild(described)
        head = CosineHead(backbone.features, len(classes))
        return Classifier(described, backbone, head, classes, self.preprocessing, self.kind)

    @cached_property
    def base_weights(self) -> str:
        """Identifies the base, network and head."""
        return weights_digest(self.base)

    def folder_of(self, samples: Samples, arch: str | None = None, seed: int = 1) -> tuple[Path, dict[str, Any]]:
        """Where a network trained from scratch on these images is kept, and the settings it is trained with.

        The name does not depend on where the data lies, so that a base can be copied to other machines.
        """
        settings = {**self._training(arch, seed), "classes": samples.classes}
        samples = samples.select(np.argsort(samples.ids, kind="stable"))
        name = digest(samples.fingerprint(portable=True), repr(sorted(settings.items())))
        return self.cache / "bench" / name, settings

    def trained(self, samples: Samples, arch: str | None = None, seed: int = 1) -> Classifier:
        """A network trained from scratch on these images, or read from disk; its classes are sorted.

        It does not depend on the order of the images: joint learning of two tables is trained once. Each seed from 2
        on trains another network; the first has the split's seed, as the base has.
        """
        plan = self.plan
        kept, settings = self.folder_of(samples, arch, seed)
        samples = samples.select(np.argsort(samples.ids, kind="stable"))
        asked, held = time.perf_counter(), kept.with_name(f".{kept.name}.lock")
        with lock(held, wait=False) as free:
            if not free:
                self.on_progress(Event("Waiting for another process that trains this network", 0, 1))
        with lock(held):
            # Waiting does not count: the time it took is in the file.
            self._reused_seconds -= time.perf_counter() - asked
            fresh = not is_saved_model(kept)
            if fresh:
                start, unfinished = self.now(), kept.with_name(f"{kept.name}.checkpoint")
                with repeatable(self.device):  # rows measured on another day can be compared
                    made = pretrain(
                        self.images(samples),
                        samples.labels,
                        samples.classes,
                        self.preprocessing,
                        arch=arch or plan.arch,
                        width=plan.width,
                        last_relu=settings.get("last_relu", True),
                        kind=self.kind,
                        optimisation=plan.pretraining,
                        augmentation=self.augmentation(),
                        seed=settings["seed"],
                        device=self.device,
                        checkpoint=unfinished,
                        on_progress=self.on_progress,
                    )
                event = {"what": "pretrain", "images": len(samples), "seconds": self.now() - start, **settings}
                checkpoint.save(SavedModel(made.cpu(), (), (event,)), kept)
                unfinished.unlink(missing_ok=True)
        saved = checkpoint.load(kept)
        if not fresh:
            self._reused_seconds += float(saved.history[0]["seconds"])
        return saved.model().on_device(self.device)

    def _training(self, arch: str | None = None, seed: int = 1) -> dict[str, Any]:
        """All that a network trained from scratch depends on, but its images."""
        plan = self.plan
        settings: dict[str, Any] = {
            "arch": arch or plan.arch,
            "width": plan.width,
            "preprocessing": repr(self.preprocessing),
            "seed": plan.split if seed <= 1 else seed_for(plan.split, seed),
            "optimisation": settings_dict(plan.pretraining),
        }
        if plan.augmentation is not None:  # named only if set, so that older networks on disk stay valid
            settings["augmentation"] = repr(self.augmentation())
        if not plan.last_relu and arch is None:
            settings["last_relu"] = False
        return settings

    def fusion(self, optimisation: Optimisation) -> Optimisation:
        """The schedule of stage II, and of heads that are trained as long, with the plan's epochs."""
        epochs = self.plan.fusion_epochs
        return optimisation if epochs is None else replace(optimisation, epochs=epochs)

    def branched(
        self, step: int, settings: Stage1, where: str = "last", seed: int | None = None
    ) -> tuple[Classifier, list[float]]:
        """The base with the branches of all steps so far, trained by the paper's stage I, and the seconds of each.

        All methods of one seed share a branch; without a seed it is the split's.
        """
        model, seconds = self.base, []
        seed = self.plan.split if seed is None else seed
        if self.plan.epochs is not None:
            settings = replace(settings, optimisation=replace(settings.optimisation, epochs=self.plan.epochs))
        for t in range(1, step + 1):
            key = (settings, where, seed, t)
            if key not in self._branches:
                start, new = self.now(), self.training_images(t)
                learned, _ = train_branch(
                    model,
                    self.scenario.branches[t],
                    Labelled(self.images(new), self.labels(new, t)),
                    settings,
                    where=where,
                    seed=seed,
                    views=VIEWS[self.device.type],
                    augmentation=self.augmentation(few=True),
                    device=self.device,
                    on_progress=self.on_progress,
                )
                self._branches[key] = (learned, self.now() - start)
            learned, took = self._branches[key]
            model = model.extended(learned).to(self.device)
            seconds.append(took)
        return model, seconds

    def features(self, model: Classifier, samples: Samples, views: int = 0, seed: int = 0) -> Tensor:
        """Features of images, or of random views of them, by a frozen model: (max(views, 1), N, feature vectors, k).

        Methods that build on the same branches share them; the time they took counts for each.
        """
        weights = weights_digest(model.backbone, model.branches)
        key = (weights, model.fused.feature_of, samples.fingerprint(), views, seed if views else 0)
        if key in self._features:
            found, took = self._features[key]
            self._reused_seconds += took
            return found
        start = self.now()
        found = extract(
            model,
            self.images(samples),
            views=views,
            augmentation=self.augmentation(),
            seed=seed,
            device=self.device,
            on_progress=self.on_progress,
        )
        self._features[key] = (found, self.now() - start)
        while sum(each.nbytes for each, _ in self._features.values()) > KEPT_FEATURES and len(self._features) > 1:
            del self._features[next(iter(self._features))]  # the oldest
        return found

    @cached_property
    def before(self) -> Scored:
        """The base model on the test images of its classes, and on all their validation images."""
        answers, labels = [], []
        for half in reversed(self.halves(0)):
            features = extract(self.base, self.images(half), device=self.device)[0]
            answers.append(predictions(self.base, features))
            labels.append(self.labels(half, 0))
        return Scored.of("all", (), answers, labels, self.space(0))

    def now(self) -> float:
        """A clock that counts reused networks and features as if they were computed now; waits for the device."""
        wait_for(self.device)
        return time.perf_counter() + self._reused_seconds
