"""Why an image gets its answer: the logits of each branch, what others and the dial add, and how they are pooled.

Every logit of the fused model is a sum: the branch's own logit, plus what other branches add to it by corrections,
deltas and class means, plus the dial. The logits here are the model's to the bit; the sum of the parts is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from branchout.evaluate.compare import logits
from branchout.labels import branch_name
from branchout.method.dial import prediction_changes
from branchout.model.classifier import Classifier
from branchout.model.heads import FusedHead


@dataclass(frozen=True)
class Column:
    """One branch's logit for one class, and its parts."""

    branch: int
    own: float
    """From the branch's own frozen head."""
    delta: float
    """Added from the features of the other branches, by corrections, deltas and class means."""
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
        """Own logit, what other branches add, and dial of the pooled columns; they add up to the logit."""
        used = [column for column in self.columns if column.counts]
        return {part: sum(getattr(c, part) for c in used) / len(used) for part in ("own", "delta", "dial")}

    @property
    def branch(self) -> int:
        """The branch with the largest logit for the class."""
        return max(self.columns, key=lambda column: column.logit).branch

    def to_dict(self) -> dict[str, Any]:
        return {
            "class": self.name,
            "probability": self.probability,
            "logit": self.logit,
            "parts": self.parts(),
            "columns": [{**asdict(c), "branch": branch_name(c.branch)} for c in self.columns],
        }


@dataclass(frozen=True)
class Expected:
    """A class that was expected, compared with the class that won."""

    score: ClassScore
    place: int
    """1 for the most probable class."""
    lead: dict[str, float]
    """By how much the winner's own logit, what other branches add, and dial exceed those of the expected class."""
    dial_change: float | None
    """The smallest change of the dial with which the expected class would win; None if there is none."""

    def to_dict(self) -> dict[str, Any]:
        return {**self.score.to_dict(), "place": self.place, "lead": self.lead, "dial_change": self.dial_change}


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
    """The answer from the branches' own logits alone."""
    without_dial: str
    """The answer with what other branches add and without the dial."""
    before: tuple[str, float] | None
    """The answer of the model before its last step, and its probability; None for a base model."""
    known: str
    """Where the winning class comes from: the base, a step, or several of them."""
    nearest: tuple[Neighbour, ...] = ()
    expected: Expected | None = None

    @property
    def winner(self) -> ClassScore:
        return self.answers[0]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able data; branches by name."""
        return {
            "answers": [score.to_dict() for score in self.answers],
            "expected": None if self.expected is None else self.expected.to_dict(),
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
    expect: str | None = None,
    labelled: LabelledFeatures | None = None,
) -> Explanation:
    """Explain the answer to one normalised image (1×C×H×W); `before` is the model without its last step.

    With `expect`, the name of a class, it is compared with the class that won.
    """
    space, fused = model.space, model.fused
    features = model.features(model.backbone.arrange(image))
    sums = LogitSums.of(fused, features)
    most = min(max(top, 2), len(sums.pooled))
    answers = tuple(sums.score(number) for number in sums.pooled.topk(most).indices.tolist())
    best = []
    for branch, names in enumerate(space.branches):
        values, places = sums.own[space.slice_of(branch)].topk(min(top, len(names)))
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
        own_answer=space.classes[int(fused.pooler(sums.own[None])[0].argmax())],
        without_dial=space.classes[int(fused.pooler((sums.own + sums.delta)[None])[0].argmax())],
        before=old,
        known=" and ".join(branch_name(n) for n, names in enumerate(space.branches) if answers[0].name in names),
        nearest=() if labelled is None else labelled.nearest(features[number], number),
        expected=None if expect is None else sums.expected(expect),
    )


@dataclass(frozen=True)
class LogitSums:
    """The parts of every column's logit for one image at one operating point."""

    head: FusedHead
    own: Tensor
    delta: Tensor
    dial: Tensor
    columns: Tensor
    """Their sum as the model adds it."""

    @classmethod
    def of(cls, head: FusedHead, features: Sequence[Tensor]) -> LogitSums:
        """From the feature vectors of one image, each of shape (1, k)."""
        own, fused = head.head_columns(features)[0], head.columns(features)[0]
        return cls(head, own, fused - own, head.shift, fused + head.shift)

    @cached_property
    def pooled(self) -> Tensor:
        """The logit of every class."""
        found: Tensor = self.head.pooler(self.columns[None])[0]
        return found

    def score(self, number: int) -> ClassScore:
        """How the logit of one class comes about."""
        space, pooled = self.head.space, self.pooled
        rows = torch.stack([self.own, self.delta, self.dial, self.columns], dim=1).tolist()
        of_class = np.flatnonzero(space.class_of_column == number).tolist()
        largest = max(of_class, key=lambda column: rows[column][3])
        columns = []
        for n in of_class:
            own, delta, dial, logit = rows[n]
            counts = self.head.pooler.kind != "max" or n == largest
            columns.append(Column(int(space.branch_of_column[n]), own, delta, dial, logit, counts))
        return ClassScore(
            space.classes[number], pooled.softmax(0)[number].item(), pooled[number].item(), tuple(columns)
        )

    def expected(self, name: str) -> Expected:
        """Why the class `name` did or did not win."""
        space, pooled = self.head.space, self.pooled
        number = int(space.index([name])[0])
        score, winner = self.score(number), self.score(int(pooled.argmax())).parts()
        lead = {part: winner[part] - value for part, value in score.parts().items()}
        place = 1 + int((pooled > pooled[number]).sum())
        return Expected(score, place, lead, self._dial_change(number) if len(space.branches) > 1 else None)

    def _dial_change(self, number: int) -> float | None:
        changes, answers = prediction_changes(
            self.columns[None].cpu().double().numpy(), self.head.space, self.head.pooler.kind
        )
        wins = np.flatnonzero(answers[0] == number)
        if not len(wins):
            return None
        # The stretches of the dial in which the class wins: from one change to the next.
        low = np.concatenate([[-np.inf], changes[0]])[wins]
        high = np.concatenate([changes[0], [np.inf]])[wins]
        nearest = np.clip(0.0, low, high)
        return float(nearest[np.abs(nearest).argmin()])


def branch_shares(head: FusedHead, columns: Tensor) -> Tensor:
    """The share of each branch in the probabilities, from logits before the dial: (images, branches), rows sum to 1.

    A class's probability is credited to the branch whose column the pooler chose; with a mean pooler it is divided
    equally between all branches that know the class.
    """
    pooler = head.pooler
    shifted = columns + head.shift.to(columns)
    spread = shifted[:, pooler.columns_of]
    if pooler.kind == "max":
        weight = torch.zeros_like(spread).scatter_(-1, spread.argmax(-1, keepdim=True), 1.0)
    else:
        counted = pooler.counted.to(shifted)
        weight = (counted / counted.sum(-1, keepdim=True)).expand_as(spread)
    probability = pooler(shifted).softmax(1).unsqueeze(-1) * weight
    shares = shifted.new_zeros(len(shifted), len(head.heads))
    return shares.index_add_(1, head.branch_of_column[pooler.columns_of].flatten(), probability.flatten(1)).clamp(max=1)
