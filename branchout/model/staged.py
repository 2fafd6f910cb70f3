"""A network as a sequence of named stages, and branches cloned from its last ones.

The last stage ends in the pooled feature vector h; a head computes logits from h. A branch is a clone of the last stage
or stages: it has the same input as the original and learns a feature vector of its own. A branch may also clone a
single module and share all others with the backbone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from branchout.errors import BranchoutError, did_you_mean, some

SAFE_CHANNELS = 16
"""Input channels a strided 1×1 convolution needs to be trained in `channels_last` on a CPU.

With fewer channels than floats in a vector (16 with AVX-512, 8 with AVX2), oneDNN's gradient of the weights writes
beyond its memory: https://github.com/uxlfoundation/oneDNN/issues/6035 (torch 2.14 and 2.15). Which images and batches
crash depends on their size and on the number of threads. From 16 on, any number is safe.
"""


class StageSequence(nn.Module):
    """Named stages, one after the other.

    A stage's name is its path, dots included (`layer4`, `blocks.5`), so that the keys of the state dict begin with the
    names that users type: `layer4.0.conv2.weight`.
    """

    def __init__(self, stages: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.names = tuple(name for name, _ in stages)
        self.frozen = False
        for name, stage in stages:
            *folders, leaf = name.split(".")
            place: nn.Module = self
            for folder in folders:
                if folder not in dict(place.named_children()):
                    place.add_module(folder, nn.Module())
                place = place.get_submodule(folder)
            place.add_module(leaf, stage)

    def _stages(self) -> list[nn.Module]:
        return [self.get_submodule(name) for name in self.names]

    def run(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """The output of stages[start:stop] for the input x."""
        for stage in self._stages()[start:stop]:
            x = stage(x)
        return x

    def inputs_of(self, x: Tensor, starts: Sequence[int]) -> dict[int, Tensor]:
        """The inputs of the stages numbered `starts`, for the input x of the first; each stage runs once."""
        found = {}
        at = 0
        for start in sorted(set(starts)):
            x = self.run(x, at, start)
            found[start] = x
            at = start
        return found

    def forward(self, x: Tensor) -> Tensor:
        """The pooled feature vector h (N, k)."""
        return self.run(x)

    def train(self, mode: bool = True) -> Self:
        """As in torch, but frozen stages stay in eval mode."""
        return super().train(mode and not self.frozen)

    def freeze(self) -> Self:
        """From now on nothing changes: no gradients, no BatchNorm statistics, no dropout."""
        self.frozen = True
        return self.requires_grad_(False).eval()


class Backbone(StageSequence):
    """A network as named stages; the last one ends in the pooled feature vector h of length `features`."""

    def __init__(self, stages: Sequence[tuple[str, nn.Module]], features: int) -> None:
        super().__init__(stages)
        self.features = features
        self.narrow = any(
            isinstance(module, nn.Conv2d)
            and module.kernel_size == (1, 1)
            and max(module.stride) > 1
            and module.in_channels < SAFE_CHANNELS
            for module in self.modules()
        )

    def layout(self, device: torch.device) -> torch.memory_format:
        """The memory layout of this network on a device, for its weights, its branches and its images.

        One layout everywhere: another one rounds differently, and a loaded model must give the same logits.
        """
        contiguous = device.type == "mps" or (self.narrow and device.type == "cpu")
        return torch.contiguous_format if contiguous else torch.channels_last

    def arrange(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) in the layout that this network runs in."""
        return images.contiguous(memory_format=self.layout(images.device))

    def index(self, name: str) -> int:
        """The number of the stage called `name`."""
        if name not in self.names:
            raise BranchoutError(f"no stage is called {name!r}; {_branch_points(self)}")
        return self.names.index(name)


@dataclass(frozen=True)
class BranchPoint:
    """Where a branch leaves the backbone: the first cloned stage, and the one module to clone if not all of it."""

    start: int
    only: str | None = None


def branch_point(backbone: Backbone, text: str = "last") -> BranchPoint:
    """Parse a branch point.

    `last`: clone the last stage. A stage (`layer3`): clone it and all later ones. A module inside a stage
    (`layer4.0.conv2`): clone that module and the normalisation after it. `fc`: clone nothing; the new head uses the
    base's features.
    """
    if text in ("", "last"):
        return BranchPoint(len(backbone.names) - 1)
    if text == "fc":
        return BranchPoint(len(backbone.names))
    if text in backbone.names:
        return BranchPoint(backbone.index(text))
    for start, (name, stage) in enumerate(zip(backbone.names, backbone._stages(), strict=True)):
        if text.startswith(f"{name}."):
            inside = {path: module for path, module in stage.named_modules(prefix=name) if _has_parameters(module)}
            if text in inside:
                return BranchPoint(start, text)
            raise BranchoutError(f"{name} has no module {text!r} with weights to clone; it has {some(inside, 12)}")
    near = did_you_mean([text], ["last", "fc", *backbone.names])
    raise BranchoutError(f"cannot branch at {text!r}; {_branch_points(backbone)}.{near}")


class Branch(StageSequence):
    """Stages cloned from a backbone to be trained; made with `Branch.clone`.

    `own` names the modules that belong to the branch. All others are the backbone's own modules and stay frozen.
    """

    def __init__(self, stages: Sequence[tuple[str, nn.Module]], own: Sequence[str]) -> None:
        super().__init__(stages)
        self.own = tuple(own)
        for parameter in self.own_parameters():
            parameter.requires_grad_(True)
        self.eval()

    @classmethod
    def clone(cls, backbone: Backbone, point: BranchPoint) -> Branch:
        """A trainable copy of the backbone's stages from `point` on. The backbone is frozen."""
        backbone.freeze()
        own = backbone.names[point.start :] if point.only is None else _with_norm(backbone, point.only)
        shared: dict[int, object] = {}  # deepcopy does not copy these
        for path, module in backbone.named_modules():
            if any(_within(path, name) for name in own):
                continue
            if any(_within(name, path) for name in own):  # around an own module: copied, but not its own tensors
                tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                shared.update((id(tensor), tensor) for tensor in tensors)
            else:
                shared[id(module)] = module
        stages = copy.deepcopy(backbone._stages()[point.start :], shared)
        return cls(list(zip(backbone.names[point.start :], stages, strict=True)), own)

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the branch's own modules; shared ones are the backbone's and stay in eval mode."""
        self.training = mode and not self.frozen
        for name in self.own:
            self.get_submodule(name).train(self.training)
        return self

    def own_parameters(self) -> Iterator[nn.Parameter]:
        for name in self.own:
            yield from self.get_submodule(name).parameters()

    @property
    def parameter_count(self) -> int:
        """How many parameters the branch adds to the model."""
        return sum(parameter.numel() for parameter in self.own_parameters())

    def own_state_dict(self) -> dict[str, Tensor]:
        """The branch's own tensors, which are saved beside the backbone's."""
        return {key: value for key, value in self.state_dict().items() if any(_within(key, name) for name in self.own)}


def _with_norm(backbone: Backbone, path: str) -> tuple[str, ...]:
    """A module and, for a convolution or a linear layer, the normalisation of its output.

    That is the next module beside it that has weights, if it normalises as many channels as come out: conv2 → bn2.
    """
    module = backbone.get_submodule(path)
    if not isinstance(module, nn.Conv2d | nn.Linear):
        return (path,)
    width = module.out_channels if isinstance(module, nn.Conv2d) else module.out_features
    parent, _, leaf = path.rpartition(".")
    siblings = list(backbone.get_submodule(parent).named_children())
    following = siblings[[name for name, _ in siblings].index(leaf) + 1 :]
    name, after = next(((name, m) for name, m in following if _has_parameters(m)), ("", None))
    norms = nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm
    return (path, f"{parent}.{name}") if isinstance(after, norms) and after.weight.shape[-1] == width else (path,)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _within(path: str, outer: str) -> bool:
    """Whether the module or tensor at `path` is the one at `outer` or lies inside it; the root, "", holds all."""
    return outer in ("", path) or path.startswith(f"{outer}.")


def _branch_points(backbone: Backbone) -> str:
    last = backbone.names[-1]
    inner = [
        path for path, module in backbone._stages()[-1].named_modules(prefix=last) if isinstance(module, nn.Conv2d)
    ]
    example = f" (such as {inner[-1]})" if inner else ""
    return f"name a stage ({', '.join(backbone.names)}), a module inside one{example}, last or fc"
