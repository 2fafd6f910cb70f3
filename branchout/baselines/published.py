"""Shared by methods that are trained as their authors do: a base of their own with a linear head.

`branchout bench --faithful`, or `--schedule published`, trains them so. Every file names what still differs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads, whole_network
from branchout.baselines.networks import Network
from branchout.baselines.task import Task
from branchout.baselines.whole_network import Loss
from branchout.errors import BranchoutError
from branchout.model.heads import Head
from branchout.model.resnet import BasicBlock
from branchout.model.staged import Backbone


def linear_head(like: Head, classes: int) -> nn.Linear:
    """Linear rows without bias, drawn at random with a length of about 1."""
    return random_rows(like.weight.shape[1], classes)


def random_rows(features: int, classes: int) -> nn.Linear:
    head = nn.Linear(features, classes, bias=False)
    nn.init.kaiming_normal_(head.weight, nonlinearity="linear")
    return head


def untrained(task: Task) -> Backbone:
    """A network that knows nothing yet, of the experiment's shape."""
    if task.untrained is None:
        raise BranchoutError("training as published starts from scratch, and the task has no network: set `untrained`")
    feature_heads.seed_step(task)
    return task.untrained()


def first(
    task: Task,
    loss_of: Loss = F.cross_entropy,
    wrapped: Callable[[Head, Loss], Loss] = lambda head, loss: loss,
) -> Network:
    """The base: a network with a linear head, trained from scratch on the first classes by a loss of its logits."""
    backbone = untrained(task)
    network = Network(backbone, random_rows(backbone.features, len(task.space.classes)))
    network.to(task.device, memory_format=backbone.layout(task.device))  # type: ignore[call-overload]
    train_base(network, task, wrapped(network.head, lambda x, y: loss_of(network(x), y)))
    return network


def train_base(network: nn.Module, task: Task, loss_of: Loss) -> None:
    whole_network.train(network, task, task.new, loss_of, "Training the base model", task.pretraining)


class PaddedShortcut(nn.Module):
    """Every second pixel, and zeros for the channels that are added."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., ::2, ::2]
        return torch.cat([x, torch.zeros_like(x)], dim=1)


def cifar_style(backbone: Backbone) -> Backbone:
    """ResNet-32 as the CIFAR-100 literature after iCaRL has it: no ReLU behind the sum of a block, shortcuts without
    parameters, and blocks that start by adding nothing."""
    for block in (module for module in backbone.modules() if isinstance(module, BasicBlock)):
        block.last_relu = False
        nn.init.zeros_(block.bn2.weight)
        if not isinstance(block.downsample, nn.Identity):
            block.downsample = PaddedShortcut()
    return backbone
