"""Inference: from images to the answer, the answer before the last step, and the answer of each branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from branchout.api import Model
from branchout.data.decode import Kind, UnreadableImage, decode_picture, image_size
from branchout.errors import BranchoutError
from branchout.evaluate.explain import ClassScore, LogitSums, branch_shares
from branchout.model.heads import FusedHead
from branchout.serve.limits import JPEG_COST, JPEG_PIXELS, Limits
from branchout.serve.model_info import branch_name
from branchout.serve.operating_points import OperatingPoint, OperatingPoints
from branchout.training.out_of_memory import in_parts

Result = dict[str, Any]
"""`answers`, `before` and `branches` of schema.Prediction."""


@dataclass(frozen=True, eq=False)
class Question:
    """One image and what is asked about it."""

    pixels: Tensor
    """As `Preprocessing.prepare` returns it: uint8, C×size×size."""
    top: int
    flip: bool
    point: OperatingPoint
    expect: str | None = None
    """A class to compare with the one that wins."""


class Engine:
    """A model with its operating points. `answer` must be called by one thread at a time."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.points = OperatingPoints(model)
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

    def small_image(
        self, source: BinaryIO | bytes, name: str, limits: Limits, left: float
    ) -> tuple[float, Tensor | None]:
        """The cost of an image and, if that is small and not above `left`, its pixels: one call instead of two."""
        cost = self.pixel_cost(source, name, limits)
        return cost, self.pixels(source, name, limits) if cost <= min(left, limits.small_pixels) else None

    def pixels(self, source: BinaryIO | bytes, name: str, limits: Limits) -> Tensor:
        """An uploaded image as the network sees it. Slow enough to be kept off the event loop."""
        try:
            width, height, _ = image_size(source)
            # Large JPEGs are decoded at a reduced size that is still twice as large as needed.
            reduced = 2 * self._target if width * height > limits.small_pixels else None
            picture = decode_picture(source, max_pixels=JPEG_PIXELS * limits.pixels, shrink=reduced)
            self._check_shape(*picture.size, limits.pixels)
            prepared: Tensor = self.model.classifier.preprocessing.prepare(picture)
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

    def _check_shape(self, width: int, height: int, max_pixels: int) -> None:
        """Resized by its shorter side, an image one pixel high would have as many pixels as its length squared."""
        target = self._target
        if target * (target * max(height, width) // min(height, width)) > max_pixels:
            raise UnreadableImage(Kind.TOO_LARGE, f"{width:,} × {height:,} pixels are too long and thin")

    def check(self, *, flip: bool, expect: str | None) -> None:
        """Refuse what cannot be asked, before an image is read."""
        space = self.model.classifier.space
        if expect is not None:
            space.index([expect])
        if flip and self.model.classifier.kind == "glyph":
            raise BranchoutError("flip is for photographs: a mirrored character is another character")

    @torch.no_grad()
    def answer(self, questions: Sequence[Question]) -> list[Result]:
        """Features are computed once for all images; heads once for all that ask for the same."""
        classifier = self.model.classifier
        pixels = torch.stack([question.pixels for question in questions]).to(self.model.device)
        images = classifier.backbone.arrange(classifier.preprocessing.normalise(pixels))
        features = in_parts(classifier.features, images)
        flipped = [n for n, question in enumerate(questions) if question.flip]
        flipped_features = in_parts(classifier.features, images[flipped].flip(3)) if flipped else []
        results: list[Result] = [{} for _ in questions]
        groups: dict[tuple[int, bool, int], list[int]] = {}
        for n, question in enumerate(questions):
            groups.setdefault((id(question.point), question.flip, question.top), []).append(n)
        for (_, flip, top), rows in groups.items():
            views = [[h[rows] for h in features]]
            if flip:
                places = [flipped.index(n) for n in rows]
                views.append([h[places] for h in flipped_features])
            for n, each in zip(rows, self._results(views, questions[rows[0]].point, top), strict=True):
                results[n] = each
        for n, question in enumerate(questions):
            if question.expect is not None:
                results[n]["why"] = _why(question.point.head, [h[n : n + 1] for h in features], question.expect)
        return results

    def _results(self, views: list[list[Tensor]], point: OperatingPoint, top: int) -> list[Result]:
        """`views` holds the features of the images, and those of the mirrored images if these count too."""
        head = point.head
        columns = [head.columns(h) for h in views]
        shift = head.bias.to(columns[0])[self._branch_of_column]
        answers = _top(_mean([head.pooler(z + shift) for z in columns]), head.space.classes, top)
        for answer in answers:
            for each in answer:
                each["new"] = self.before is not None and each["class"] not in self._known_before
        results: list[Result] = [{"answers": answer, "before": None} for answer in answers]
        if self.before is not None:
            earlier = _mean([self.before(h) for h in views])
            for each, before in zip(results, _top(earlier, self.before.space.classes, top), strict=True):
                each["before"] = before
        for each, branches in zip(results, self._branches(_mean(columns), shift, head, top), strict=True):
            each["branches"] = branches
        return results

    def _branches(self, columns: Tensor, shift: Tensor, head: FusedHead, top: int) -> list[list[Result]]:
        """For each image the answer of each branch alone, and its share of the answer."""
        shares, shifted = branch_shares(head, columns).tolist(), columns + shift
        rows: list[list[Result]] = [[] for _ in shares]
        for number, names in enumerate(head.space.branches):
            own = _top(shifted[:, head.space.slice_of(number)], names, top)
            for row, share, best in zip(rows, shares, own, strict=True):
                row.append({"branch": branch_name(number), "share": share[number], "top": best})
        return rows


def _why(head: FusedHead, features: list[Tensor], expect: str) -> Result:
    """How the logits of the winner and of an expected class come about: `why` of schema.Prediction."""
    sums = LogitSums.of(head, features)
    found = sums.expected(expect)

    def plain(score: ClassScore) -> Result:
        return {"class": score.name, "probability": score.probability, "logit": score.logit, "parts": score.parts()}

    return {
        "winner": plain(sums.score(int(sums.pooled.argmax()))),
        "expected": plain(found.score),
        "place": found.place,
        "lead": found.lead,
        "dial_change": found.dial_change,
    }


def _mean(views: Sequence[Tensor]) -> Tensor:
    return views[0] if len(views) == 1 else torch.stack(list(views)).mean(0)


def _top(logits: Tensor, names: Sequence[str], top: int) -> list[list[Result]]:
    best = logits.softmax(1).topk(min(top, len(names)), dim=1)
    return [
        [{"class": names[c], "probability": p} for p, c in zip(values, indices, strict=True)]
        for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
