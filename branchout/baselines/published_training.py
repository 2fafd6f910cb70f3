"""Shared by methods that are trained as their authors do: their schedules, networks and linear heads, their own base.

`branchout bench --faithful`, or `--schedule published`, trains them so. Every file names what still differs. For all of
them images are normalised by mean 0.5 and deviation 0.25, the last incomplete batch of an epoch is left out, and a GPU
computes in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads, whole_network
from branchout.baselines.networks import Alter, Network
from branchout.baselines.task import Task
from branchout.baselines.whole_network import Loss
from branchout.errors import BranchoutError
from branchout.model.heads import Head, head_bias
from branchout.model.resnet import BasicBlock, Bottleneck
from branchout.model.staged import Backbone
from branchout.training.optimisation import Optimisation

SCHEDULE = Optimisation(epochs=170, lr=0.1, batch=128, weight_decay=5e-4, schedule="der")
"""Of the base and of every step: that of DER's published experiments, whose tables have iCaRL, BiC and WA too."""

BASE = "Training the base model"


def scaled(own: Optimisation, asked: Optimisation) -> Optimisation:
    """A method's own training, with as many of its epochs as are asked for of those of SCHEDULE."""
    return replace(own, epochs=max(round(own.epochs * asked.epochs / SCHEDULE.epochs), 1))


def linear_head(like: Head, classes: int) -> nn.Linear:
    """Random rows, with a bias where `like` has one."""
    return random_rows(like.weight.shape[1], classes, bias=head_bias(like) is not None)


def random_rows(features: int, classes: int, *, bias: bool = False) -> nn.Linear:
    """Linear rows drawn at random with a length of about 1; biases are 0."""
    head = nn.Linear(features, classes, bias=bias)
    nn.init.kaiming_normal_(head.weight, nonlinearity="linear")
    if bias:
        nn.init.zeros_(head.bias)
    return head


def untrained(task: Task, relu: str = "always") -> Backbone:
    """A network that knows nothing yet, of the experiment's shape and in the style of published experiments.

    Its blocks end in a ReLU `always`, in all `but the last` block of CIFAR's ResNet-32 as iCaRL's do, or only `inside
    stages` as PODNet's do, which in ResNet-32 is nowhere. That network has shortcuts without parameters. The blocks of
    other networks, and of PODNet's, start by adding nothing.
    """
    if task.untrained is None:
        raise BranchoutError("training as published starts from scratch, and the task has no network: set `untrained`")
    feature_heads.seed_step(task)
    backbone = task.untrained()
    of_cifar, of_podnet = three_stages(backbone), relu == "inside stages"
    stages = [
        [block for block in backbone.get_submodule(name).modules() if isinstance(block, BasicBlock | Bottleneck)]
        for name in backbone.names[1:]
    ]
    for block in (block for stage in stages for block in stage):
        ends_stage = any(block is stage[-1] for stage in stages)
        without = {"but the last": of_cifar and block is stages[-1][-1], "inside stages": of_cifar or ends_stage}
        block.last_relu = not without.get(relu, False)
        if of_podnet or not of_cifar:
            nn.init.zeros_((block.bn2 if isinstance(block, BasicBlock) else block.bn3).weight)
        if of_cifar and not isinstance(block.downsample, nn.Identity):
            block.downsample = PaddedShortcut()
    return backbone


def three_stages(backbone: Backbone) -> bool:
    """Whether it is CIFAR's ResNet, which has three stages behind its stem; other networks have four."""
    return len(backbone.names) <= 4


class PaddedShortcut(nn.Module):
    """Every second pixel, and zeros for the channels that are added."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., ::2, ::2]
        return torch.cat([x, torch.zeros_like(x)], dim=1)


def first(
    task: Task,
    loss_of: Loss = F.cross_entropy,
    *,
    relu: str = "always",
    bias: bool = False,
    make: Callable[..., nn.Linear] = random_rows,
    optimisation: Optimisation | None = None,
    alter: Alter | None = None,
    redraw: bool = False,
) -> Network:
    """The base: a network with a linear head, trained from scratch on the first classes by a loss of its logits.

    `redraw`: the head starts at random once more after the warm-up, as in the published code of DER and its WA.
    """
    backbone = untrained(task, relu)
    head = make(backbone.features, len(task.space.classes), bias=bias)
    network = Network(backbone, head)
    network.to(task.device, memory_format=backbone.layout(task.device))  # type: ignore[call-overload]
    optimisation = optimisation or task.pretraining
    redrawn = (head,) if redraw else ()
    whole_network.train(
        network, task, task.new, lambda x, y: loss_of(network(x), y), BASE, optimisation, alter=alter, redrawn=redrawn
    )
    return network
