"""Residual networks: ResNet10, 18 and 50 with a stem for small or for large images, and CIFAR's ResNet-32."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet as published

from branchout.errors import unknown
from branchout.model.staged import Backbone


class _Residual:
    """The convolutions of a block around its shortcut; the ReLU after their sum can be left out."""

    last_relu = True

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if isinstance(self, Bottleneck):
            y = self.bn3(self.conv3(F.relu(y)))
        y = y + self.downsample(x)
        return F.relu(y) if self.last_relu else y


class BasicBlock(_Residual, published.BasicBlock):  # type: ignore[misc]
    """Two 3×3 convolutions."""


class Bottleneck(_Residual, published.Bottleneck):  # type: ignore[misc]
    """A 3×3 convolution, which carries the stride, between two 1×1 ones."""


@dataclass(frozen=True)
class Architecture:
    block: type[BasicBlock] | type[Bottleneck]
    depths: tuple[int, ...]
    """Blocks per stage; each stage doubles the width of the one before."""
    width: int = 64


ARCHITECTURES = {
    "resnet10": Architecture(BasicBlock, (1, 1, 1, 1)),
    "resnet18": Architecture(BasicBlock, (2, 2, 2, 2)),
    "resnet50": Architecture(Bottleneck, (3, 4, 6, 3)),
    "resnet32": Architecture(BasicBlock, (5, 5, 5), width=16),
}


def build(
    name: str,
    *,
    in_channels: int = 3,
    stem: Literal["small", "large"] = "small",
    width: int | None = None,
    last_relu: bool = True,
) -> Backbone:
    """A randomly initialised network.

    `stem` is small (3×3, stride 1, for images up to about 64 pixels) or large (7×7, stride 2, then pooling); `width`
    is the number of channels of the first stage. Without `last_relu` the last block has no ReLU, so that features can
    be negative; a saved model records this (`"last_relu": False`), because its weights do not show it.
    """
    if name not in ARCHITECTURES:
        raise unknown("architecture", name, ARCHITECTURES)
    architecture = ARCHITECTURES[name]
    width = width or architecture.width
    stages: list[tuple[str, nn.Module]] = [("stem", _stem(stem, in_channels, width))]
    inputs = width
    for number, depth in enumerate(architecture.depths):
        blocks = nn.Sequential()
        for position in range(depth):
            stride = 2 if number > 0 and position == 0 else 1
            last = number == len(architecture.depths) - 1 and position == depth - 1
            outputs = (width << number) * architecture.block.expansion
            block = architecture.block(inputs, width << number, stride, _shortcut(inputs, outputs, stride))
            block.last_relu = last_relu or not last
            blocks.append(block)
            inputs = outputs
        stages.append((f"layer{number + 1}", blocks))
    blocks.add_module("pool", nn.AdaptiveAvgPool2d(1))
    blocks.add_module("flatten", nn.Flatten())
    backbone = Backbone(stages, features=inputs)
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return backbone


def _stem(kind: str, in_channels: int, width: int) -> nn.Sequential:
    kernel, stride = (7, 2) if kind == "large" else (3, 1)
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(in_channels, width, kernel, stride, padding=kernel // 2, bias=False),
        "bn1": nn.BatchNorm2d(width),
        "relu": nn.ReLU(inplace=True),
    }
    if kind == "large":
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(OrderedDict(layers))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
