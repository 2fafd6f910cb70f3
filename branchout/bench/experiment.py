"""One scenario on one dataset, and what all methods of a table share: base model, branches, exemplars, dev and test.

Whatever is expensive and the same for several rows is made once: the base model is kept on disk under a name that
hashes all it depends on, branches of the paper's stage I stay in memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from branchout.baselines.common import Task
from branchout.bench.given_base import GivenBase, given_base
from branchout.bench.plan import Plan, difference, flat
from branchout.data import augment, scenarios
from branchout.data import memory as memory_rules
from branchout.data.augment import Augmentation
from branchout.data.dataset import Dataset
from branchout.data.images import SMALL, Gallery, Images
from branchout.data.preprocess import Preprocessing
from branchout.data.samples import Samples, concatenate, digest
from branchout.errors import BranchoutError
from branchout.files import atomic_write, cache_folder, lock
from branchout.labels import LabelSpace
from branchout.method.extend import VIEWS
from branchout.method.features import extract, weights_digest
from branchout.method.recipes import PAPER, Stage1
from branchout.method.stage1 import Labelled, train_branch
from branchout.metrics import Accuracies, accuracies
from branchout.model import checkpoint
from branchout.model.checkpoint import SavedModel, is_saved_model
from branchout.model.classifier import Classifier, Step
from branchout.training.loop import Report, best_device, silent
from branchout.training.optimisation import Optimisation, settings_dict
from branchout.training.pretrain import pretrain

MEMORIES = ("random", "herding")
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
        drawn: Path | None = None,
        report: Report = silent,
    ) -> None:
        """`drawn` is where a clustered scenario is kept: it hangs on a network trained here, and no other training
        of that network would split the samples in quite the same way."""
        if plan.memory not in MEMORIES:
            raise BranchoutError(f"exemplars are chosen by {' or '.join(MEMORIES)}, not by {plan.memory!r}")
        self.plan = plan
        self.drawn = drawn if plan.scenario in scenarios.CLUSTERED else None
        self.dataset = dataset
        self.device = device or best_device()
        self.cache = cache or cache_folder()
        self.report = report
        self.given_base = None if plan.model is None else _unchanged(given_base(plan.model), plan)
        self.kind = dataset.kind if self.given_base is None else self.given_base.classifier.kind
        channels = 1 if self.kind == "glyph" else 3
        self.preprocessing = (
            Preprocessing(plan.size, channels, (0.5,) * channels, (0.25,) * channels)
            if self.given_base is None
            else self.given_base.classifier.preprocessing
        )
        self.gallery = Gallery(self.preprocessing, self.device, self.cache)
        self._branches: dict[tuple[Stage1, str, int], tuple[Step, float]] = {}
        self._features: dict[tuple[Any, ...], tuple[Tensor, float]] = {}
        self._ranked: dict[int, Samples] = {}
        self._earlier = 0.0

    # Who is given what.

    @cached_property
    def scenario(self) -> scenarios.Scenario:
        plan = self.plan
        drawn = self._draw() if self.drawn is None else self._drawn_once(self.drawn)
        base, *steps = drawn.branches
        if plan.kept is None:
            return drawn
        fewer = sorted(np.random.default_rng(plan.split).permutation(len(base))[: plan.kept].tolist())
        return replace(drawn, branches=(tuple(base[n] for n in fewer), *steps))

    def _drawn_once(self, place: Path) -> scenarios.Scenario:
        """The scenario in a file, which whoever comes first draws; it must be the one that the plan asks for."""
        network = self._training(CLUSTERING)
        if not place.exists():
            with lock(place.with_name(f".{place.name}.lock")):
                if not place.exists():
                    fresh = replace(self._draw(), network=network)
                    with atomic_write(place) as partial:
                        fresh.save(partial)
        drawn = scenarios.Scenario.load(place)
        plan, (base, *steps) = self.plan, [len(names) for names in drawn.branches]
        found = {
            "scenario": drawn.name,
            "base": base,
            "novel": steps,
            "overlap": len(drawn.space.overlap),
            "split": drawn.seed,
            "network": drawn.network or network,  # files from before say nothing of it
        }
        asked = {
            "scenario": plan.scenario,
            "base": base if plan.base is None else plan.base,
            "novel": [plan.novel] * plan.steps,
            "overlap": plan.novel if plan.scenario == "overlap-full" else plan.overlap,
            "split": plan.split,
            "network": network,
        }
        differing = difference(flat(found), asked)
        if differing:
            raise BranchoutError(
                f"{place} was drawn with {differing} is asked for now; "
                "delete it and the rows below it, or write elsewhere with --out"
            )
        return drawn

    def _draw(self) -> scenarios.Scenario:
        plan = self.plan
        if self.given_base is not None:
            return self.given_base.scenario(plan, self.dataset)
        return scenarios.build(
            plan.scenario,
            self.dataset,
            base=plan.base,
            novel=plan.novel,
            overlap=plan.overlap,
            steps=plan.steps,
            seed=plan.split,
            features=self._features_of_all() if plan.scenario in scenarios.CLUSTERED else None,
        )

    def _features_of_all(self) -> np.ndarray:
        """For clustered scenarios: features of every training image from a ResNet10 trained on all classes.

        Whatever network the rows are about, so that all of them are about the same split.
        """
        everything = self.dataset.train
        network = self.trained(everything, CLUSTERING)
        found: np.ndarray = extract(network, self.images(everything), device=self.device)[0, :, 0].cpu().numpy()
        return found

    @cached_property
    def train(self) -> Samples:
        train = self.scenario.train(self.dataset)
        if self.plan.size <= SMALL:
            self.images(train)  # all that will be needed is decoded in one go
        return train

    @property
    def steps(self) -> int:
        return len(self.scenario.branches) - 1

    def space(self, step: int) -> LabelSpace:
        """The label space after `step` steps."""
        return self.scenario.space.upto(step)

    def given(self, step: int) -> Samples:
        """The training images of the base (0) or of one step."""
        return self.train.select(self.train.origin == step)

    def memory(self, step: int, seed: int, rankings: Mapping[int, Samples] | None = None) -> Samples:
        """The exemplars that step `step` may use: some of every class of the base and of each step before.

        With herding they are the first of `rankings`, by step; the base model ranks what these leave out.
        """
        number = self.per_class(step)
        # Each step's apart, so that what was kept of a class stays the same however many steps follow.
        return concatenate([self.kept(t, number, seed, rankings) for t in range(step)])

    def kept(self, step: int, number: int, seed: int, rankings: Mapping[int, Samples] | None = None) -> Samples:
        """`number` exemplars of each class of the base (0) or of one step."""
        if self.plan.memory == "random":
            return memory_rules.keep(self.given(step), per_class=number, seed=seed)
        ranked = (rankings or {}).get(step)
        if ranked is None:
            if step not in self._ranked:
                of_base = self.features(self.base, self.given(step))[0, :, 0]
                self._ranked[step] = self.ranked(step, of_base.cpu().numpy())
            ranked = self._ranked[step]
        places = [np.flatnonzero(ranked.labels == label)[:number] for label in np.unique(ranked.labels)]
        return ranked.select(np.concatenate(places))

    def ranked(self, step: int, features: np.ndarray) -> Samples:
        """The images of the base (0) or of one step that herding would keep, class by class, the best first.

        As many as any step may use: fewer are the first of them, since each is chosen to go with those before it.
        """
        most = self.per_class(max(step, 1))
        return memory_rules.keep(self.given(step), per_class=most, rule="herding", features=features)

    def per_class(self, step: int) -> int:
        """How many exemplars of each class step `step` may use."""
        if self.plan.total is None:
            return self.plan.exemplars
        return max(self.plan.total // self.space(step - 1).columns, 1)

    def images(self, samples: Samples) -> Images:
        return self.gallery.images(samples)

    def labels(self, samples: Samples, step: int) -> np.ndarray:
        return self.space(step).index(list(samples.classes))[samples.labels]

    def labelled(self, samples: Samples, step: int) -> Labelled:
        return Labelled(self.images(samples), self.labels(samples, step))

    def halves(self, step: int) -> tuple[Samples, Samples]:
        """Dev and test images of the classes known after `step` steps."""
        return self.scenario.dev(self.dataset, step), self.scenario.test(self.dataset, step)

    def augmentation(self, *, few: bool = False) -> Augmentation:
        """Of what is trained here; with `few`, of what learns from one step's images."""
        return augment.for_kind(self.kind, self.preprocessing.size, few=few, named=self.plan.augmentation)

    def task(self, step: int, seed: int, rankings: Mapping[int, Samples] | None = None) -> Task:
        """A step as a baseline is given it, with exemplars by its own rankings if they are herded."""
        return Task(
            space=self.space(step),
            new=self.given(step),
            memory=self.memory(step, seed, rankings),
            images=self.images,
            kind=self.kind,
            size=self.plan.size,
            network=self.plan.network,
            pretraining=self.plan.pretraining,
            heads=self.fusion(PAPER.stage_two.optimisation),
            per_class=self.per_class(step),
            everything=self.train.select(self.train.origin <= step),
            from_scratch=self.trained,
            features=self.features,
            augmented=self.plan.augmentation,
            seed=seed,
            device=self.device,
            report=self.report,
        )

    # What is trained once.

    @cached_property
    def base(self) -> Classifier:
        if self.given_base is None or self.plan.kept is not None:
            return self.trained(self.given(0))
        self.scenario  # noqa: B018 – whether it goes with the data is said before anything is measured
        return self._placed(self.given_base.classifier)

    @cached_property
    def base_weights(self) -> str:
        """Identifies the base, network and head."""
        return weights_digest(self.base)

    def trained(self, samples: Samples, arch: str | None = None) -> Classifier:
        """A network trained from scratch on these images, from disk if it was trained before; classes are sorted.

        Whatever order a scenario gives the images in, it is the same network: joint learning of two tables, and the
        one that clusters all images, are trained once.
        """
        plan = self.plan
        samples = samples.select(np.argsort(samples.ids, kind="stable"))
        classes = samples.classes
        settings = {**self._training(arch), "classes": classes}
        # The name goes with any copy of the data, so that a base can be carried to the other machines of a bench.
        name = digest(samples.fingerprint(portable=True), repr(sorted(settings.items())))
        kept = self.cache / "bench" / name
        asked = time.perf_counter()
        with lock(self.cache / "bench" / f".{name}.lock"):  # another runner may be training the very same one
            self._earlier -= time.perf_counter() - asked  # what it took is in the file, and waiting is no work
            fresh = not is_saved_model(kept)
            if fresh:
                start = self.now()
                made = pretrain(
                    self.images(samples),
                    samples.labels,
                    classes,
                    self.preprocessing,
                    arch=arch or plan.arch,
                    width=plan.width,
                    last_relu=settings.get("last_relu", True),
                    kind=self.kind,
                    optimisation=plan.pretraining,
                    augmentation=self.augmentation(),
                    seed=plan.split,
                    device=self.device,
                    checkpoint=self.cache / "bench" / f"{name}.checkpoint",
                    report=self.report,
                )
                event = {"what": "pretrain", "images": len(samples), "seconds": self.now() - start, **settings}
                checkpoint.save(SavedModel(made.cpu(), (), (event,)), kept)
                (self.cache / "bench" / f"{name}.checkpoint").unlink(missing_ok=True)
        saved = checkpoint.load(kept)
        if not fresh:
            self._earlier += float(saved.history[0]["seconds"])
        return self._placed(saved.model())

    def _training(self, arch: str | None = None) -> dict[str, Any]:
        """All that a network from scratch hangs on but its images; another than the plan's is as it always was."""
        plan = self.plan
        settings: dict[str, Any] = {
            "arch": arch or plan.arch,
            "width": plan.width,
            "preprocessing": repr(self.preprocessing),
            "seed": plan.split,
            "optimisation": settings_dict(plan.pretraining),
        }
        if plan.augmentation is not None:  # not named otherwise, so that networks from before still count
            settings["augmentation"] = repr(self.augmentation())
        if not plan.last_relu and arch is None:
            settings["last_relu"] = False
        return settings

    def _placed(self, model: Classifier) -> Classifier:
        return model.placed(self.device)

    def fusion(self, optimisation: Optimisation) -> Optimisation:
        """The paper's stage II, and heads that are trained as long, as the plan wants them."""
        epochs = self.plan.fusion_epochs
        return optimisation if epochs is None else replace(optimisation, epochs=epochs)

    def shortened(self, settings: Stage1) -> Stage1:
        """Stage I as the plan wants it."""
        if self.plan.epochs is None:
            return settings
        return replace(settings, optimisation=replace(settings.optimisation, epochs=self.plan.epochs))

    def branched(self, step: int, settings: Stage1, where: str = "last") -> tuple[Classifier, list[float]]:
        """The base with the branches of all steps so far, by the paper's stage I; and how long each took.

        That stage sees new images alone, so one branch serves every exemplar seed and every method that builds on it.
        """
        model, seconds = self.base, []
        settings = self.shortened(settings)
        for t in range(1, step + 1):
            key = (settings, where, t)
            if key not in self._branches:
                start = self.now()
                learned, _ = train_branch(
                    model,
                    self.scenario.branches[t],
                    self.labelled(self.given(t), t),
                    settings,
                    where=where,
                    seed=self.plan.split,
                    views=VIEWS[self.device.type],
                    augmentation=self.augmentation(few=True),
                    device=self.device,
                    report=self.report,
                )
                self._branches[key] = (learned, self.now() - start)
            learned, took = self._branches[key]
            model = model.extended(learned).to(self.device)
            seconds.append(took)
        return model, seconds

    def features(self, model: Classifier, samples: Samples, views: int = 0, seed: int = 0) -> Tensor:
        """What a frozen model makes of pictures, or of random views of them: (max(views, 1), N, feature vectors, k).

        Methods that build on the same branches ask for the same ones. They are made once, and count for each as if it
        had made them.
        """
        weights = weights_digest(model.backbone, model.branches)
        key = (weights, model.fused.feature_of, samples.fingerprint(), views, seed if views else 0)
        if key in self._features:
            found, took = self._features[key]
            self._earlier += took
            return found
        start = self.now()
        found = extract(
            model,
            self.images(samples),
            views=views,
            augmentation=self.augmentation(),
            seed=seed,
            device=self.device,
            report=self.report,
        )
        self._features[key] = (found, self.now() - start)
        while sum(each.nbytes for each, _ in self._features.values()) > KEPT_FEATURES and len(self._features) > 1:
            del self._features[next(iter(self._features))]  # the oldest
        return found

    def before(self) -> Accuracies:
        """What the base model alone reaches on the test images of its classes."""
        return self._before[0]

    def before_on_both(self) -> Accuracies:
        """What it reaches on all validation images of its classes, dev and test."""
        return self._before[1]

    @cached_property
    def _before(self) -> tuple[Accuracies, Accuracies]:
        dev, test = self.halves(0)
        return self._base_on(test), self._base_on(concatenate([dev, test]))

    def _base_on(self, samples: Samples) -> Accuracies:
        features = extract(self.base, self.images(samples), device=self.device)[0]
        with torch.no_grad():
            answers = self.base.fused(features.unbind(1)).argmax(1).cpu().numpy()
        return accuracies(answers, self.labels(samples, 0), self.space(0))

    def now(self) -> float:
        """A clock that waits for the device, and on which a network from disk took as long as its training did."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() + self._earlier


def _unchanged(given: GivenBase, plan: Plan) -> GivenBase:
    if given.weights != plan.weights:
        raise BranchoutError(
            f"the base model {plan.model} is not the one this was planned with; has it been replaced meanwhile?"
        )
    return given
