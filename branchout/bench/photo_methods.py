"""The methods of `branchout bench photos`: ways to extend a base by photos, and what else people do with them.

A method trains at once and returns a function that answers for the test images, so that both can be timed apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.api.model import Model
from branchout.baselines.networks import Network, scores_of
from branchout.baselines.registry import baselines
from branchout.baselines.task import Task
from branchout.baselines.whole_network import new_and_exemplars, student_and_teacher, train
from branchout.data.images import Gallery, forward_batch
from branchout.data.memory import keep
from branchout.data.samples import Samples, concatenate
from branchout.errors import BranchoutError
from branchout.labels import Floats, Ints, LabelSpace
from branchout.method.config import ExtendConfig
from branchout.method.dial import balanced_without_old, dial_frontier, own_columns, predict
from branchout.method.features import extract, logit_columns, predictions
from branchout.method.new_branch import imprint
from branchout.method.recipes import BRANCHOUT as RECIPE
from branchout.method.running.effort import Effort, Plan
from branchout.method.running.engine import engine_for, use_engine
from branchout.method.running.speeds import Counts, frozen_passes
from branchout.method.split import DataSplit
from branchout.model.classifier import Classifier
from branchout.model.heads import new_head
from branchout.training.loop import OnProgress, silent
from branchout.training.optimisation import Optimisation

KEPT = 5
"""Images kept of each new class for later steps."""
RATES = (0.003, 0.01, 0.03)
"""Learning rates of full fine-tuning: the best on held-out images is used."""
FINE_TUNING = Optimisation(epochs=20, batch=64, nesterov=True, schedule="cosine")


@dataclass(frozen=True)
class Answers:
    """What a method says about the test images."""

    predicted: Ints
    columns: Floats
    """Logits without the dial, from which the predictions at any other operating point follow."""
    space: LabelSpace
    """Of the columns. Class numbers are the same for every number of steps."""
    trained: dict[str, Any] | None = None
    """What Branchout trained in its last step, and how long each stage took."""


Method = Callable[["Case", int], Callable[[], Answers]]


@dataclass(frozen=True)
class Case:
    """A base and the images of one comparison."""

    base: Model
    new: Samples
    old: Samples
    test: Samples
    effort: Effort | None = None
    """What Branchout computes in stage I, if not what it chooses itself."""
    on_progress: OnProgress = silent

    @cached_property
    def task(self) -> Task:
        model = self.base.classifier
        return Task(
            space=model.space.extend(self.new.classes),
            new=self.new.with_origin(len(model.space.branches)),
            memory=self.old.with_origin(0),
            images=Gallery(model.preprocessing, self.base.device).images,
            kind=model.kind,
            size=model.preprocessing.size,
            per_class=max(self.old.counts().values()),
            device=self.base.device,
            on_progress=self.on_progress,
        )

    def split(self, seed: int) -> DataSplit:
        """The images that train and those that choose, as `extend` divides them."""
        return DataSplit.of(self.base.classifier.space, self.new, self.old, None, seed)

    def extended(self, model: Model, new: Samples, old: Samples | None, branch: str | None, seed: int) -> Model:
        prepared = model.prepare(
            new, memory=old, config=ExtendConfig(branch=branch, seed=seed), on_progress=self.on_progress
        )
        plan = None
        if self.effort is not None:
            passes = frozen_passes(self.effort, Counts.of(prepared.base, prepared.split, prepared.config))
            plan = Plan(prepared.config.where, self.effort, engine_for(prepared.base, model.device, passes))
        return model.extend_prepared(prepared, plan=plan, on_progress=self.on_progress)

    def answers(self, extended: Model) -> Answers:
        model, event = extended.classifier, extended.saved.history[-1]
        features = self.features(model, self.test)
        trained = {key: event[key] for key in ("branch", "effort", "engine", "seconds")}
        return Answers(predictions(model, features), logit_columns(model, features), model.space, trained)

    def features(self, model: Classifier, samples: Samples) -> Tensor:
        device = self.base.device
        use_engine(model, engine_for(model, device, len(samples)))
        try:
            return extract(model, self.task.images(samples), device=device, on_progress=self.on_progress)[0]
        finally:
            model.engine = None

    def scores(self, scorer: nn.Module, samples: Samples) -> Floats:
        """Columns of a method that has one score for each class."""
        images = self.task.images(samples)
        scores = scores_of(scorer, images, forward_batch(images, 500))
        return own_columns(scores.cpu().numpy(), self.task.space)


def extended(case: Case, seed: int, *, memory: bool = True, branch: str | None = None) -> Callable[[], Answers]:
    branch = case.base.classifier.backbone.names[-2] if branch == "deeper" else branch
    model = case.extended(case.base, case.new, case.old if memory else None, branch, seed)
    return partial(case.answers, model)


def last_classes(case: Case) -> int:
    """How many new classes the second of two steps brings: a tenth."""
    return max(1, round(len(case.new.classes) / 10))


def two_steps(case: Case, seed: int) -> Callable[[], Answers]:
    last = last_classes(case)
    return in_steps(case, seed, [case.new.classes[:-last], case.new.classes[-last:]])


def five_steps(case: Case, seed: int) -> Callable[[], Answers]:
    return in_steps(case, seed, [part.tolist() for part in np.array_split(case.new.classes, 5)])


def in_steps(case: Case, seed: int, steps: Sequence[Sequence[str]]) -> Callable[[], Answers]:
    """Some new classes after the others, with a few images kept of those before."""
    if not all(steps):
        raise BranchoutError(f"{len(steps)} steps need {len(steps)} new classes; --new has {len(case.new.classes)}")
    model, kept = case.base, [case.old]
    for names in steps:
        images = case.new.of_classes(names)
        model = case.extended(model, images, concatenate(kept), None, seed)
        kept.append(keep(images, per_class=KEPT, seed=seed))
    return partial(case.answers, model)


def baseline(case: Case, seed: int, *, name: str) -> Callable[[], Answers]:
    scorer = baselines()[name].learn(case.base.classifier, replace(case.task, seed=seed))

    def answers() -> Answers:
        columns = case.scores(scorer, case.test)
        return Answers(predict(columns, case.task.space), columns, case.task.space)

    return answers


def logistic_regression(case: Case, seed: int) -> Callable[[], Answers]:
    """On frozen features, beside the old logits, with one bias."""
    from sklearn.linear_model import LogisticRegression

    if len(case.new.classes) < 2:
        raise BranchoutError("logistic regression tells new classes apart and needs two; --new has one")
    base, split = case.base.classifier, case.split(seed)
    fitted = LogisticRegression(C=1.0, max_iter=500)
    fitted.fit(case.features(base, split.new)[:, 0].cpu().numpy(), split.new.labels)

    def columns(samples: Samples) -> Floats:
        features = case.features(base, samples)
        new = fitted.decision_function(features[:, 0].cpu().numpy())
        new = np.stack([-new, new], 1) / 2 if new.ndim == 1 else new  # two classes have one score, for the second
        return np.concatenate([logit_columns(base, features), new], axis=1)

    bias, _ = chosen_bias(case, split, columns)
    return partial(answers_with_bias, case, columns, bias)


def fine_tuning(case: Case, seed: int) -> Callable[[], Answers]:
    """The whole network on new and kept images; held-out images choose the learning rate and one bias."""
    split = case.split(seed)
    assert split.memory is not None
    task = replace(case.task, new=split.new, memory=split.memory, seed=seed)
    best: tuple[float, float, Network] | None = None
    for rate in RATES:
        network = fine_tuned(case.base.classifier, task, replace(FINE_TUNING, lr=rate))
        bias, score = chosen_bias(case, split, partial(case.scores, network))
        if best is None or score > best[1]:
            best = (bias, score, network)
    assert best is not None
    return partial(answers_with_bias, case, partial(case.scores, best[2]), best[0])


def fine_tuned(base: Classifier, task: Task, optimisation: Optimisation) -> Network:
    """A copy of the base, trained on with rows for the new classes that start as Branchout's do.

    BatchNorm keeps the base's statistics: a few images of each class would only make them worse.
    """
    network, _ = student_and_teacher(base, task)
    names = task.space.branches[-1]
    head = new_head(base.base_head, len(names)).to(task.device)
    if isinstance(head, nn.Linear):
        length = RECIPE.stage_one.first_rows
        imprint(head, base, task.labelled(task.new), task.space, length, task.device, task.on_progress)
        fresh = [n for n, name in enumerate(names) if name not in base.space.classes]
        rows = torch.from_numpy(task.space.index([names[n] for n in fresh])).to(task.device)
        with torch.no_grad():
            for name, values in head.named_parameters():
                network.head.get_parameter(name)[rows] = values[fresh]
    train(
        network,
        task,
        new_and_exemplars(task),
        lambda images, target: F.cross_entropy(network(images), target),
        work="Fine-tuning the network",
        optimisation=optimisation,
        statistics=False,
    )
    return network


def chosen_bias(case: Case, split: DataSplit, columns: Callable[[Samples], Floats]) -> tuple[float, float]:
    """The balanced operating point on the images held out from training, as `extend` chooses it, and its score."""
    space = case.task.space
    held = concatenate([part for part in (split.dev, split.test, split.calibration) if part is not None and len(part)])
    z, labels = columns(held), held.labels_in(space)
    curve = dial_frontier(z, labels, space, by_class=True)
    point = curve.choose("balanced")
    bias = balanced_without_old(z, labels, space) if split.chosen_on == "pseudo" else None
    return float(curve.settings[point, 0]) if bias is None else bias, float(curve.score("balanced")[point])


def answers_with_bias(case: Case, columns: Callable[[Samples], Floats], bias: float) -> Answers:
    z = columns(case.test)
    return Answers(predict(z, case.task.space, bias), z, case.task.space)


BRANCHOUT: Mapping[str, Method] = {
    "default": extended,
    "no-memory": partial(extended, memory=False),
    "fc": partial(extended, branch="fc"),
    "deeper": partial(extended, branch="deeper"),
    "two-steps": two_steps,
    "five-steps": five_steps,
}
METHODS: Mapping[str, Method] = {
    **BRANCHOUT,
    "fine-tuning": fine_tuning,
    "logistic-regression": logistic_regression,
    "nearest-class-mean": partial(baseline, name="ncm"),
    "ranpac": partial(baseline, name="ranpac"),
}
