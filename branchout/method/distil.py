"""Distillation of several step branches into fewer: the old model as a teacher, the new branches and their loss.

    L = T²·KL(z_taught ‖ z) + w·Σ_n T²·KL(z_taught[Y_n] ‖ z[Y_n])        over all classes, and over those of each step n

Most classes of most steps have next to no probability in a softmax over all classes, so what a branch knows of its own
classes would be learned from the few images of these classes alone. Within its step it is learned from every image.
Where branches correct the base's logits, the base's classes count as a step.

The model to compact answers whatever it is shown, so few images are mixed in pairs to make more of them.

Symbols: h(x; Φ_s) → `x` · z_b → `z_base` · z_taught, the logits of the model to compact over all classes → `taught` ·
Y_n → `steps` · w → `WITHIN`, or less where steps are many
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from branchout.data.images import SMALL, Images, shuffled
from branchout.labels import Ints, LabelSpace
from branchout.method.frozen import Frozen
from branchout.method.recipes import BRANCHOUT
from branchout.method.trunk_cache import TrunkOutputs
from branchout.model.classifier import Classifier, Step
from branchout.model.heads import Correction, Pooler, new_head
from branchout.model.staged import Branch, branch_point
from branchout.training.loop import OnProgress, fit, precision, seed_for, silent
from branchout.training.losses import softened_kl
from branchout.training.optimisation import Optimisation, scale_to_dataset

TEMPERATURE = 2.0
DISTILLATION = Optimisation(epochs=0, nesterov=True, schedule="cosine")
"""The epochs follow from the number of images."""
SEEN = {"cuda": 1_280_000, "cpu": 160_000}
"""Images that the new branches see in all, by device: fewer cost accuracy, more take time."""
FEWEST_EPOCHS, MOST_EPOCHS = 12, {"cuda": 640, "cpu": 320}
VIEWS = {"cuda": 0, "cpu": 16}
"""Cached views of each image; 0 makes new ones in every epoch, for which a CPU has no time."""
MIXED_FROM = {"cuda": 100, "cpu": 50}
"""Epochs from which on images are mixed in pairs: those that are seen less often are enough as they are."""
WITHIN, MOST_WITHIN = 3.0, 30.0
"""Weight of the loss within each step, and the most that all of these weigh together; over all classes it is 1."""
CHECKPOINTS = 50
"""How often a run is saved, at most: its epochs are many and short."""


def kind_of(device: torch.device) -> str:
    """The key of settings that differ by device."""
    return "cuda" if device.type == "cuda" else "cpu"


def epochs_for(images: int, device: torch.device) -> int:
    """Epochs of distillation for so many images."""
    kind = kind_of(device)
    return min(max(FEWEST_EPOCHS, -(-SEEN[kind] // images)), MOST_EPOCHS[kind])


def cached_views(epochs: int, device: torch.device) -> int:
    """An epoch uses one view of each image."""
    return min(VIEWS[kind_of(device)], epochs)


class Teacher(Frozen):
    """The model to compact: what enters the new branches, the base's logits, and its own over all classes."""

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[Tensor]:
        x, features = self.run(images)
        return [x, self.model.base_head(features[0]), self.model.fused(features)]


class Student(nn.Module):
    """What compaction trains: the new branches with their heads and corrections."""

    biases: Tensor

    def __init__(self, steps: Sequence[Step], space: LabelSpace, pooler: str, biases: Sequence[float]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(step.branch for step in steps)
        self.heads = nn.ModuleList(step.head for step in steps)
        self.corrections = nn.ModuleDict(
            {str(number): step.correction for number, step in enumerate(steps) if step.correction is not None}
        )
        self.pooler = Pooler(space, pooler)
        self.register_buffer("biases", torch.tensor(biases), persistent=False)

    def forward(self, x: Tensor, z_base: Tensor) -> Tensor:
        """Logits over all classes."""
        with precision(x.device):
            features = [branch(x).float() for branch in self.branches]
        own = [head(h) + b for head, h, b in zip(self.heads, features, self.biases, strict=True)]
        z = torch.cat([z_base, *own], dim=1)
        for number, correction in self.corrections.items():
            z = correction(z, features[int(number)])
        return self.pooler(z)  # type: ignore[no-any-return]

    def trained_parameters(self) -> list[nn.Parameter]:
        own = [parameter for branch in self.branches for parameter in branch.own_parameters()]  # type: ignore[operator]
        return [*own, *self.heads.parameters(), *self.corrections.parameters()]


def compaction_loss(z: Tensor, taught: Tensor, steps: Sequence[Tensor]) -> Tensor:
    """From the model to compact to the new one; `steps` has the numbers of the classes of each old step."""
    within = [softened_kl(taught[:, classes], z[:, classes], TEMPERATURE) for classes in steps]
    weight = min(WITHIN, MOST_WITHIN / len(steps))
    return TEMPERATURE**2 * (softened_kl(taught, z, TEMPERATURE) + weight * torch.stack(within).sum())


def distil(
    teacher: Classifier,
    student: Student,
    images: Images,
    start: int,
    steps: Sequence[Ints],
    *,
    epochs: int,
    views: int,
    seed: int,
    device: torch.device,
    checkpoint: Path | None = None,
    on_progress: OnProgress = silent,
) -> list[float]:
    """Train the student; returns the mean loss of every epoch.

    `start` is the stage whose input enters the new branches, `steps` has the numbers of the classes of each old step.
    """
    frozen = Teacher(teacher, start, BRANCHOUT.stage_one, device=device)
    frozen.augmentation = replace(frozen.augmentation, mixed=epochs >= MIXED_FROM[kind_of(device)])
    compressed = device.type == "cpu" and teacher.preprocessing.size > SMALL
    trunk = TrunkOutputs(
        frozen, [images], views, compressed=compressed, checkpoint=checkpoint, seed=seed, on_progress=on_progress
    )
    optimisation = scale_to_dataset(replace(DISTILLATION, epochs=epochs), len(images))
    of_steps = [torch.from_numpy(classes).to(device) for classes in steps]

    def batches(epoch: int) -> Iterator[list[Tensor]]:
        return trunk.batches(epoch, [shuffled(len(images), optimisation.batch, seed_for(seed, epoch), drop_last=True)])

    return fit(
        student.train(),
        student.trained_parameters(),
        batches,
        max(len(images) // optimisation.batch, 1),
        lambda batch: compaction_loss(student(batch[0], batch[1]), batch[2], of_steps),
        optimisation,
        device=device,
        work="Distilling the branches",
        checkpoint=checkpoint,
        save_every=-(-epochs // CHECKPOINTS),
        on_progress=on_progress,
    )


def groups_of(steps: int, branches: int) -> list[list[int]]:
    """Numbers of consecutive steps (from 1) that will share a branch, about as many in each group."""
    return [group.tolist() for group in np.array_split(np.arange(1, steps + 1), branches)]


def common_branch_point(base: Classifier, points: Sequence[str]) -> str:
    """Where the new branches start: where all old ones do, or at the earliest stage that any of them clones."""
    if len(set(points)) == 1:
        return points[0]
    start = min(branch_point(base.backbone, where).start for where in points)
    return "fc" if start == len(base.backbone.names) else base.backbone.names[start]


def merged_steps(
    base: Classifier, steps: Sequence[Step], groups: Sequence[Sequence[int]], space: LabelSpace, where: str
) -> list[Step]:
    """A new step for every group of old ones; it corrects the logits before it if any old step did."""
    corrects = any(step.correction is not None for step in steps)
    found = []
    for number, group in enumerate(groups, 1):
        step = merged_step(base, [steps[n - 1] for n in group], space.branches[number], where)
        correction = Correction(base.backbone.features, space.slice_of(number).start) if corrects else None
        found.append(replace(step, correction=correction))
    return found


@torch.no_grad()
def merged_step(base: Classifier, steps: Sequence[Step], names: Sequence[str], where: str) -> Step:
    """A branch that starts at the mean of the weights of these steps', and a head with the rows of all of them."""
    point = branch_point(base.backbone, where)
    branch = Branch.clone(base.backbone, point)
    if all(step.where == where for step in steps):
        states = [step.branch.own_state_dict() for step in steps]
        mean = {
            key: torch.stack([state[key].float() for state in states]).mean(0).to(value.dtype)
            for key, value in branch.own_state_dict().items()
        }
        branch.load_state_dict(mean, strict=False)
    head = new_head(base.base_head, len(names))
    rows = {name: (step.head, n) for step in steps for n, name in enumerate(step.names)}
    for number, name in enumerate(names):
        old, row = rows[name]
        for key, parameter in head.named_parameters():
            parameter[number] = old.get_parameter(key)[row]
    return Step(tuple(names), where, point.start, branch, head)
