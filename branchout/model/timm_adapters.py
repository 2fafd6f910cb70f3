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

import torch
from torch import Tensor, nn

from branchout.errors import BranchoutError
from branchout.model.staged import Backbone

Stages = list[tuple[str, nn.Module]]
Splitter = Callable[[Any], tuple[Stages, nn.Module]]

SPLITTERS: dict[str, Splitter] = {}


def splitter_for(*class_names: str) -> Callable[[Splitter], Splitter]:
    """Register a splitter for networks of these classes; torchvision's are called `torchvision.ResNet`."""

    def register(splitter: Splitter) -> Splitter:
        SPLITTERS.update(dict.fromkeys(class_names, splitter))
        return splitter

    return register


def split_network(network: nn.Module) -> tuple[Backbone, nn.Linear]:
    """Split a network into backbone and head. They reuse its modules: do not use the network afterwards."""
    library = type(network).__module__.split(".")[0]
    family = f"{'torchvision.' if library == 'torchvision' else ''}{type(network).__name__}"
    if family not in SPLITTERS:
        raise BranchoutError(
            f"Cannot split a {family} into stages; supported are {', '.join(sorted(SPLITTERS))}. "
            "To add it, write a function with @splitter_for in branchout/model/timm_adapters.py"
        )
    training = network.training
    try:
        stages, head = SPLITTERS[family](network)
    except AttributeError as error:
        raise BranchoutError(f"This {family} is not built as others of its family: {error}") from error
    if not isinstance(head, nn.Linear):
        raise BranchoutError(f"This {family} ends in a {type(head).__name__}; a base must end in a linear layer")
    return Backbone(stages, head.in_features).train(training), head


def staged(stem: nn.Module, stages: Stages, **tail: nn.Module) -> Stages:
    """The stem and all stages; the last stage also runs the modules of `tail`."""
    *others, (name, last) = stages
    return [("stem", stem), *others, (name, sequence(**dict(last.named_children()), **tail))]


def sequence(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def numbered(prefix: str, stages: nn.Module) -> Stages:
    return [(f"{prefix}.{name}", stage) for name, stage in stages.named_children()]


@splitter_for("ResNet")
def _resnet(net: Any) -> tuple[Stages, nn.Module]:
    stem = sequence(conv1=net.conv1, bn1=net.bn1, act1=net.act1, maxpool=net.maxpool)
    layers = [(name, getattr(net, name)) for name in ("layer1", "layer2", "layer3", "layer4")]
    return staged(stem, layers, global_pool=net.global_pool, drop=nn.Dropout(net.drop_rate)), net.fc


@splitter_for("RegNet")
def _regnet(net: Any) -> tuple[Stages, nn.Module]:
    fc = _take_fc(net.head)
    stages = [(name, getattr(net, name)) for name in ("s1", "s2", "s3", "s4")]
    return staged(net.stem, stages, final_conv=net.final_conv, head=net.head), fc


@splitter_for("ConvNeXt", "SwinTransformer", "SwinTransformerV2", "SwinTransformerV2Cr", "MaxxVit", "TinyVit")
@splitter_for("ByobNet", "CspNet", "EdgeNeXt", "FastVit", "HighPerfGpuNet", "MambaOut", "MetaFormer")
@splitter_for("DaVit", "FocalNet", "GlobalContextVit", "NormFreeNet", "VovNet")
def _stem_and_stages(net: Any) -> tuple[Stages, nn.Module]:
    """Networks that run stem, stages, perhaps one more module, and a head with pooling."""
    fc = _take_fc(net.head)
    stem = net.patch_embed if hasattr(net, "patch_embed") else net.stem
    prefix = "layers" if hasattr(net, "layers") else "stages"
    stages = numbered(prefix, getattr(net, prefix))
    after = ("norm_pre", "norm", "final_conv", "final_act")
    tail = {name: getattr(net, name) for name in after if hasattr(net, name)}
    if type(net).__name__ not in ("ConvNeXt", "SwinTransformer"):  # their last stages run their children in order
        stages[-1] = (stages[-1][0], sequence(stage=stages[-1][1]))
    return staged(stem, stages, **tail, head=net.head), fc


@splitter_for("EfficientNet", "MobileNetV3")
def _efficientnet(net: Any) -> tuple[Stages, nn.Module]:
    pools_first = type(net).__name__ == "MobileNetV3"
    names = "global_pool conv_head norm_head act2 flatten" if pools_first else "conv_head bn2 global_pool"
    tail = {name: getattr(net, name) for name in names.split()}
    stem = sequence(conv_stem=net.conv_stem, bn1=net.bn1)
    return staged(stem, numbered("blocks", net.blocks), **tail, drop=nn.Dropout(net.drop_rate)), net.classifier


@splitter_for("VisionTransformer")
def _vit(net: Any) -> tuple[Stages, nn.Module]:
    *blocks, (name, block) = numbered("blocks", net.blocks)
    last = sequence(block=block, norm=net.norm, pool=_TokenPool(net), fc_norm=net.fc_norm, head_drop=net.head_drop)
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
    """A vision transformer's pooling over tokens: the class token, their mean, both (DINOv2) or attention."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.attn_pool = net.attn_pool
        self.kind = net.global_pool
        self.prefix_tokens = net.num_prefix_tokens
        self.include_prefix = net.pool_include_prefix

    def forward(self, x: Tensor) -> Tensor:
        from timm.models.vision_transformer import global_pool_nlc

        if self.kind == "token and mean":
            return torch.cat([x[:, 0], x[:, self.prefix_tokens :].mean(1)], dim=1)
        if self.attn_pool is None:
            x = global_pool_nlc(x, self.kind, self.prefix_tokens, self.include_prefix)
        else:
            x = self.attn_pool(x if self.include_prefix else x[:, self.prefix_tokens :])
        return x


def _take_fc(head: Any) -> nn.Module:
    """Remove the last layer from timm's head module, which then returns the pooled features."""
    name = "fc"
    if hasattr(head.fc, "fc2"):  # two layers: the second one is the classifier
        head, name = head.fc, "fc2"
    fc: nn.Module = getattr(head, name)
    setattr(head, name, nn.Identity())
    return fc
