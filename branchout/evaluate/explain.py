"""Why an image gets its answer: the logits of each branch, what deltas and dial add, and how they are pooled.

Every logit of the fused model is a sum: the branch's own logit, plus its deltas, plus the dial. The parts here are the
numbers that the model adds, in its own precision and order, so (own + delta) + dial is its logit to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from branchout.evaluate.compare import logits
from branchout.labels import OVERLAP, branch_name
from branchout.model.classifier import Classifier


@dataclass(frozen=True)
class Column:
    """One branch's logit for one class, and its parts."""

    branch: int
    own: float
    """From the branch's own frozen head."""
    delta: float
    """Added from the features of the other branches."""
    dial: float
    logit: float
    counts: bool
    """Whether the pooler uses it: max uses the largest column of the class, average all of them."""


@dataclass(frozen=True)
class ClassScore:
    """One class among the most probable ones."""

    name: str
    probability: float
    logit: float
    columns: tuple[Column, ...]
    """One for every branch that knows the class."""

    def parts(self) -> dict[str, float]:
        """Own logit, deltas and dial of the pooled columns; they add up to the logit."""
        used = [column for column in self.columns if column.counts]
        return {part: sum(getattr(c, part) for c in used) / len(used) for part in ("own", "delta", "dial")}

    @property
    def branch(self) -> int:
        """The branch with the largest logit for the class."""
        return max(self.columns, key=lambda column: column.logit).branch


@dataclass(frozen=True)
class Neighbour:
    """A labelled image whose features in the winning branch are similar."""

    file: str
    name: str
    cosine: float


@dataclass(frozen=True)
class LabelledFeatures:
    """Labelled images to search for neighbours: features (images × feature vectors × k), files and class names."""

    features: Tensor
    files: Sequence[str]
    names: Sequence[str]
    shown: int = 5

    def nearest(self, vector: Tensor, number: int) -> tuple[Neighbour, ...]:
        """The images with the highest cosine to a feature vector; `number` is the vector's index."""
        cosines = F.cosine_similarity(vector, self.features[:, number].to(vector))
        values, places = cosines.topk(min(self.shown, len(cosines)))
        return tuple(
            Neighbour(self.files[n], self.names[n], value)
            for n, value in zip(places.tolist(), values.tolist(), strict=True)
        )


@dataclass(frozen=True)
class Explanation:
    """How the answer to one image comes about."""

    answers: tuple[ClassScore, ...]
    """The most probable classes of the fused model, best first."""
    branches: tuple[tuple[tuple[str, float], ...], ...]
    """For every branch its own best classes and their logits."""
    pooler: str
    own_answer: str
    """The answer from the branches' own logits, without deltas and dial."""
    without_dial: str
    """The answer with deltas and without the dial."""
    before: tuple[str, float] | None
    """The answer of the model before its last step, and its probability; None for a base model."""
    known: str
    """Where the winning class comes from: the base, a step, or several of them."""
    nearest: tuple[Neighbour, ...] = ()

    @property
    def winner(self) -> ClassScore:
        return self.answers[0]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able data; branches by name."""
        return {
            "answers": [
                {
                    "class": score.name,
                    "probability": score.probability,
                    "logit": score.logit,
                    "parts": score.parts(),
                    "columns": [{**asdict(c), "branch": branch_name(c.branch)} for c in score.columns],
                }
                for score in self.answers
            ],
            "known_to": self.known,
            "pooler": self.pooler,
            "branches": [
                {"branch": branch_name(n), "own": [{"class": name, "logit": value} for name, value in best]}
                for n, best in enumerate(self.branches)
            ],
            "own_logits_alone": self.own_answer,
            "without_dial": self.without_dial,
            "before": None if self.before is None else {"class": self.before[0], "probability": self.before[1]},
            "nearest": [{"file": n.file, "class": n.name, "cosine": n.cosine} for n in self.nearest],
        }


@torch.no_grad()
def explain(
    model: Classifier,
    before: Classifier | None,
    image: Tensor,
    *,
    top: int = 3,
    labelled: LabelledFeatures | None = None,
) -> Explanation:
    """Explain the answer to one normalised image (1×C×H×W); `before` is the model without its last step."""
    space, fused = model.space, model.fused
    features = model.features(model.backbone.arrange(image))
    own = fused.frozen_columns(features)
    delta = fused.delta_columns(features)
    added = torch.zeros_like(own) if delta is None else delta
    dial = fused.offsets[torch.from_numpy(space.branch_of_column).to(own.device)]
    columns = (own + added) + dial  # in the order in which the model adds them
    answers = _scores(model, torch.stack([own[0], added[0], dial, columns[0]], dim=1), fused.pooler(columns)[0], top)

    best = []
    for branch, names in enumerate(space.branches):
        values, places = own[0, space.slice_of(branch)].topk(min(top, len(names)))
        best.append(tuple((names[n], value) for n, value in zip(places.tolist(), values.tolist(), strict=True)))

    old = None
    if before is not None:
        probabilities = logits(before, image).softmax(1)[0]
        old = (before.space.classes[int(probabilities.argmax())], probabilities.max().item())
    number = fused.feature_of[answers[0].branch]
    return Explanation(
        answers,
        tuple(best),
        fused.pooler.kind,
        own_answer=space.classes[int(fused.pooler(own)[0].argmax())],
        without_dial=space.classes[int(fused.pooler(own + added)[0].argmax())],
        before=old,
        known=_known_to(model, answers[0].name),
        nearest=() if labelled is None else labelled.nearest(features[number], number),
    )


def _scores(model: Classifier, parts: Tensor, pooled: Tensor, top: int) -> tuple[ClassScore, ...]:
    """The best classes. `parts` has a row for each column: own logit, delta, dial and their sum."""
    space = model.space
    rows, probabilities = parts.tolist(), pooled.softmax(0)
    scores = []
    for number in pooled.topk(min(max(top, 2), len(pooled))).indices.tolist():
        of_class = np.flatnonzero(space.class_of_column == number).tolist()
        largest = max(of_class, key=lambda column: rows[column][3])
        columns = []
        for n in of_class:
            own, delta, dial, logit = rows[n]
            counts = model.fused.pooler.kind != "max" or n == largest
            columns.append(Column(int(space.branch_of_column[n]), own, delta, dial, logit, counts))
        scores.append(
            ClassScore(space.classes[number], probabilities[number].item(), pooled[number].item(), tuple(columns))
        )
    return tuple(scores)


def _known_to(model: Classifier, name: str) -> str:
    space = model.space
    split = int(space.split_of_class[space.index([name])[0]])
    if split != OVERLAP:
        return branch_name(split)
    return " and ".join(branch_name(n) for n, names in enumerate(space.branches) if name in names)
