"""Networks of torchvision: their published weights, and how each family is split into stages.

`timm_adapters` says what a splitter does, and has the register of all.
"""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError, unknown
from branchout.model.timm_adapters import Stages, numbered, sequence, splitter_for, staged

PREFIX = "torchvision:"


def check(name: str) -> str:
    """torchvision's own name for `torchvision:NAME`; an unknown one is an error that lists the nearest."""
    name = name.removeprefix(PREFIX)
    known = torchvision.models.list_models(torchvision.models)
    if name not in known:
        raise unknown("torchvision network", name, known)
    return name


def build(name: str, classes: int) -> Any:
    """An untrained network for classification."""
    try:
        return torchvision.models.get_model(check(name), weights=None, num_classes=classes)
    except NotImplementedError:  # without memory for weights; RegNet computes its widths with tensors
        with torch.device("cpu"):
            network = torchvision.models.get_model(name, weights=None, num_classes=1).to("meta")
        network.fc = nn.Linear(network.fc.in_features, classes)
        return network


def published(name: str) -> tuple[dict[str, Tensor], tuple[str, ...], Preprocessing]:
    """The tensors, class names and preprocessing of torchvision's default weights, downloaded unless cached."""
    weights = torchvision.models.get_model_weights(check(name)).DEFAULT
    try:
        tensors = weights.get_state_dict(progress=False, check_hash=True, map_location="cpu", weights_only=True)
    except Exception as error:  # no connection, a wrong checksum
        raise BranchoutError(
            f"Download of the weights of {name} failed: {error}. Without a network connection, give the file: "
            f"--base {weights.url.rsplit('/', 1)[-1]} --arch {name}"
        ) from error
    names = tuple(weights.meta["categories"])
    return dict(tensors), names if len(names) != 1000 else (), preprocessing_of(weights.transforms())


def preprocessing_of(transform: Any) -> Preprocessing:
    size, resized = transform.crop_size[0], transform.resize_size[0]
    mean, std = tuple(transform.mean), tuple(transform.std)
    return Preprocessing(size, 3, mean, std, transform.interpolation.value, min(1.0, size / resized))


@splitter_for("torchvision.ResNet")
def _resnet(net: Any) -> tuple[Stages, nn.Module]:
    stem = sequence(conv1=net.conv1, bn1=net.bn1, relu=net.relu, maxpool=net.maxpool)
    layers = [(name, getattr(net, name)) for name in ("layer1", "layer2", "layer3", "layer4")]
    return staged(stem, layers, avgpool=net.avgpool, flatten=nn.Flatten()), net.fc


@splitter_for("torchvision.RegNet")
def _regnet(net: Any) -> tuple[Stages, nn.Module]:
    blocks = numbered("trunk_output", net.trunk_output)
    return staged(net.stem, blocks, avgpool=net.avgpool, flatten=nn.Flatten()), net.fc


@splitter_for("torchvision.SwinTransformer")
def _swin(net: Any) -> tuple[Stages, nn.Module]:
    (_, stem), *stages = numbered("stages", net.features)
    tail = {name: getattr(net, name) for name in ("norm", "permute", "avgpool", "flatten")}
    return staged(stem, stages, **tail), net.head


@splitter_for("torchvision.ConvNeXt")
def _convnext(net: Any) -> tuple[Stages, nn.Module]:
    (_, stem), *stages = numbered("stages", net.features)
    return staged(stem, stages, avgpool=net.avgpool, classifier=net.classifier[:-1]), net.classifier[-1]


@splitter_for("torchvision.EfficientNet", "torchvision.MobileNetV2", "torchvision.MobileNetV3")
def _efficientnet(net: Any) -> tuple[Stages, nn.Module]:
    (_, stem), *stages, (_, conv) = numbered("stages", net.features)
    pool = nn.AdaptiveAvgPool2d(1)
    stages[-1] = (stages[-1][0], sequence(blocks=stages[-1][1]))
    tail = {"conv": conv, "avgpool": pool, "flatten": nn.Flatten(), "classifier": net.classifier[:-1]}
    return staged(stem, stages, **tail), net.classifier[-1]


@splitter_for("torchvision.VisionTransformer")
def _vit(net: Any) -> tuple[Stages, nn.Module]:
    layers = [(f"layers.{number}", layer) for number, layer in enumerate(net.encoder.layers)]
    *others, (name, last) = layers
    tail = sequence(layer=last, ln=net.encoder.ln, pool=_ClassToken(), heads=net.heads[:-1])
    head = net.heads[-1]
    return [("stem", _Embedding(net)), *others, (name, tail)], head


class _Embedding(nn.Module):
    """A vision transformer's input: patches, class token, positions. Holds the network without its other parts."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        net.encoder.layers = nn.Sequential()
        net.encoder.ln = net.heads = nn.Identity()
        self.embed = net

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed._process_input(x)
        token = self.embed.class_token.expand(len(x), -1, -1)
        h: Tensor = self.embed.encoder(torch.cat([token, patches], dim=1))
        return h


class _ClassToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]
