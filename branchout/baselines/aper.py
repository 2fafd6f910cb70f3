"""APER: small adapters beside the MLPs of a frozen vision transformer are trained on the first step, then frozen too.
The features of the network with and without them stand side by side, and the nearest class mean answers.

Source: Zhou, Cai, Ye, Zhan, Liu: "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and
Adaptivity Are All You Need" (2023), with the adapters of AdaptFormer (Chen et al., NeurIPS 2022): 64 wide, scaled by
0.1, starting at zero, trained for 20 epochs at a rate of 0.01. Departures: the first step is that of the new classes,
since the base knows its own; means are those of `ncm.py`, of exemplars for base classes (`aper-all`: of all images).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads, whole_network
from branchout.baselines.class_features import new_groups
from branchout.baselines.ncm import NearestMean, class_means
from branchout.baselines.networks import Network
from branchout.baselines.task import Task, on_base
from branchout.data.images import in_order
from branchout.data.samples import Samples
from branchout.errors import DoesNotApply
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead
from branchout.model.staged import Backbone
from branchout.training.optimisation import Optimisation

BOTTLENECK = 64
SCALE = 0.1
ADAPTERS = Optimisation(epochs=20, lr=0.01, batch=48, weight_decay=5e-4, schedule="cosine")


class Adapter(nn.Module):
    """An MLP with a narrow path beside it that starts by adding nothing."""

    def __init__(self, mlp: nn.Module, width: int) -> None:
        super().__init__()
        self.mlp = mlp
        self.down = nn.Linear(width, BOTTLENECK)
        self.up = nn.Linear(BOTTLENECK, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + SCALE * self.up(F.relu(self.down(x)))  # type: ignore[no-any-return]


def with_adapters(backbone: Backbone) -> Backbone:
    """A copy of a vision transformer with an adapter in every block, which alone can be trained."""
    from timm.models.vision_transformer import Block

    adapted = copy.deepcopy(backbone).requires_grad_(False)
    for block in [module for module in adapted.modules() if isinstance(module, Block)]:
        device = next(block.parameters()).device
        block.mlp = Adapter(block.mlp, block.norm2.normalized_shape[0]).to(device)
    return adapted


class AdaptedScorer(nn.Module):
    """Features of the base and of the adapted network side by side, and the head that reads them."""

    def __init__(self, model: Classifier, adapted: Backbone) -> None:
        super().__init__()
        self.model = model
        self.adapted = adapted
        self.head: NearestMean | None = None

    @torch.no_grad()
    def features(self, pictures: Tensor) -> Tensor:
        return torch.cat([self.model.backbone(pictures), self.adapted(pictures)], dim=1).float()

    def describe(self, task: Task, samples: Samples) -> Tensor:
        images = task.images(samples)
        return torch.cat([self.features(pictures) for pictures in images.plain(in_order(len(images), 500))])

    def stored(self) -> int:
        """Numbers that it takes to answer, beside the two networks."""
        assert self.head is not None
        return self.head.stored()

    def forward(self, pictures: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(self.features(pictures))  # type: ignore[no-any-return]


def adapt(model: Classifier, task: Task) -> Backbone:
    """Train adapters on the first step's images, to tell its classes apart."""
    adapted = with_adapters(model.backbone)
    if not any(parameter.requires_grad for parameter in adapted.parameters()):
        raise DoesNotApply(
            f"aper puts adapters into the blocks of a vision transformer, and this base ({model.arch.get('name')}) has "
            "none; use ncm, which is the same without adapters, or a base such as vit_tiny or vit_tiny_patch16_224"
        )
    network = Network(adapted, CosineHead(adapted.features, len(task.space.branches[-1])).to(task.device))
    place = whole_network.place_in_step(task)

    def loss_of(pictures: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(network(pictures), place[target])

    shorter = replace(ADAPTERS, epochs=min(ADAPTERS.epochs, task.network.epochs))
    whole_network.train(network, task, task.new, loss_of, "train adapters", shorter)
    return adapted.freeze()


def learn(before: Classifier | AdaptedScorer, task: Task, *, everything: bool = False) -> AdaptedScorer:
    feature_heads.seed_step(task)
    first = isinstance(before, Classifier)
    scorer = (
        AdaptedScorer(before, adapt(before, task))
        if isinstance(before, Classifier)
        else AdaptedScorer(before.model, before.adapted)
    )
    groups = new_groups(task, partial(scorer.describe, task), first=first, everything=everything)
    means = class_means(groups)
    if isinstance(before, AdaptedScorer):
        assert before.head is not None
        means = torch.cat([before.head.means, means])
    scorer.head = NearestMean(task.space, means).to(task.device)
    return scorer


BASELINES = on_base("aper", "APER with adapters", learn, "vision transformers only")
