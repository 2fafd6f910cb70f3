"""Why this answer: what each branch said, what deltas and dial added, and what the pooler made of it.

Every logit of the fused model is a sum: the branch's own logit, plus its deltas, plus the dial. The parts here are the
very numbers that the model adds, in its own precision and order, so (own + delta) + dial is its logit to the bit.
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
    """One branch's word on one class, and its parts."""

    branch: int
    own: float
    """What the branch's own frozen head says."""
    delta: float
    """What the other branches' features add."""
    dial: float
    logit: float
    counts: bool
    """Whether the pooler used it: under max the largest column of the class does, under average all do."""


@dataclass(frozen=True)
class Verdict:
    """One class among the model's answers."""

    name: str
    probability: float
    logit: float
    columns: tuple[Column, ...]
    """One for every branch that knows the class."""

    def parts(self) -> dict[str, float]:
        """Own logit, deltas and dial of what was pooled, which add up to the logit."""
        used = [column for column in self.columns if column.counts]
        return {part: sum(getattr(c, part) for c in used) / len(used) for part in ("own", "delta", "dial")}

    @property
    def branch(self) -> int:
        """The branch that speaks for the class: the one with the largest logit."""
        return max(self.columns, key=lambda column: column.logit).branch


@dataclass(frozen=True)
class Neighbour:
    """An image of the user's that looks alike to the winning branch."""

    file: str
    name: str
    cosine: float


@dataclass(frozen=True)
class Album:
    """Labelled images to look for neighbours in: their features (images × feature vectors × k) and what they are."""

    features: Tensor
    files: Sequence[str]
    names: Sequence[str]
    shown: int = 5

    def nearest(self, vector: Tensor, number: int) -> tuple[Neighbour, ...]:
        """The images whose feature vector of this number points most nearly the same way."""
        cosines = F.cosine_similarity(vector, self.features[:, number].to(vector))
        values, places = cosines.topk(min(self.shown, len(cosines)))
        return tuple(
            Neighbour(self.files[n], self.names[n], value)
            for n, value in zip(places.tolist(), values.tolist(), strict=True)
        )


@dataclass(frozen=True)
class Explanation:
    """One picture's answer, taken apart."""

    verdicts: tuple[Verdict, ...]
    """The best classes of the fused model, best first."""
    branches: tuple[tuple[tuple[str, float], ...], ...]
    """For every branch its own best classes and their own logits."""
    pooler: str
    alone: str
    """The answer if own logits were all."""
    without_dial: str
    """The answer with deltas and without the dial."""
    before: tuple[str, float] | None
    """The answer of the model before its last step, and its probability; None for a base model."""
    known: str
    """Where the winning class comes from: the base, a step, or several of them."""
    nearest: tuple[Neighbour, ...] = ()

    @property
    def winner(self) -> Verdict:
        return self.verdicts[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; branches by the names that people know."""
        return {
            "answers": [
                {
                    "class": verdict.name,
                    "probability": verdict.probability,
                    "logit": verdict.logit,
                    "parts": verdict.parts(),
                    "columns": [{**asdict(c), "branch": branch_name(c.branch)} for c in verdict.columns],
                }
                for verdict in self.verdicts
            ],
            "known_to": self.known,
            "pooler": self.pooler,
            "branches": [
                {"branch": branch_name(n), "own": [{"class": name, "logit": value} for name, value in best]}
                for n, best in enumerate(self.branches)
            ],
            "own_logits_alone": self.alone,
            "without_dial": self.without_dial,
            "before": None if self.before is None else {"class": self.before[0], "probability": self.before[1]},
            "nearest": [{"file": n.file, "class": n.name, "cosine": n.cosine} for n in self.nearest],
        }


@torch.no_grad()
def explain(
    model: Classifier, before: Classifier | None, image: Tensor, *, top: int = 3, album: Album | None = None
) -> Explanation:
    """Take the answer to one normalised picture (1×C×H×W) apart; `before` is the model without its last step."""
    space, fused = model.space, model.fused
    features = model.features(model.backbone.arrange(image))
    own = fused.frozen_columns(features)
    delta = fused.delta_columns(features)
    added = torch.zeros_like(own) if delta is None else delta
    dial = fused.offsets[torch.from_numpy(space.branch_of_column).to(own.device)]
    columns = (own + added) + dial  # as the model adds them
    pooled: Tensor = fused.pooler(columns)[0]
    probabilities = pooled.softmax(0)
    parts = torch.stack([own[0], added[0], dial, columns[0]], dim=1).tolist()

    verdicts = []
    for number in pooled.topk(min(max(top, 2), len(pooled))).indices.tolist():
        where = np.flatnonzero(space.class_of_column == number).tolist()
        largest = max(where, key=lambda column: parts[column][3])
        told = []
        for column in where:
            mine, others, turned, logit = parts[column]
            counts = fused.pooler.kind != "max" or column == largest
            told.append(Column(int(space.branch_of_column[column]), mine, others, turned, logit, counts))
        probability, logit = probabilities[number].item(), pooled[number].item()
        verdicts.append(Verdict(space.classes[number], probability, logit, tuple(told)))

    best_of = []
    for branch, names in enumerate(space.branches):
        values, places = own[0, space.slice_of(branch)].topk(min(top, len(names)))
        best_of.append(tuple((names[n], value) for n, value in zip(places.tolist(), values.tolist(), strict=True)))

    old = None
    if before is not None:
        said = logits(before, image).softmax(1)[0]
        old = (before.space.classes[int(said.argmax())], said.max().item())
    number = fused.feature_of[verdicts[0].branch]
    return Explanation(
        tuple(verdicts),
        tuple(best_of),
        fused.pooler.kind,
        alone=space.classes[int(fused.pooler(own)[0].argmax())],
        without_dial=space.classes[int(fused.pooler(own + added)[0].argmax())],
        before=old,
        known=_known_to(model, verdicts[0].name),
        nearest=() if album is None else album.nearest(features[number], number),
    )


def _known_to(model: Classifier, name: str) -> str:
    space = model.space
    split = int(space.split_of_class[space.index([name])[0]])
    if split != OVERLAP:
        return branch_name(split)
    return " and ".join(branch_name(n) for n, names in enumerate(space.branches) if name in names)
