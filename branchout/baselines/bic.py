"""BiC, bias correction: distillation and exemplars keep the network, but its new classes' logits come out too strong;
so at the end their one scale and one shift are fitted on held-out images with as many of each old class as of each new.
FA+BiC does the same to the logits of the paper's new branch, which never touched the old ones.

Source: Wu et al., CVPR 2019; λ = old/(old + new), temperature 2, and a tenth of the exemplars held out are theirs.
FA+BiC: the paper's section 5.2 (Wu et al., CVPR 2022). As published the base and the network have a linear head whose
new rows start at random; by default they are the shared base's. Departures of both: the two numbers are found by L-BFGS
at the optimum, with a slight pull to 1 and 0; exemplars are chosen from all images of a class, so that those held out
in later steps were trained on while it was new. In BiC the loss of the two numbers is convex; in FA+BiC only while
classes do not overlap. In FA+BiC no exemplar trained the branch, so all are used, and as the branches are given anew
at each step all their numbers are fitted together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import feature_heads, whole_network
from branchout.baselines.networks import MakeHead, Network, OnFeatures, frozen_copy, with_scales
from branchout.baselines.published_training import first, linear_head
from branchout.baselines.task import Baseline, Published, Task
from branchout.data.samples import Samples, concatenate
from branchout.model.classifier import Classifier
from branchout.model.heads import new_head

HELD_OUT = 0.1
"""Share of the exemplars that fit the bias and train nothing."""
RIDGE = 1e-4
"""Pull of the scale to 1 and the shift to 0, so that images which are told apart perfectly have an answer too."""


class BiasCorrected(nn.Module):
    """A network with a scale and a shift for each class's logit; those of one step share theirs."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: Network, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.network(pictures) * self.scale + self.shift  # type: ignore[no-any-return]


def learn(before: Classifier | Network | BiasCorrected, task: Task, *, make: MakeHead = new_head) -> BiasCorrected:
    network, teacher = whole_network.student_and_teacher(
        before.network if isinstance(before, BiasCorrected) else before, task, make
    )
    known, classes = len(teacher.head.weight), len(task.space.classes)
    scale, shift = torch.ones(classes, device=task.device), torch.zeros(classes, device=task.device)
    if isinstance(before, BiasCorrected):
        scale[:known], shift[:known] = before.scale, before.shift
    # Both teacher and student answer through the biases of earlier steps.
    corrected_teacher = frozen_copy(BiasCorrected(teacher, scale[:known], shift[:known]))
    student = BiasCorrected(network, scale, shift)
    training, held = hold_out(task)
    whole_network.train(student, task, training, whole_network.distillation_loss(student, corrected_teacher, task))
    if len(held):
        logits = whole_network.augmented_outputs(student, task, held).flatten(0, 1)
        labels = torch.from_numpy(task.labels(held)).to(task.device).repeat(task.views)
        mask = whole_network.in_step(task)
        (alpha,), (beta,) = fit_biases(logits, labels, mask.long())
        student.scale = torch.where(mask, alpha * student.scale, student.scale)
        student.shift = torch.where(mask, alpha * student.shift + beta, student.shift)
    return student


def learn_on_features(before: Classifier, task: Task) -> OnFeatures:
    data = feature_heads.cached(before, task, feature_heads.balanced(task), views=task.views)
    with torch.no_grad():
        columns = before.fused.frozen_columns(data.features.flatten(0, 1).unbind(1))
    group = torch.from_numpy(task.space.branch_of_column).to(task.device)
    scale, shift = fit_biases(columns, data.labels.repeat(len(data.features)), group, before.fused.pooler)
    return with_scales(before, [1.0, *scale], [0.0, *shift], task.device)


def hold_out(task: Task) -> tuple[Samples, Samples]:
    """Images to train on, and held-out ones: as many of each new class as of each old one from each of its origins."""
    number = max(1, round(HELD_OUT * task.per_class))
    rng = np.random.default_rng(task.seed)
    training, held = [], []
    for table in (task.new, task.memory):
        out = np.zeros(len(table), dtype=bool)
        group = table.labels * (1 + table.origin.max(initial=0)) + table.origin
        for one in np.unique(group):
            members = rng.permutation(np.flatnonzero(group == one))
            out[members[: min(number, len(members) - 1)]] = True
        training.append(table.select(~out))
        held.append(table.select(out))
    if not len(held[1]):  # single exemplars: better seen twice than not at all
        held[1] = task.memory
    if not len(held[0]) or not len(held[1]):
        return whole_network.new_and_exemplars(task), task.new.select(np.zeros(len(task.new), dtype=bool))
    return concatenate(training), concatenate(held)


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
    Baseline("bic", "BiC", learn, on="network", published=Published(first, partial(learn, make=linear_head))),
    Baseline("fa-bic", "FA+BiC", learn_on_features, on="features"),
)
