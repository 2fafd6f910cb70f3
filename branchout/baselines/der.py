"""DER without pruning: every step adds a whole new feature extractor beside the old ones, which are frozen, and trains
it with one head on the features of all and an auxiliary one that tells the new classes from each other and from the
old. At the end a new head is learned on balanced data.

Source: Yan, Xie and He, CVPR 2021; loss weights 1 and 1, the extractor's start from the one before, heads that start at
random in every step, and 30 last epochs are from their published experiments. As published the base has a linear head,
features enter the head as they are, logits of the last stage are divided by a temperature of 5, its rate falls at half,
and each of its epochs sees another view; all heads start at random once more after the warm-up. Departures of the
default, which starts from the shared base: each extractor's features are brought to length 4, as that base's head
reads them, the last stage has ten views and a rate that falls at thirds, and there is no temperature, with which a head
on such features hardly learns.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from branchout.baselines import feature_heads, whole_network
from branchout.baselines.networks import Network
from branchout.baselines.published_training import first, random_rows
from branchout.baselines.task import Baseline, Published, Task
from branchout.model.classifier import Classifier
from branchout.model.heads import to_norm
from branchout.model.staged import Backbone
from branchout.training.loop import precision
from branchout.training.optimisation import Optimisation, scale_to_dataset

LAST_STAGE = Optimisation(epochs=30, lr=0.1, batch=128, weight_decay=5e-4)
TEMPERATURE = 5.0
"""Of the last stage, as published."""


class Extractors(nn.Module):
    """Several backbones side by side and one linear head, without bias, on all they see."""

    def __init__(self, backbones: Sequence[Backbone], classes: int, *, published: bool = False) -> None:
        super().__init__()
        self.backbones = nn.ModuleList(backbones)
        self.published = published
        width = sum(backbone.features for backbone in backbones)
        self.head = random_rows(width, classes) if published else nn.Linear(width, classes, bias=False)

    def features(self, pictures: Tensor) -> Tensor:
        """h_0 ⊕ h_1 ⊕ …, each at length 4 or, as published, as it is."""
        pictures = self.backbones[0].arrange(pictures)  # type: ignore[operator]
        with precision(pictures.device):
            parts = [backbone(pictures) for backbone in self.backbones]
        return torch.cat([h.float() if self.published else to_norm(h.float()) for h in parts], dim=1)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.features(pictures))  # type: ignore[no-any-return]


def learn(before: Classifier | Network | Extractors, task: Task, *, published: bool = False) -> Extractors:
    feature_heads.seed_step(task)
    earlier = before.backbones if isinstance(before, Extractors) else [before.backbone]
    old = [copy.deepcopy(backbone).freeze() for backbone in earlier]  # type: ignore[operator]
    fresh = copy.deepcopy(old[-1]).requires_grad_(True)
    fresh.frozen = False
    network = Extractors([*old, fresh], len(task.space.classes), published=published)
    network.to(task.device, memory_format=fresh.layout(task.device))  # type: ignore[call-overload]
    auxiliary = nn.Linear(fresh.features, 1 + len(task.space.branches[-1]), bias=False).to(task.device)
    answer = whole_network.new_or_other(task)

    def loss_of(pictures: Tensor, target: Tensor) -> Tensor:
        h = network.features(pictures)
        return whole_network.with_auxiliary(network.head(h), auxiliary(h[:, -fresh.features :]), target, answer)

    trained = nn.ModuleList([network, auxiliary])
    samples = whole_network.new_and_exemplars(task)
    redrawn = (network.head, auxiliary) if published else ()
    whole_network.train(trained, task, samples, loss_of, work="Training a new extractor", redrawn=redrawn)
    relearn_head(network, task)
    return network


def relearn_head(network: Extractors, task: Task) -> None:
    """A new head on frozen features of as many images of each class as of any other."""
    stage, temperature = LAST_STAGE, 1.0
    if network.published:
        stage, temperature = replace(LAST_STAGE, schedule="half"), TEMPERATURE
        task = replace(task, views=stage.epochs)
    data = whole_network.balanced_views(network, task)
    network.head.reset_parameters()
    task = replace(task, heads=scale_to_dataset(stage, len(data.labels)))
    feature_heads.train(network.head, task, data, lambda h: network.head(h.squeeze(1)) / temperature)


AS_PUBLISHED = Published(partial(first, redraw=True), partial(learn, published=True))
BASELINES = (Baseline("der", "DER w/o P", learn, on="network", published=AS_PUBLISHED),)
