"""PODNet: the student may change its activations as long as their sums along rows and along columns stay near the
teacher's, stage by stage (POD-spatial), and so must its features (POD-flat). Each class has several proxies, imprinted
from its images and fine-tuned on balanced data at the end, and scores by its similarity to those of them that are near.

Source: Douillard et al., ECCV 2020; weights (3 and 1 for CIFAR's ResNet, 8 and 10 with rate 0.05 and batches of 64 for
networks of four stages, times √(all/new classes)), ten proxies, frozen old proxies and the last 20 epochs, of proxies
alone, are from their published experiments. There the margin is taken off all similarities alike and so cancels; the
loss here is the one they measured. Their similarity is minus the squared distance of unit vectors, 2·cos − 2: so
proxies are weighed by a softmax of 2·cos.

As published the base is trained with these proxies and this loss, η times 2·cos starts as 1 and is learned as such,
proxies start about 1 long, new ones as long as the old ones are on average, no stage ends in a ReLU, so that maps and
features have negative values too, of CIFAR's ResNet four maps are compared (the stages' and the one before the last
block), training has their epochs, 160 or 90, no gradient is beyond ±5, and the last epochs see herded new images, with
BatchNorm in training mode.

Departures of the default, which starts from the shared base: stages are compared after their last ReLU, and the last
map of CIFAR's ResNet only; proxies of the base's classes are its rows, set apart as the class's exemplars are, all of
length 1; our η, twice theirs, starts as 16: the logits of a cosine base are nearly its own, those of a linear one lose
its bias and the lengths of its rows; gradients are not clamped; the last epochs see new images chosen at random, as
cached views by BatchNorm's running statistics. Departures of both: half the proxies of a class that comes again are
imprinted anew, and the last epochs see twice as many images of it; K-Means starts once.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads, published_training, whole_network
from branchout.baselines.networks import Network, frozen_copy
from branchout.baselines.task import Baseline, Published, Task
from branchout.data.memory import keep
from branchout.data.samples import concatenate
from branchout.errors import DoesNotApply
from branchout.model.classifier import Classifier
from branchout.model.heads import NORM
from branchout.model.staged import Backbone
from branchout.training.loop import precision, seed_for
from branchout.training.optimisation import Optimisation, scale_to_dataset

PROXIES = 10
SPATIAL, FLAT = (3.0, 8.0), (1.0, 10.0)
"""Weights of the two distillation terms for CIFAR's ResNet of three stages and for networks of more."""
DESCENT = (
    Optimisation(epochs=160, lr=0.1, batch=128, weight_decay=5e-4, schedule="plain-cosine"),
    Optimisation(epochs=90, lr=0.05, batch=64, weight_decay=5e-4, schedule="plain-cosine"),
)
"""As published, for the same networks."""
LARGEST_GRADIENT = 5.0
"""Of every single weight, as published."""
JITTER = 0.05
"""How far apart, for their length, proxies start that would otherwise be the same."""
LAST_EPOCHS = (
    Optimisation(epochs=20, lr=0.05, batch=128, weight_decay=5e-4, schedule="constant"),
    Optimisation(epochs=20, lr=0.01, batch=64, weight_decay=1e-4, schedule="constant"),
)


class LocalSimilarity(nn.Module):
    """A head with several proxies a class: η times the class's cosines, averaged with more weight on the larger."""

    def __init__(self, proxies: Tensor, eta: float, unit: float = 1.0) -> None:
        super().__init__()
        self.unit = unit
        """What η is a multiple of: with 2, as published, a step of descent changes the logits four times as much."""
        self.proxies = nn.Parameter(proxies)  # (classes, proxies, k)
        self.eta = nn.Parameter(torch.tensor(eta, device=proxies.device))

    def forward(self, h: Tensor, learning: Tensor | None = None) -> Tensor:
        """Scores (N, classes). Proxies of classes that are not `learning` (a mask) get no gradient."""
        proxies: Tensor = self.proxies
        if learning is not None:
            proxies = torch.where(learning[:, None, None], proxies, proxies.detach())
        cosines = F.normalize(h, dim=1) @ F.normalize(proxies, dim=2).flatten(0, 1).T
        cosines = cosines.view(len(h), *proxies.shape[:2])
        return self.unit * self.eta * (cosines * (2 * cosines).softmax(2)).sum(2)


class PodNetwork(nn.Module):
    """A backbone that also returns the maps of its stages, and a head of proxies."""

    def __init__(self, backbone: Backbone, head: LocalSimilarity, *, published: bool = False) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.published = published

    @property
    def large(self) -> bool:
        return not published_training.three_stages(self.backbone)

    def maps_and_features(self, pictures: Tensor) -> tuple[list[Tensor], Tensor]:
        """The maps (N, C, H, W) that stages end in, but for the stem, and the features (N, k)."""
        x = self.backbone.arrange(pictures)
        maps: list[Tensor] = []
        with precision(pictures.device):
            for number, name in enumerate(self.backbone.names):
                stage = self.backbone.get_submodule(name)
                last = number == len(self.backbone.names) - 1
                found = []
                # The last stage ends in pooled features; its map is what stood before them.
                for part in stage if isinstance(stage, nn.Sequential) else (stage,):
                    x = part(x)
                    found += [x] if x.ndim == 4 and x.shape[2:].numel() > 1 else []
                if number:
                    maps += found[-2:] if self.published and last and not self.large else found[-1:]
        if not maps:
            raise DoesNotApply(
                "podnet compares feature maps, and this base has none (a vision transformer has tokens); use lwf or "
                "bic, which distil logits, or a ResNet"
            )
        return maps, x.float()

    def features(self, pictures: Tensor) -> Tensor:
        return self.maps_and_features(pictures)[1]

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.features(pictures))  # type: ignore[no-any-return]


def first_as_published(task: Task) -> PodNetwork:
    """The base, trained with proxies and the loss of all later steps."""
    backbone = published_training.untrained(task, "inside stages")
    proxies = torch.randn(len(task.space.classes), PROXIES, backbone.features) / math.sqrt(backbone.features)
    network = PodNetwork(backbone, LocalSimilarity(proxies, 1.0, unit=2.0), published=True)
    network.to(task.device, memory_format=backbone.layout(task.device))  # type: ignore[call-overload]
    optimisation = descent(network, task.pretraining)
    with clamped_gradients(network):
        whole_network.train(
            network, task, task.new, lambda x, y: nca(network(x), y), published_training.BASE, optimisation
        )
    return network


@contextmanager
def clamped_gradients(network: PodNetwork) -> Iterator[None]:
    """As published, no weight has a gradient beyond ±5 while it is trained."""

    def clamp(gradient: Tensor) -> Tensor:
        return gradient.clamp(-LARGEST_GRADIENT, LARGEST_GRADIENT)

    if not network.published:
        yield
        return
    learning = [weight for weight in network.parameters() if weight.requires_grad]
    hooks = [weight.register_hook(clamp) for weight in learning]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def descent(network: PodNetwork, optimisation: Optimisation) -> Optimisation:
    """Theirs where it is trained as published; by default the given one with their rate for networks of four stages."""
    if network.published:
        return published_training.scaled(DESCENT[network.large], optimisation)
    if not network.large:
        return optimisation
    return replace(optimisation, lr=0.05, batch=64, weight_decay=5e-4, nesterov=False, schedule="cosine")


def learn(before: Classifier | Network | PodNetwork, task: Task) -> PodNetwork:
    feature_heads.seed_step(task)
    teacher = cast(PodNetwork, frozen_copy(_as_podnet(before)))
    teacher.to(task.device, memory_format=teacher.backbone.layout(task.device))  # type: ignore[call-overload]
    if not isinstance(before, PodNetwork):
        with torch.no_grad():
            teacher.head.proxies.copy_(spread_proxies(teacher, task))
    backbone = copy.deepcopy(teacher.backbone).requires_grad_(True)
    head = LocalSimilarity(imprinted(teacher, task), teacher.head.eta.item(), teacher.head.unit)
    network = PodNetwork(backbone, head, published=teacher.published)
    large = int(network.large)
    factor = math.sqrt(len(task.space.classes) / len(task.space.branches[-1]))
    learning = whole_network.in_step(task)

    def loss_of(pictures: Tensor, target: Tensor) -> Tensor:
        old_maps, old_h = teacher.maps_and_features(pictures)
        maps, h = network.maps_and_features(pictures)
        distilled = SPATIAL[large] * pod_spatial(maps, old_maps) + FLAT[large] * pod_flat(h, old_h)
        return nca(network.head(h, learning), target) + factor * distilled

    samples, optimisation = whole_network.new_and_exemplars(task), descent(network, task.network)
    before_training = head.proxies.detach().clone()
    with clamped_gradients(network):
        whole_network.train(network, task, samples, loss_of, optimisation=optimisation)
    with torch.no_grad():  # weight decay has shortened frozen proxies, and the last epochs would move short ones far
        network.head.proxies[~learning] = before_training[~learning]
    tune_head(network, task, LAST_EPOCHS[large])
    return network


def _as_podnet(before: Classifier | Network | PodNetwork) -> PodNetwork:
    """A model as PODNet sees it: rows become proxies, all those of a class alike, and a linear head's bias is lost."""
    if isinstance(before, PodNetwork):
        return before
    network = Network.of(before)
    rows = F.normalize(network.head.weight.detach(), dim=1)
    return PodNetwork(network.backbone, LocalSimilarity(rows[:, None].repeat(1, PROXIES, 1), NORM**2))


def pod_spatial(maps: list[Tensor], old_maps: list[Tensor]) -> Tensor:
    """Mean over stages of the distance between sums of squares along width and along height, as one unit vector."""
    distances = [
        torch.linalg.vector_norm(_pooled(ours) - _pooled(theirs), dim=1).mean()
        for ours, theirs in zip(maps, old_maps, strict=True)
    ]
    return torch.stack(distances).mean()


def _pooled(x: Tensor) -> Tensor:
    energy = x.float().square()
    sums = [energy.sum(dim).flatten(1) for dim in (3, 2)]
    return F.normalize(torch.cat(sums, dim=1), dim=1)


def pod_flat(h: Tensor, old_h: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(h, old_h, dim=1)).mean()


def nca(scores: Tensor, target: Tensor) -> Tensor:
    """As their code has it: the true class enters the denominator as if it were the largest of all."""
    relative = scores - scores.amax(1, keepdim=True)
    own = relative.gather(1, target[:, None])
    return (relative.scatter(1, target[:, None], 0.0).logsumexp(1) - own[:, 0]).mean()


def imprinted(teacher: PodNetwork, task: Task) -> Tensor:
    """Proxies of all classes: old ones as they are, new ones the centres of what the teacher sees in their images."""
    old = teacher.head.proxies.detach()
    proxies = old.new_zeros(len(task.space.classes), *old.shape[1:])
    proxies[: len(old)] = old
    length = old.norm(dim=2).mean() if teacher.published else 1.0
    u = F.normalize(whole_network.plain_outputs(teacher.features, task, task.new), dim=1).cpu().numpy()
    labels = task.labels(task.new)
    rng = np.random.default_rng(seed_for(task.seed, task.step))
    for label in np.unique(labels):
        number = PROXIES if label >= len(old) else PROXIES // 2
        proxies[label, -number:] = length * torch.from_numpy(_centres(u[labels == label], number, rng)).to(proxies)
    return proxies if teacher.published else F.normalize(proxies, dim=2)


def spread_proxies(opened: PodNetwork, task: Task) -> Tensor:
    """Proxies of an opened base that differ: around their class's row as the centres of its exemplars around theirs.

    Equal ones would have equal gradients and stay equal for ever.
    """
    rows = F.normalize(opened.head.proxies.detach()[:, 0], dim=1)
    proxies = torch.empty_like(opened.head.proxies)
    known = task.memory
    u = (
        F.normalize(whole_network.plain_outputs(opened.features, task, known), dim=1).cpu().numpy()
        if len(known)
        else np.zeros((0, 0))
    )
    labels = task.labels(known) if len(known) else np.zeros(0, dtype=np.int64)
    rng = np.random.default_rng(seed_for(task.seed, task.step, 1))
    for label, row in enumerate(rows):
        own = u[labels == label]
        centres = _centres(own if len(own) else row[None].cpu().numpy(), PROXIES, rng)
        proxies[label] = row + torch.from_numpy(centres - centres.mean(0)).to(row)
    return F.normalize(proxies, dim=2)


def _centres(rows: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """`number` centres of K-Means; of few rows the rows themselves, then rows near them: no two may be the same."""
    from scipy.cluster.vq import kmeans2

    if len(rows) <= number:
        centres = np.resize(rows, (number, rows.shape[1])).astype(np.float64)
        again = centres[len(rows) :]
        noise = rng.normal(size=again.shape) / np.sqrt(again.shape[1])
        again += JITTER * np.linalg.norm(again, axis=1, keepdims=True) * noise
        return centres
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a centre that loses all its rows stays where it was, and may
        centres, _ = kmeans2(rows.astype(np.float64), number, minit="++", rng=rng)
    return centres  # type: ignore[no-any-return]


def tune_head(network: PodNetwork, task: Task, optimisation: Optimisation) -> None:
    """The last epochs: proxies of all classes alone, on as many images of each class as of any other.

    The scale η stays what it is. As published, old and new images are as many as the memory has room for after the
    step, new ones are herded, BatchNorm computes with the batches, and its running statistics follow these images.
    """
    network.head.eta.requires_grad_(False)
    if network.published:
        network.backbone.requires_grad_(False)
        rows = whole_network.plain_outputs(network.features, task, task.new).cpu().numpy()
        room = task.after or task.per_class
        old = task.memory.select(whole_network.first_of_each(task.memory, room))
        samples = concatenate([old, keep(task.new, per_class=room, rule="herding", rows=rows)])
        with clamped_gradients(network):
            whole_network.train(network, task, samples, lambda x, y: nca(network(x), y), "tune the head", optimisation)
        return
    data = whole_network.balanced_views(network, task)
    task = replace(task, heads=scale_to_dataset(optimisation, len(data.labels)))
    feature_heads.train(network.head, task, data, lambda h: network.head(h.squeeze(1)), nca)


BASELINES = (Baseline("podnet", "PODNet", learn, on="network", published=Published(first_as_published, learn)),)
