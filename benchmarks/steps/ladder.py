"""The rungs of the ladder: each replaces one approximation of the method by the truth, or tries one candidate.

A rung gives logits of the dev and test images over all classes after the last step. All are scored alike: two-fold,
with the dial and an offset for every step, both chosen on the other half (`two_fold.score_dial`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from benchmarks.steps import candidates
from benchmarks.steps.candidates import Candidate
from branchout.baselines import featcat
from branchout.bench.experiment import Experiment
from branchout.data.images import in_order
from branchout.data.memory import keep
from branchout.data.samples import Samples, concatenate
from branchout.evaluate.two_fold import Scored, score_dial
from branchout.goals import PAPER_GOALS
from branchout.labels import Floats, Ints
from branchout.method.choose import choose_point
from branchout.method.compact import CompactConfig, Compaction
from branchout.method.config import ExtendConfig
from branchout.method.dial import dial_frontier, predict
from branchout.method.extend import Extension
from branchout.method.features import logit_columns
from branchout.method.recipes import BRANCHOUT
from branchout.method.split import DataSplit
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier

Half = tuple[Floats, Ints]
"""Logits of every column before the dial (images × columns) and labels."""
Scores = dict[str, Scored]


@dataclass
class Run:
    """One experiment, one exemplar seed; the model of our recipe is trained once for all rungs that start from it."""

    experiment: Experiment
    seed: int = 1
    one_branch_epochs: int | None = None
    """Epochs of a branch that sees the images of all steps; None for as many as a step's branch has."""
    candidate: Candidate = field(default_factory=Candidate)
    branch: str = "last"
    corrections: bool = True
    """Whether branches of later steps correct the logits of earlier ones, as in our recipe."""

    @cached_property
    def ours(self) -> Classifier:
        return self.extended(self.exemplars)

    def exemplars(self, step: int) -> Samples:
        """What step `step` may use of earlier classes."""
        if not self.candidate.by_difficulty:
            return self.experiment.memory(step, self.seed)
        return concatenate([self.by_difficulty[earlier] for earlier in range(step)])

    @cached_property
    def by_difficulty(self) -> list[Samples]:
        """The exemplars of the base and of each step: half as many to one and a half times as many of each class.

        The more of a class's images lie nearer to the mean of another class of its step in the base's features, the
        more are kept. On average a class keeps as many as otherwise.
        """
        experiment, number = self.experiment, self.experiment.plan.exemplars
        found = []
        for step in range(experiment.steps):
            images = experiment.training_images(step)
            features = experiment.features(experiment.base, images)[0, :, 0]
            shares = np.argsort(np.argsort(confusion(features, images.labels))) / max(len(images.classes) - 1, 1)
            counts = np.rint(number * (0.5 + shares)).astype(int)
            kept = [keep(images.of_classes([name]), per_class=max(int(count), 1), seed=self.seed)
                    for name, count in zip(images.classes, counts, strict=True)]  # fmt: skip
            found.append(concatenate(kept))
        return found

    @cached_property
    def our_halves(self) -> tuple[Half, Half]:
        return self.halves(self.ours)

    def extended(self, memory: Callable[[int], Samples]) -> Classifier:
        """The base with one branch for each step; `memory` gives the old images that a step may use."""
        model = self.experiment.base.rebuilt(())
        for step in range(1, self.experiment.steps + 1):
            model = self.step(model, self.experiment.training_images(step), memory(step))
        return model

    def step(
        self, model: Classifier, new: Samples, memory: Samples, branch: str | None = None, epochs: int | None = None
    ) -> Classifier:
        experiment, changed = self.experiment, self.candidate
        dev, test = experiment.halves(experiment.steps)
        epochs = epochs or changed.epochs or experiment.plan.epochs
        extension = Extension(
            model,
            DataSplit(new, memory if changed.exemplars else None, dev, test, "dev"),
            ExtendConfig(branch=branch or self.branch, seed=self.seed, epochs=epochs),
            device=experiment.device,
            images=experiment.images,
            on_progress=experiment.on_progress,
        )
        effort = extension.plan.effort
        if changed.views is not None:
            effort = replace(effort, views=changed.views)
        if changed.exemplar_share is not None:
            effort = replace(effort, exemplar_share=changed.exemplar_share)
        extension.plan = replace(extension.plan, effort=effort)
        corrections = changed.corrections_after if self.corrections else None
        stage_one = replace(extension.recipe.stage_one, corrections_after=corrections)
        if changed.distillation is not None:
            stage_one = replace(stage_one, distillation=changed.distillation)
        extension.recipe = replace(extension.recipe, stage_one=stage_one)
        with changed.training():
            step, _ = extension.train_branch()
        extended = model.extended(step).to(experiment.device)
        if changed.fused and len(extended.steps) == experiment.steps:
            extended.fused.deltas = list(extension.train_deltas(extended).at(0, 0))
        return extended

    def one_branch(self, branch: str | None = None) -> Classifier:
        """One branch for all new classes, with all images of all classes."""
        train = self.experiment.train
        return self.step(
            self.experiment.base.rebuilt(()),
            train.select(train.origin > 0).with_origin(1),
            train.select(train.origin == 0),
            branch,
            self.one_branch_epochs,
        )

    def halves(self, model: Classifier) -> tuple[Half, Half]:
        """Columns in the order of the experiment's label space, whichever branches the model has."""
        space = self.experiment.space(self.experiment.steps)
        order = [list(model.space.classes).index(name) for names in space.branches for name in names]
        dev, test = (self.half(model, half, order) for half in self.experiment.halves(self.experiment.steps))
        return dev, test

    def half(self, model: Classifier, half: Samples, order: list[int]) -> Half:
        columns = logit_columns(model, self.experiment.features(model, half)[0])
        return columns[:, order], self.experiment.labels(half, self.experiment.steps)

    def scored(self, halves: tuple[Half, Half]) -> Scores:
        return score_dial(*halves, self.experiment.space(self.experiment.steps), PAPER_GOALS)

    def of(self, goal: str, setting: tuple[float, ...], answers: list[Ints]) -> Scored:
        """From predictions of test and of dev by our model."""
        dev, test = self.our_halves
        space = self.experiment.space(self.experiment.steps)
        return Scored.of(goal, setting, answers, (test[1], dev[1]), space)


def confusion(features: torch.Tensor, labels: Ints) -> Floats:
    """For every class the share of its images whose nearest class mean is another's."""
    of = torch.from_numpy(labels).to(features.device)
    unit = torch.nn.functional.normalize(features, dim=1)
    member = torch.nn.functional.one_hot(of).to(unit)
    share = member / member.sum(0)
    wrong = torch.cdist(unit, share.T @ unit).argmin(1) != of
    return (share.T @ wrong.to(unit)).double().cpu().numpy()


def ours(run: Run) -> Scores:
    return run.scored(run.our_halves)


def all_images(run: Run) -> Scores:
    train = run.experiment.train
    return run.scored(run.halves(run.extended(lambda step: train.select(train.origin < step))))


def one_branch(run: Run) -> Scores:
    return run.scored(run.halves(run.one_branch()))


def trunk_unfrozen(run: Run) -> Scores:
    first = run.experiment.base.backbone.names[0]
    return run.scored(run.halves(run.one_branch(first)))


def perfect_routing(run: Run) -> Scores:
    """Every image is classified among the classes of its own part: the base's, or those of its step."""
    space = run.experiment.space(run.experiment.steps)
    answers = []
    for columns, labels in run.our_halves[::-1]:
        part = space.split_of_class[labels]
        own = space.branch_of_column[None] == part[:, None]
        answers.append(space.class_of_column[np.where(own, columns, -np.inf).argmax(1)])
    return {goal: run.of(goal, (), answers) for goal in PAPER_GOALS}


def perfect_dial(run: Run) -> Scores:
    """The dial and the offsets of the steps are chosen on the images that measure them."""
    space = run.experiment.space(run.experiment.steps)
    scores: Scores = {}
    for goal in PAPER_GOALS:
        answers = []
        for half in run.our_halves[::-1]:
            chosen = score_dial(half, half, space, [goal])[goal]
            biases = np.array(chosen.offsets or [0.0] * run.experiment.steps) + chosen.setting[0]
            answers.append(predict(half[0], space, biases.tolist()))
        scores[goal] = run.of(goal, chosen.setting, answers)
    return scores


# Candidates.


def joint_head(run: Run) -> Scores:
    """A new head over the concatenated features of all our branches, trained on balanced exemplars."""
    experiment, steps = run.experiment, run.experiment.steps
    task = experiment.task(steps, run.seed)
    scorer = featcat.learn(run.ours, task)
    with torch.no_grad():
        found = [
            scorer.head.eval()(experiment.features(run.ours, half)[0]).double().cpu().numpy()
            for half in experiment.halves(steps)
        ]
    space = experiment.space(steps)
    return run.scored(
        tuple(
            (scores[:, space.class_of_column], experiment.labels(half, steps))
            for scores, half in zip(found, experiment.halves(steps), strict=True)
        )  # type: ignore[arg-type]
    )


def candidate(changed: Candidate) -> Callable[[Run], Scores]:
    """Our recipe with something changed."""
    return lambda run: run.scored(run.halves(replace(run, candidate=changed).ours))


def deeper(run: Run) -> Scores:
    """Every branch clones one stage more."""
    return run.scored(run.halves(replace(run, branch=run.experiment.base.backbone.names[-2]).ours))


@torch.no_grad()
def flips(run: Run) -> Scores:
    """Logits averaged over each image and its mirror image."""
    model, halves = run.ours, []
    for half in run.experiment.halves(run.experiment.steps):
        images = run.experiment.images(half)
        columns = []
        for batch in images.plain(in_order(len(images), 500)):
            both = [
                model.fused.columns(model.features(model.backbone.arrange(each))) for each in (batch, batch.flip(3))
            ]
            columns.append((both[0] + both[1]) / 2)
        halves.append((torch.cat(columns).double().cpu().numpy(), run.experiment.labels(half, run.experiment.steps)))
    return run.scored((halves[0], halves[1]))


def compacted(run: Run) -> Scores:
    """All step branches of ours distilled into one from the exemplars, as `branchout compact` does; one offset only."""
    experiment, steps = run.experiment, run.experiment.steps
    dev, _ = experiment.halves(steps)
    model = run.ours
    points, _ = choose_point(
        model,
        None,
        experiment.features(model, dev)[0],
        experiment.labels(dev, steps),
        recipe=BRANCHOUT,
        goal="balanced",
    )
    memory = concatenate([experiment.kept(t, experiment.per_class(steps), run.seed) for t in range(steps + 1)])
    config = CompactConfig(seed=run.seed)
    if experiment.plan.epochs:
        config = replace(config, epochs=2 * experiment.plan.epochs)
    small = Compaction(
        SavedModel(model, (points,) * steps, ()), memory, config, val=dev, device=experiment.device,
        on_progress=experiment.on_progress,
    ).run()  # fmt: skip
    return one_offset(run, run.halves(small.model))


def one_offset(run: Run, halves: tuple[Half, Half]) -> Scores:
    """As `Run.scored`, but with the dial alone: a model with one step has one offset. Parts are those of all steps."""
    space = run.experiment.space(run.experiment.steps)
    scores: Scores = {}
    for goal in PAPER_GOALS:
        chosen, answers = [], []
        for here, there in (halves, halves[::-1]):
            frontier = dial_frontier(*here, space)
            chosen.append(float(frontier.settings[frontier.choose(goal), 0]))
            answers.append(predict(there[0], space, chosen[-1]))
        labels = (halves[1][1], halves[0][1])
        scores[goal] = Scored.of(goal, (chosen[0],), answers, labels, space)
    return scores


@dataclass(frozen=True)
class Rung:
    label: str
    measure: Callable[[Run], Scores]
    photos_only: bool = False
    corrects: bool = True
    """Whether it changes with --no-corrections; one branch for all steps has no earlier logits to correct."""


LADDER = {
    "ours": Rung("ours", ours),
    "all-images": Rung("all images of old classes instead of exemplars in stage I", all_images),
    "one-branch": Rung("one branch for all new classes, all images, trunk frozen", one_branch, corrects=False),
    "trunk-unfrozen": Rung("the same with the whole network cloned and trained", trunk_unfrozen, corrects=False),
    "perfect-routing": Rung("ours, each image classified among the classes of its own step", perfect_routing),
    "perfect-dial": Rung("ours, dial and offsets chosen on the test images", perfect_dial),
}
CANDIDATES = {
    "compact": Rung("ours, all step branches distilled into one", compacted),
    "joint-head": Rung("a new head over the features of all branches, balanced exemplars", joint_head),
    "deeper": Rung("every branch clones one stage more", deeper),
    **{
        name: Rung(label, candidate(changed), corrects=changed.corrections_after != 0)
        for name, (label, changed) in candidates.CANDIDATES.items()
    },
    "flip": Rung("test-time flips", flips, photos_only=True),
}
RUNGS = {**LADDER, **CANDIDATES}

NO_CORRECTIONS = "-no-corrections"
"""Ends the names of rows in which no branch corrects earlier logits."""


def label_of(name: str) -> str:
    """Of a row, by its name."""
    plain = name.removesuffix(NO_CORRECTIONS)
    return RUNGS[plain].label + (", no corrections" if name != plain else "")
