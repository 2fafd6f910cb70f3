"""The classifier: a frozen base, one branch per step, and the fused head over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from branchout.data.preprocess import Preprocessing
from branchout.labels import LabelSpace
from branchout.model.class_means import ClassMeans
from branchout.model.heads import Correction, FusedHead, Head
from branchout.model.staged import Backbone, Branch


@dataclass(frozen=True)
class Step:
    """What one step added: its classes, its branch and head, and the stage where the branch starts."""

    names: tuple[str, ...]
    where: str
    """The branch point as the user wrote it: `layer4`, `layer4.0.conv2`, `fc`."""
    start: int
    """The backbone stage whose input is the branch's input; the number of stages if the branch clones nothing."""
    branch: Branch
    head: Head
    class_means: ClassMeans | None = None
    """For the classes of this step and all before it, while this is one of the last two steps."""
    correction: Correction | None = None
    """Of the logits of all branches before it."""


class StageEngine(Protocol):
    """The inputs of the backbone stages `starts`, computed elsewhere than in torch: see `method.running.engine`."""

    starts: tuple[int, ...]

    def __call__(self, images: Tensor) -> dict[int, Tensor]: ...

    def close(self) -> None:
        """Give back memory until the next call."""


class Classifier(nn.Module):
    """From images to one logit per class. All weights are frozen; training makes new branches, heads and deltas."""

    engine: StageEngine | None = None

    def __init__(
        self,
        arch: Mapping[str, Any],
        backbone: Backbone,
        head: Head,
        classes: Sequence[str],
        preprocessing: Preprocessing,
        kind: str = "photo",
        steps: Sequence[Step] = (),
        pooler: str = "max",
    ) -> None:
        super().__init__()
        self.arch = dict(arch)
        self.backbone = backbone.freeze()
        self.preprocessing = preprocessing
        self.kind = kind
        self.steps = tuple(steps)
        self.branches = nn.ModuleList(step.branch.freeze() for step in steps)
        heads = [head, *(step.head for step in steps)]
        for each in heads:
            each.requires_grad_(False).eval()
        # Branches that clone nothing use the base's feature vector, number 0.
        own = [step.start < len(backbone.names) for step in steps]
        feature_of = [0, *(sum(own[: n + 1]) if mine else 0 for n, mine in enumerate(own))]
        space = LabelSpace.of(classes, *(step.names for step in steps))
        means = steps[-1].class_means if steps else None
        self.fused = FusedHead(space, heads, feature_of, pooler, means, [step.correction for step in steps])
        self.fused.corrections.requires_grad_(False)

    @property
    def space(self) -> LabelSpace:
        return self.fused.space

    @property
    def has_linear_head(self) -> bool:
        """Whether heads are linear, as those of ImageNet networks are, and no cosine heads."""
        return isinstance(self.base_head, nn.Linear)

    @property
    def base_head(self) -> Head:
        return self.fused.heads[0]  # type: ignore[return-value]

    @property
    def own_branches(self) -> int:
        """How many steps have a branch with weights of its own; a head on the base's features has none."""
        return sum(step.branch.parameter_count > 0 for step in self.steps)

    def on_device(self, device: torch.device) -> Self:
        """This model, moved to a device in the memory layout it runs in there."""
        return self.to(device, memory_format=self.backbone.layout(device))  # type: ignore[call-overload, no-any-return]

    def rebuilt(self, steps: Sequence[Step], pooler: str | None = None) -> Classifier:
        """The same base with these steps. All weights are shared; deltas and dial are reset."""
        return Classifier(
            self.arch,
            self.backbone,
            self.base_head,
            self.space.branches[0],
            self.preprocessing,
            self.kind,
            steps,
            pooler or self.fused.pooler.kind,
        )

    def extended(self, step: Step) -> Classifier:
        """The model with one more branch. Class means are kept of the last two steps, for "before → after"."""
        return self.rebuilt([*(replace(each, class_means=None) for each in self.steps[:-1]), *self.steps[-1:], step])

    def activations(self, images: Tensor, starts: Sequence[int]) -> dict[int, Tensor]:
        """The inputs of the backbone stages numbered `starts`; each stage runs once."""
        engine = self.engine  # another thread may set it to None
        if engine is not None and set(starts) <= set(engine.starts):
            return engine(images)
        return self.backbone.inputs_of(images, starts)

    def features(self, images: Tensor) -> list[Tensor]:
        """The distinct feature vectors: the base's, then one for every branch that clones something."""
        return self.features_from(self.activations(images, self.feature_starts))

    @property
    def feature_starts(self) -> list[int]:
        """The stages whose inputs make the feature vectors: where the branches start, and the end."""
        return [*(step.start for step in self.steps), len(self.backbone.names)]

    def features_from(self, passed: Mapping[int, Tensor]) -> list[Tensor]:
        """The feature vectors from the inputs of the stages `feature_starts`."""
        end = len(self.backbone.names)
        return [passed[end], *(step.branch(passed[step.start]) for step in self.steps if step.start < end)]

    def forward(self, images: Tensor) -> Tensor:
        return self.fused(self.features(images))  # type: ignore[no-any-return]

    def parameter_counts(self) -> dict[str, int]:
        """Parameters of the base network, of each step's branch, of heads with class means, and of deltas with
        corrections."""
        counts = {"base": sum(p.numel() for p in self.backbone.parameters())}
        counts |= {f"step {n}": step.branch.parameter_count for n, step in enumerate(self.steps, 1)}
        counts["heads"] = sum(p.numel() for p in self.fused.heads.parameters())
        counts["deltas"] = sum(delta.numel() for delta in self.fused.deltas if delta is not None)
        counts["deltas"] += sum(p.numel() for p in self.fused.corrections.parameters())
        if self.fused.class_means is not None:
            counts["heads"] += sum(each.numel() for each in self.fused.class_means.buffers())
        return counts
