"""BiC, bias correction: distillation and exemplars keep the network, but its new classes' logits come out too strong;
so at the end their one scale and one shift are fitted on held-out images with as many of each old class as of each new.
The next step's teacher answers through them; its student starts without. FA+BiC does the same to the logits of the
paper's new branch, which never touched the old ones.

Source: Wu et al., CVPR 2019; λ = old/(old + new), temperature 2, and a tenth of the exemplars held out are theirs.
FA+BiC: the paper's section 5.2 (Wu et al., CVPR 2022). As published the base and the network have a linear head whose
new rows start at random, rates and epochs are those of DER's experiments, whose tables have BiC, and images that are
held out are never trained on, not even while their class is new; by default the shared base has trained on all.
DER's code differs: its bias is fitted for one epoch on exemplars that were trained on, the head starts at random once
more after the warm-up, and weight decay falls from step to step. Departures of both: the two numbers are found by
L-BFGS at the optimum, with a slight pull to 1 and 0. In BiC the loss of the two numbers is convex; in FA+BiC only while
classes do not overlap. In FA+BiC no exemplar trained the branch, so all are used, and as the branches are given anew at
each step all their numbers are fitted together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads, whole_network
from branchout.baselines.networks import MakeHead, Network, OnFeatures, with_scales
from branchout.baselines.published_training import first, linear_head
from branchout.baselines.task import Baseline, Published, Task
from branchout.data.samples import Samples, concatenate
from branchout.labels import Bools
from branchout.model.classifier import Classifier
from branchout.model.heads import new_head

HELD_OUT = 0.1
"""Share of the exemplars that fit the bias and train nothing."""
RIDGE = 1e-4
"""Pull of the scale to 1 and the shift to 0, so that images which are told apart perfectly have an answer too."""


class BiasCorrected(nn.Module):
    """A network with one scale and one shift for the logits of the classes of its last step."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: Network, scale: Tensor, shift: Tensor, unseen: Samples | None = None) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)
        self.unseen = unseen
        """Images of all classes so far that were held out; they are never trained on."""

    def forward(self, pictures: Tensor) -> Tensor:
        return self.network(pictures) * self.scale + self.shift  # type: ignore[no-any-return]


def learn(before: Classifier | BiasCorrected, task: Task) -> BiasCorrected:
    return learn_and_correct(before, task, *hold_out(task))


def learn_and_correct(
    before: Classifier | BiasCorrected, task: Task, training: Samples, held: Samples, make: MakeHead = new_head
) -> BiasCorrected:
    """Train the network on some images, and fit the scale and the shift of its new classes on others."""
    earlier = before.network if isinstance(before, BiasCorrected) else before
    network, teacher = whole_network.student_and_teacher(earlier, task, make)
    answering = BiasCorrected(teacher, before.scale, before.shift) if isinstance(before, BiasCorrected) else teacher
    whole_network.train(network, task, training, whole_network.distillation_loss(network, answering, task))
    new = whole_network.in_step(task)
    (alpha,), (beta,) = [1.0], [0.0]
    if len(held):
        logits = whole_network.augmented_outputs(network, task, held).flatten(0, 1)
        labels = torch.from_numpy(task.labels(held)).to(task.device).repeat(task.views)
        (alpha,), (beta,) = fit_biases(logits, labels, new.long())
    return BiasCorrected(network, 1 + (alpha - 1) * new.float(), beta * new.float())


def first_as_published(task: Task) -> BiasCorrected:
    out = some_of_each(task.new, held_out_of(task.after or task.per_class), np.random.default_rng(task.seed))
    network = first(replace(task, new=task.new.select(~out)))
    ones = torch.ones(len(task.space.classes), device=task.device)
    return BiasCorrected(network, ones, 0 * ones, task.new.select(out))


def learn_as_published(before: BiasCorrected, task: Task) -> BiasCorrected:
    assert before.unseen is not None
    number = held_out_of(task.per_class)
    out = some_of_each(task.new, number, np.random.default_rng(task.seed))
    # All that was ever held out, so that none of it trains later; as many as the memory has room for fit the bias.
    unseen = concatenate([before.unseen, task.new.select(out)])
    held = unseen.select(whole_network.first_of_each(unseen, number))
    never = set(before.unseen.ids)
    memory = task.memory.select(np.array([name not in never for name in task.memory.ids], dtype=bool))
    memory = memory.select(whole_network.first_of_each(memory, max(task.per_class - number, 1)))
    learned = learn_and_correct(before, task, concatenate([task.new.select(~out), memory]), held, linear_head)
    learned.unseen = unseen
    return learned


def learn_on_features(before: Classifier, task: Task) -> OnFeatures:
    data = feature_heads.cached(before, task, feature_heads.balanced(task), views=task.views)
    with torch.no_grad():
        columns = before.fused.frozen_columns(data.features.flatten(0, 1).unbind(1))
    group = torch.from_numpy(task.space.branch_of_column).to(task.device)
    scale, shift = fit_biases(columns, data.labels.repeat(len(data.features)), group, before.fused.pooler)
    return with_scales(before, [1.0, *scale], [0.0, *shift], task.device)


def held_out_of(exemplars: int) -> int:
    """How many of a class's exemplars are held out."""
    return max(1, round(HELD_OUT * exemplars))


def hold_out(task: Task) -> tuple[Samples, Samples]:
    """Images to train on, and held-out ones: as many of each new class as of each old one from each of its origins."""
    rng = np.random.default_rng(task.seed)
    training, held = [], []
    for table in (task.new, task.memory):
        out = some_of_each(table, held_out_of(task.per_class), rng)
        training.append(table.select(~out))
        held.append(table.select(out))
    if not len(held[1]):  # single exemplars: better seen twice than not at all
        held[1] = task.memory
    if not len(held[0]) or not len(held[1]):
        return whole_network.new_and_exemplars(task), task.new.select(np.zeros(len(task.new), dtype=bool))
    return concatenate(training), concatenate(held)


def some_of_each(table: Samples, number: int, rng: np.random.Generator) -> Bools:
    """A mask of `number` random images of each class and origin, but never of all that there are."""
    out = np.zeros(len(table), dtype=bool)
    group = table.labels * (1 + table.origin.max(initial=0)) + table.origin
    for one in np.unique(group):
        members = rng.permutation(np.flatnonzero(group == one))
        out[members[: min(number, len(members) - 1)]] = True
    return out


def fit_biases(
    columns: Tensor, labels: Tensor, group: Tensor, pooled: Callable[[Tensor], Tensor] = lambda z: z
) -> tuple[list[float], list[float]]:
    """For each group of columns but the first, number 0, the scale and the shift with the least cross-entropy."""
    z = columns.double()
    groups = int(group.max()) if len(group) else 0
    scale = torch.ones(groups, device=z.device, dtype=z.dtype, requires_grad=True)
    shift = torch.zeros(groups, device=z.device, dtype=z.dtype, requires_grad=True)

    def loss() -> Tensor:
        of_group = [
            torch.cat([start, values])[group] for start, values in ((z.new_ones(1), scale), (z.new_zeros(1), shift))
        ]
        value = F.cross_entropy(pooled(z * of_group[0] + of_group[1]), labels)
        return value + RIDGE * ((scale - 1).square().sum() + shift.square().sum())

    feature_heads.minimise(loss, [scale, shift])
    return scale.tolist(), shift.tolist()


BASELINES = (
    Baseline("bic", "BiC", learn, on="network", published=Published(first_as_published, learn_as_published)),
    Baseline("fa-bic", "FA+BiC", learn_on_features, on="features"),
)
