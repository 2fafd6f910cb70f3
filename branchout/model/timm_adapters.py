"""How each timm family is split into named stages.

To support another family, write a function here that returns the network's stages, in order, and its final linear
layer; register it under the network's class name with `@splitter_for`. The last stage includes everything before that
layer (a last convolution, normalisation, pooling, dropout): its output is the pooled feature vector, and
head(backbone(x)) equals network(x) exactly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from branchout.errors import BranchoutError
from branchout.model.staged import Backbone

Stages = list[tuple[str, nn.Module]]
Splitter = Callable[[Any], tuple[Stages, nn.Module]]

SPLITTERS: dict[str, Splitter] = {}


def splitter_for(*class_names: str) -> Callable[[Splitter], Splitter]:
    """Register a splitter for networks of these classes."""

    def register(splitter: Splitter) -> Splitter:
        SPLITTERS.update(dict.fromkeys(class_names, splitter))
        return splitter

    return register


def split_network(network: nn.Module) -> tuple[Backbone, nn.Linear]:
    """Split a timm network into backbone and head. They reuse its modules: do not use the network afterwards."""
    family = type(network).__name__
    if family not in SPLITTERS:
        raise BranchoutError(
            f"Cannot split a {family} into stages; supported are {', '.join(sorted(SPLITTERS))}. "
            "To add it, write a function with @splitter_for in branchout/model/timm_adapters.py"
        )
    training = network.training
    stages, head = SPLITTERS[family](network)
    if not isinstance(head, nn.Linear):
        raise BranchoutError(f"This {family} ends in a {type(head).__name__}; a base must end in a linear layer")
    return Backbone(stages, head.in_features).train(training), head


@splitter_for("ResNet")
def _resnet(net: Any) -> tuple[Stages, nn.Module]:
    stem = _sequence(conv1=net.conv1, bn1=net.bn1, act1=net.act1, maxpool=net.maxpool)
    last = _sequence(**_children(net.layer4), global_pool=net.global_pool, drop=nn.Dropout(net.drop_rate))
    stages = [("layer1", net.layer1), ("layer2", net.layer2), ("layer3", net.layer3), ("layer4", last)]
    return [("stem", stem), *stages], net.fc


@splitter_for("RegNet")
def _regnet(net: Any) -> tuple[Stages, nn.Module]:
    fc = _take_fc(net.head)
    last = _sequence(**_children(net.s4), final_conv=net.final_conv, head=net.head)
    return [("stem", net.stem), ("s1", net.s1), ("s2", net.s2), ("s3", net.s3), ("s4", last)], fc


@splitter_for("ConvNeXt")
def _convnext(net: Any) -> tuple[Stages, nn.Module]:
    fc = _take_fc(net.head)
    *stages, (name, last) = _numbered("stages", net.stages)
    return [("stem", net.stem), *stages, (name, _sequence(**_children(last), norm_pre=net.norm_pre, head=net.head))], fc


@splitter_for("EfficientNet")
def _efficientnet(net: Any) -> tuple[Stages, nn.Module]:
    tail = {"conv_head": net.conv_head, "bn2": net.bn2, "global_pool": net.global_pool}
    *blocks, (name, last) = _numbered("blocks", net.blocks)
    last = _sequence(**_children(last), **tail, drop=nn.Dropout(net.drop_rate))
    return [("stem", _sequence(conv_stem=net.conv_stem, bn1=net.bn1)), *blocks, (name, last)], net.classifier


@splitter_for("MobileNetV3")
def _mobilenetv3(net: Any) -> tuple[Stages, nn.Module]:
    tail = {name: getattr(net, name) for name in ("global_pool", "conv_head", "norm_head", "act2", "flatten")}
    *blocks, (name, last) = _numbered("blocks", net.blocks)
    last = _sequence(**_children(last), **tail, drop=nn.Dropout(net.drop_rate))
    return [("stem", _sequence(conv_stem=net.conv_stem, bn1=net.bn1)), *blocks, (name, last)], net.classifier


@splitter_for("SwinTransformer")
def _swin(net: Any) -> tuple[Stages, nn.Module]:
    fc = _take_fc(net.head)
    *layers, (name, last) = _numbered("layers", net.layers)
    return [("stem", net.patch_embed), *layers, (name, _sequence(**_children(last), norm=net.norm, head=net.head))], fc


@splitter_for("VisionTransformer")
def _vit(net: Any) -> tuple[Stages, nn.Module]:
    *blocks, (name, block) = _numbered("blocks", net.blocks)
    last = _sequence(block=block, norm=net.norm, pool=_TokenPool(net), fc_norm=net.fc_norm, head_drop=net.head_drop)
    head = net.head
    return [("stem", _Embedding(net)), *blocks, (name, last)], head


@splitter_for("VisionTransformerDistilled")
def _distilled(net: Any) -> tuple[Stages, nn.Module]:
    raise BranchoutError(
        "A distilled transformer averages two heads, and a base must have one; "
        "use the network without distillation, such as deit_tiny_patch16_224 for deit_tiny_distilled_patch16_224"
    )


class _Embedding(nn.Module):
    """A vision transformer's input: patches, class token, positions. Holds the network without its other parts."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        net.blocks = nn.Sequential()
        net.norm = net.fc_norm = net.head_drop = net.head = nn.Identity()
        net.attn_pool = None
        self.embed = net

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embed.forward_features(x)
        return h


class _TokenPool(nn.Module):
    """A vision transformer's pooling over tokens: the class token, their mean or attention."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.attn_pool = net.attn_pool
        self.kind = net.global_pool
        self.prefix_tokens = net.num_prefix_tokens
        self.include_prefix = net.pool_include_prefix

    def forward(self, x: Tensor) -> Tensor:
        from timm.models.vision_transformer import global_pool_nlc

        if self.attn_pool is None:
            x = global_pool_nlc(x, self.kind, self.prefix_tokens, self.include_prefix)
        else:
            x = self.attn_pool(x if self.include_prefix else x[:, self.prefix_tokens :])
        return x


def _sequence(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def _children(stage: nn.Module) -> dict[str, nn.Module]:
    """The modules of a sequential stage, to append more modules to them under the same names."""
    return dict(stage.named_children())


def _numbered(prefix: str, stages: nn.Sequential) -> Stages:
    return [(f"{prefix}.{number}", stage) for number, stage in stages.named_children()]


def _take_fc(head: Any) -> nn.Module:
    """Remove the last layer from timm's head module, which then returns the pooled features."""
    fc: nn.Module = head.fc
    head.fc = nn.Identity()
    return fc
