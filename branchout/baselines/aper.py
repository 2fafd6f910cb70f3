"""APER: small adapters beside the MLPs of a frozen vision transformer are trained on the first step, then frozen too.
The features of the network with and without them stand side by side, and the nearest class mean answers.

Source: Zhou, Cai, Ye, Zhan, Liu: "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and
Adaptivity Are All You Need" (2023), with the adapters of AdaptFormer (Chen et al., NeurIPS 2022): 64 wide, scaled by
0.1, starting at zero. Departures: the first step is that of the new classes, since the base knows its own; the network
is trained as our stage I is; base classes have means of their exemplars (`aper-all`: of all their images); a class that
comes again keeps one mean for each of its looks.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads
from branchout.baselines.class_features import new_groups
from branchout.baselines.ncm import NearestMean
from branchout.baselines.networks import Network, epochs_of
from branchout.baselines.registry import Baseline
from branchout.baselines.task import Task
from branchout.data.images import in_order
from branchout.data.samples import Samples
from branchout.errors import DoesNotApply
from branchout.method.new_branch import Labelled
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead
from branchout.model.staged import Backbone
from branchout.training.loop import fit
from branchout.training.optimisation import scale_to_dataset

BOTTLENECK = 64
SCALE = 0.1


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


def with_adapters(backbone: Backbone) -> tuple[Backbone, list[nn.Parameter]]:
    """A copy of a vision transformer with an adapter in every block, and what can be trained in it."""
    from timm.models.vision_transformer import Block

    adapted = copy.deepcopy(backbone).requires_grad_(False)
    parameters: list[nn.Parameter] = []
    for block in [module for module in adapted.modules() if isinstance(module, Block)]:
        device = next(block.parameters()).device
        block.mlp = Adapter(block.mlp, block.norm2.normalized_shape[0]).to(device)
        parameters += [*block.mlp.down.parameters(), *block.mlp.up.parameters()]
    return adapted, parameters


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
    adapted, parameters = with_adapters(model.backbone)
    if not parameters:
        raise DoesNotApply(
            f"aper puts adapters into the blocks of a vision transformer, and this base ({model.arch.get('name')}) has "
            "none; use ncm, which is the same without adapters, or a base such as vit_tiny or vit_tiny_patch16_224"
        )
    names = task.space.branches[-1]
    own = {int(number): place for place, number in enumerate(task.space.index(names))}
    new = task.labelled(task.new)
    local = Labelled(new.images, torch.tensor([own[label] for label in new.labels.tolist()]).numpy())
    optimisation = scale_to_dataset(task.network, len(local.labels))
    network = Network(adapted, CosineHead(adapted.features, len(names)).to(task.device))

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, labels = batch
        return F.cross_entropy(network(pictures), labels)

    fit(
        network,
        [*parameters, *network.head.parameters()],
        epochs_of(task, local, optimisation.batch),
        max(len(local.labels) // optimisation.batch, 1),
        loss_of,
        optimisation,
        device=task.device,
        work="train adapters",
        report=task.report,
    )
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
    means = torch.stack([group.mean(0) for group in groups])
    if isinstance(before, AdaptedScorer):
        assert before.head is not None
        means = torch.cat([before.head.means, means])
    scorer.head = NearestMean(task.space, means).to(task.device)
    return scorer


BASELINES = (
    Baseline("aper", "APER with adapters", learn, on="base", note="vision transformers only"),
    Baseline(
        "aper-all",
        "APER with adapters, all base images",
        partial(learn, everything=True),
        on="base",
        oracle=True,
        note="vision transformers only",
    ),
)
