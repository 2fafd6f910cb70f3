"""Stage I: learn a new branch beside the frozen network (the paper calls it feature augmentation).

The trunk and every earlier branch are frozen, in eval mode, and run without gradients; where memory allows, what they
make of a few augmented views is computed once and reused every epoch.

The paper trains the clone and a head for the new classes on new images alone. With `replay` (our default) exemplars
join in, the loss is taken over the frozen logits and the new ones together, and the clone also keeps a head over the
old classes whose only task is to be told, by distillation, what the frozen network thinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.data import augment
from branchout.data.augment import Augmentation
from branchout.data.images import Images, in_order, on_device, shuffled
from branchout.labels import LabelSpace
from branchout.method.features import extract
from branchout.method.recipes import Stage1
from branchout.model.classifier import Classifier, Step
from branchout.model.heads import CosineHead, Head, Pooler, new_head
from branchout.model.staged import Branch, branch_point
from branchout.training.loop import Event, Report, fit, precision, seed_for, silent
from branchout.training.optimisation import scale_to_dataset

Ints = npt.NDArray[np.int64]
CACHE_LIMIT = 4 << 30
"""Bytes of trunk activations kept in memory, or a third of what a GPU has; else they are computed every epoch.

Of all it has, not of what is free: a run that was stopped must see the same views when it goes on.
"""

FEWEST_VIEWS = 4
"""Where not even so many views fit, the trunk runs live: seeing the same few views again and again costs accuracy."""
CHUNK = 256
"""Pictures that the trunk is given at once while its outputs are cached."""


@dataclass(frozen=True)
class Labelled:
    """Pictures and their classes, as numbers of the label space after this step."""

    images: Images
    labels: Ints


def train_branch(
    model: Classifier,
    names: Sequence[str],
    new: Labelled,
    settings: Stage1,
    *,
    exemplars: Labelled | None = None,
    where: str = "last",
    seed: int = 0,
    views: int = 0,
    augmentation: Augmentation | None = None,
    cache_limit: int | None = None,
    device: torch.device,
    checkpoint: Path | None = None,
    report: Report = silent,
) -> tuple[Step, list[float]]:
    """Train a branch and a head for the classes `names`; returns them with the loss of every epoch.

    `views` > 0 caches the trunk's output for that many augmented views of each new picture (epoch e sees view e modulo
    `views`), or for as many as fit under `cache_limit`; 0 runs the trunk live.
    """
    torch.manual_seed(seed_for(seed, len(model.steps)))
    point = branch_point(model.backbone, where)
    branch = Branch.clone(model.backbone, point)
    branch.to(device, memory_format=model.backbone.layout(device))  # type: ignore[call-overload]
    head = new_head(model.base_head, len(names)).to(device)
    space = model.space.extend(names)
    pooler = Pooler(space, model.fused.pooler.kind).to(device)
    if isinstance(head, nn.Linear):
        imprint(head, model, new, space, device)
    memory = _copied_rows(model) if settings.replay else nn.Identity()
    trained = nn.ModuleDict({"branch": branch, "head": head, "memory": memory.to(device)})
    replayed = exemplars if settings.replay else None
    frozen = Frozen(model, point.start, logits=settings.replay, augmentation=augmentation, device=device)

    optimisation = scale_to_dataset(settings.optimisation, len(new.labels))
    size = optimisation.batch
    targets = [torch.from_numpy(part.labels).to(device) for part in (new, replayed) if part]
    local = torch.from_numpy(space.class_of_column[space.slice_of(len(space.branches) - 1)]).to(device)

    old_classes = torch.from_numpy(model.space.class_of_column).to(device)

    sources = [new.images] + ([replayed.images] if replayed else [])
    if cache_limit is None:
        gpu = device.type == "cuda"
        cache_limit = torch.cuda.get_device_properties(device).total_memory // 3 if gpu else CACHE_LIMIT
    sizes = [len(new.labels)] + ([len(replayed.labels)] if replayed else [])
    if views:
        room = cache_limit // frozen.bytes_per_picture(new.images)
        enough = min(views, FEWEST_VIEWS)
        views = next((v for v in range(views, enough - 1, -1) if np.dot(_views_of_each(v, sizes), sizes) <= room), 0)
    each_views = _views_of_each(views, sizes)
    kept = frozen.cache(sources, each_views, seed, report) if views else None

    def epoch_batches(epoch: int) -> Iterator[tuple[list[Tensor], Tensor]]:
        orders = [shuffled(len(new.labels), size, seed_for(seed, epoch, 0), drop_last=True)]
        if replayed:
            orders.append(_draws(len(replayed.labels), size, len(orders[0]), seed_for(seed, epoch, 1)))
        if kept is not None:
            orders[0] = [order + epoch % views * len(new.labels) for order in orders[0]]
            if replayed:
                rng = np.random.default_rng(seed_for(seed, epoch, 2))
                any_view = rng.integers(each_views[1], size=(len(orders[1]), size)) * len(replayed.labels)
                orders[1] = [order + view for order, view in zip(orders[1], any_view, strict=True)]
            streams = [_rows(table, order) for table, order in zip(kept, orders, strict=True)]
        else:
            streams = [
                frozen.live(images, order, seed_for(seed, epoch, 2 + n))
                for n, (images, order) in enumerate(zip(sources, orders, strict=True))
            ]
        chosen = zip(*(on_device(order, device) for order in orders), strict=True)
        for parts, indices in zip(zip(*streams, strict=True), chosen, strict=True):
            passed = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
            yield passed, torch.cat([y[index % len(y)] for y, index in zip(targets, indices, strict=True)])

    def loss_of(batch: tuple[list[Tensor], Tensor]) -> Tensor:
        passed, target = batch
        with precision(device):
            h = branch(passed[0]).float()
        own = head(h)
        if replayed:
            before = passed[1]
            # A new image of an old class must win in the new branch: pooled with an old column that is larger from the
            # start, the new one would never get a gradient. So that old column does not compete.
            rivals = before[:size].masked_fill(old_classes == target[:size, None], -torch.inf)
            columns = (target[:size, None] == local).int().argmax(1) + before.shape[1]
            loss = F.cross_entropy(torch.cat([rivals, own[:size]], dim=1), columns)
            loss = loss + F.cross_entropy(pooler(torch.cat([before, own], dim=1)[size:]), target[size:])
        else:
            # The new head alone, over the new classes alone. Against frozen logits, and with no old image to say
            # otherwise, it would learn to outshout them on every picture.
            loss = F.cross_entropy(own, (target[:, None] == local).int().argmax(1))
        if not settings.replay:
            return loss
        temperature = settings.temperature
        student = F.log_softmax(torch.cat([rows(h) for rows in memory], dim=1) / temperature, dim=1)  # type: ignore[union-attr]
        teacher = F.log_softmax(passed[1] / temperature, dim=1)
        distilled = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return loss + settings.distillation * temperature**2 * distilled

    trained.train()
    parameters = [*branch.own_parameters(), *head.parameters(), *memory.parameters()]
    losses = fit(
        trained,
        parameters,
        epoch_batches,
        max(len(new.labels) // size, 1),
        loss_of,
        optimisation,
        device=device,
        work="learn the branch",
        checkpoint=checkpoint,
        report=report,
    )
    return Step(tuple(names), where, point.start, branch, head), losses


@torch.no_grad()
def imprint(head: nn.Linear, model: Classifier, new: Labelled, space: LabelSpace, device: torch.device) -> None:
    """Start a linear head where its classes are, speaking as loudly as the rows before it.

    A dozen images and a small rate would hardly move random rows. Each is turned towards its class's mean feature, off
    the mean of all, at the length of the base's rows; its bias lets it score on its own images what the earlier
    columns score at best there, so that neither side starts above the other.
    """
    features = extract(model, new.images, device=device)[0]
    loudest = model.fused.frozen_columns(features.unbind(1)).amax(1)
    names = torch.from_numpy(space.index(space.branches[-1])).to(device)
    mine = torch.from_numpy(new.labels).to(device)[:, None] == names
    share = mine.float() / mine.sum(0).clamp(min=1)
    means = share.T @ features[:, 0]
    aside = means - means.mean(0) if len(means) > 1 else means
    head.weight.copy_(F.normalize(aside, dim=1) * head.weight.norm(dim=1, keepdim=True))
    if head.bias is not None:
        head.bias.copy_(share.T @ loudest - (head.weight * means).sum(1))


def _copied_rows(model: Classifier) -> nn.ModuleList:
    """Heads over all earlier columns that read the clone's features, starting from the frozen ones."""
    copies: list[Head] = []
    for head in model.fused.heads:
        classes, features = head.weight.shape  # type: ignore[misc]
        copy: Head
        copy = CosineHead(features, classes)
        if isinstance(head, nn.Linear):
            copy = nn.Linear(features, classes, bias=head.bias is not None)
        copy.load_state_dict(head.state_dict())
        copies.append(copy)
    return nn.ModuleList(copies)


def _views_of_each(views: int, sizes: Sequence[int]) -> list[int]:
    """How many views of each new picture are kept, and of each exemplar.

    Few exemplars are drawn often: they get as many more views as make their pool as large as that of the new images.
    """
    return [views] + [max(1, round(views * sizes[0] / size)) for size in sizes[1:]]


def _draws(count: int, size: int, batches: int, seed: int) -> list[Ints]:
    """`batches` batches of `size` positions, each position as often as any other, give or take one."""
    rng = np.random.default_rng(seed)
    rounds = -(-size * batches // count)
    order = np.concatenate([rng.permutation(count) for _ in range(rounds)])
    return [order[n * size : (n + 1) * size] for n in range(batches)]


class Frozen:
    """The frozen part of stage I: what enters the branch, and the logits of everything learned before."""

    def __init__(
        self,
        model: Classifier,
        start: int,
        *,
        logits: bool,
        augmentation: Augmentation | None = None,
        device: torch.device,
    ) -> None:
        self.model = model
        self.start = start
        self.logits = logits
        self.device = device
        self.augmentation = augmentation or augment.for_kind(model.kind, model.preprocessing.size, few=True)

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> list[Tensor]:
        pictures = self.model.backbone.arrange(pictures)
        with precision(self.device):
            end = len(self.model.backbone.names)
            starts = [step.start for step in self.model.steps] if self.logits else []
            passed = self.model.activations(pictures, [*starts, self.start, *([end] if self.logits else [])])
            if not self.logits:
                return [passed[self.start]]
            features = [passed[end], *(s.branch(passed[s.start]) for s in self.model.steps if s.start < end)]
        return [passed[self.start], self.model.fused.frozen_columns([h.float() for h in features])]

    def live(self, images: Images, order: Sequence[Ints], seed: int) -> Iterator[list[Tensor]]:
        for pictures in images.views(order, self.augmentation, seed):
            yield self(pictures)

    def bytes_per_picture(self, images: Images) -> int:
        """What the outputs for one picture take."""
        (outputs,) = self.live(images, [np.zeros(1, dtype=np.int64)], 0)
        return sum(output.numel() * output.element_size() for output in outputs)

    def cache(self, sources: Sequence[Images], views: Sequence[int], seed: int, report: Report) -> list[list[Tensor]]:
        """For each source the outputs for some views of every picture, one view after the other."""
        total = sum(count * -(-len(images) // CHUNK) for images, count in zip(sources, views, strict=True))
        done = 0
        tables: list[list[Tensor]] = []
        for number, (images, count) in enumerate(zip(sources, views, strict=True)):
            table: list[Tensor] = []
            filled = 0
            for view in range(count):
                for outputs in self.live(images, in_order(len(images), CHUNK), seed_for(seed, view, 7 + number)):
                    table = table or [
                        _room(count * len(images), t, self.model.backbone.layout(t.device)) for t in outputs
                    ]
                    for whole, part in zip(table, outputs, strict=True):
                        whole[filled : filled + len(part)] = part
                    filled += len(outputs[0])
                    done += 1
                    report(Event("cache the trunk", done, total))
            tables.append(table)
        return tables


def _room(rows: int, like: Tensor, layout: torch.memory_format) -> Tensor:
    """An empty table with rows such as those of a batch; maps lie in the network's memory layout."""
    layout = layout if like.ndim == 4 else torch.contiguous_format
    return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device, memory_format=layout)


def _rows(table: Sequence[Tensor], order: Sequence[Ints]) -> Iterator[list[Tensor]]:
    for index in on_device(order, table[0].device):
        yield [tensor[index] for tensor in table]
