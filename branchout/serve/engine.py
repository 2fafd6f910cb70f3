"""From pixels to all that is told of a picture: the answer, what the model said before, what each branch says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from branchout.api import Model
from branchout.data.decode import Kind, UnreadableImage, decode, image_size
from branchout.errors import BranchoutError
from branchout.model.heads import FusedHead
from branchout.serve.limits import JPEG_COST, JPEG_PIXELS, Limits
from branchout.serve.operating_points import OperatingPoint, Points

Told = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Question:
    """One picture and what is wanted of it."""

    pixels: Tensor
    """As `Preprocessing.prepare` makes it: uint8, C×size×size."""
    top: int
    flip: bool
    point: OperatingPoint


class Engine:
    """A model with its operating points. `answer` is for one thread at a time; the rest is for any."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.points = Points(model)
        self.before = self.points.before
        self._known_before: frozenset[str] = frozenset(() if self.before is None else self.before.space.classes)
        self._branch_of_column = torch.from_numpy(model.classifier.space.branch_of_column).to(model.device)

    def pixel_cost(self, source: BinaryIO | bytes, name: str, limits: Limits) -> float:
        """What decoding this image costs, in pixels. Reads the header only, and refuses what is too large."""
        try:
            width, height, jpeg = image_size(source)
        except UnreadableImage as error:
            raise UnreadableImage(error.kind, error.detail, name) from None
        most = limits.pixels * (JPEG_PIXELS if jpeg else 1)
        if width * height > most:
            detail = f"{width:,} × {height:,} pixels; the limit is {most / 1e6:,.3g} million"
            raise UnreadableImage(Kind.TOO_LARGE, detail, name)
        return width * height * (JPEG_COST if jpeg else 1)

    def pixels(self, source: BinaryIO | bytes, name: str, limits: Limits) -> Tensor:
        """An uploaded image as the network sees it. Slow enough to be kept off the event loop."""
        try:
            width, height, _ = image_size(source)
            # Large JPEGs are decoded at a reduced size that is still twice as large as needed.
            reduced = 2 * self._target if width * height > limits.small_pixels else None
            image = decode(source, max_pixels=JPEG_PIXELS * limits.pixels, shrink=reduced)
            self._check_shape(image, limits.pixels)
            prepared: Tensor = self.model.classifier.preprocessing.prepare(image)
            return prepared
        except UnreadableImage as error:
            raise UnreadableImage(error.kind, error.detail, name) from None
        except MemoryError:
            raise UnreadableImage(Kind.TOO_LARGE, "it does not fit into memory", name) from None

    @property
    def _target(self) -> int:
        """The shorter side of an image before the centre crop."""
        how = self.model.classifier.preprocessing
        return int(how.size / how.crop)

    def _check_shape(self, image: npt.NDArray[np.uint8], max_pixels: int) -> None:
        """Resized by its shorter side, a picture one pixel high would become as large as its length squared."""
        height, width = image.shape[:2]
        target = self._target
        if target * (target * max(height, width) // min(height, width)) > max_pixels:
            raise UnreadableImage(Kind.TOO_LARGE, f"{width:,} × {height:,} pixels are too long and thin")

    def check_flip(self, flip: bool) -> bool:
        if flip and self.model.classifier.kind == "glyph":
            raise BranchoutError("a mirrored character is another character: flip is for photographs")
        return flip

    @torch.no_grad()
    def answer(self, questions: Sequence[Question]) -> list[Told]:
        """Everything that depends on the pictures alone is computed once for all of them."""
        classifier = self.model.classifier
        pixels = torch.stack([question.pixels for question in questions]).to(self.model.device)
        images = classifier.backbone.arrange(classifier.preprocessing.normalise(pixels))
        plain = classifier.features(images)
        mirrored = [n for n, question in enumerate(questions) if question.flip]
        other = classifier.features(images[mirrored].flip(3)) if mirrored else []
        told: list[Told] = [{} for _ in questions]
        groups: dict[tuple[int, bool], list[int]] = {}
        for n, question in enumerate(questions):
            groups.setdefault((id(question.point), question.flip), []).append(n)
        for (_, flip), rows in groups.items():
            seen = [[h[rows] for h in plain]]
            if flip:
                places = [mirrored.index(n) for n in rows]
                seen.append([h[places] for h in other])
            top = max(questions[n].top for n in rows)
            for n, each in zip(rows, self._tell(seen, questions[rows[0]].point, top), strict=True):
                told[n] = _shortened(each, questions[n].top)
        return told

    def _tell(self, seen: list[list[Tensor]], point: OperatingPoint, top: int) -> list[Told]:
        """`seen` holds the feature vectors of the pictures, and of their mirror images if those count too."""
        head = point.head
        columns = [head.columns(h) for h in seen]
        shift = head.offsets.to(columns[0])[self._branch_of_column]
        answers = self._named(_mean([head.pooler(z + shift) for z in columns]), head, top)
        for answer in answers:
            for each in answer:
                each["new"] = self.before is not None and each["class"] not in self._known_before
        told: list[Told] = [{"answers": answer, "before": None} for answer in answers]
        if self.before is not None:
            # The branches of earlier steps come first, so what the earlier model reads is the beginning of the list.
            count = 1 + max(self.before.feature_of)
            earlier = _mean([self.before(h[:count]) for h in seen])
            for each, before in zip(told, self._named(earlier, self.before, top), strict=True):
                each["before"] = before
        for each, branches in zip(told, self._branches(_mean(columns) + shift, head, top), strict=True):
            each["branches"] = branches
        return told

    def _named(self, logits: Tensor, head: FusedHead, top: int) -> list[list[Told]]:
        return _top(logits.softmax(1), head.space.classes, top)

    def _branches(self, shifted: Tensor, head: FusedHead, top: int) -> list[list[Told]]:
        """For every picture what each branch would answer alone, and its share of the answer that was given."""
        shares = credit(head, shifted, self._branch_of_column).tolist()
        rows: list[list[Told]] = [[] for _ in shares]
        for number, names in enumerate(head.space.branches):
            own = _top(shifted[:, head.space.slice_of(number)].softmax(1), names, top)
            for row, share, best in zip(rows, shares, own, strict=True):
                row.append({"branch": "base" if number == 0 else f"step {number}", "share": share[number], "top": best})
        return rows


def credit(head: FusedHead, shifted: Tensor, branch_of_column: Tensor) -> Tensor:
    """How much of the probability each branch brought: (pictures, branches), each row adding up to 1.

    A class's probability is credited to the branch whose column the pooler took; where the pooler takes the mean, to
    all branches that know the class alike.
    """
    pooler = head.pooler
    spread = shifted[:, pooler.columns_of]
    if pooler.kind == "max":
        weight = torch.zeros_like(spread).scatter_(-1, spread.argmax(-1, keepdim=True), 1.0)
    else:
        counted = pooler.counted.to(shifted)
        weight = (counted / counted.sum(-1, keepdim=True)).expand_as(spread)
    brought = pooler(shifted).softmax(1).unsqueeze(-1) * weight
    shares = shifted.new_zeros(len(shifted), len(head.heads))
    return shares.index_add_(1, branch_of_column[pooler.columns_of].flatten(), brought.flatten(1)).clamp(max=1)


def _mean(views: Sequence[Tensor]) -> Tensor:
    return views[0] if len(views) == 1 else torch.stack(list(views)).mean(0)


def _top(probabilities: Tensor, names: Sequence[str], top: int) -> list[list[Told]]:
    best = probabilities.topk(min(top, len(names)), dim=1)
    return [
        [{"class": names[c], "probability": p} for p, c in zip(values, indices, strict=True)]
        for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def _shortened(told: Told, top: int) -> Told:
    """As many answers as this picture's sender asked for."""
    return {
        "answers": told["answers"][:top],
        "before": told["before"] and told["before"][:top],
        "branches": [{**branch, "top": branch["top"][:top]} for branch in told["branches"]],
    }
