"""iCaRL: the network is trained on new images and exemplars with distillation, and answers with the class whose
exemplars' mean feature is nearest. Exemplars of the new classes are herded: chosen one by one so that their mean stays
near the class's.

Source: Rebuffi et al., CVPR 2017. Departures: cross-entropy and distillation (temperature 2) over a softmax, as Hou et
al. (CVPR 2019) and later tables have it, instead of one sigmoid a class: logits of a base that was trained with a
softmax are no odds. Hou et al. let the two weigh the same; here they weigh 1 − λ and λ = old/(old + new), as in BiC and
WA: with ten exemplars a class and many old classes equal weights forget more than the original's sigmoids, of which the
old ones, all distilled, outweigh the new by their number. Exemplars of earlier classes are those the task gives; `kept`
names the ones herded of the new. Means are of as many exemplars as the step was given: under a memory of fixed size the
new classes take their share of it only afterwards, and the task does not say how large that will be.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import whole_network
from branchout.baselines.networks import Network
from branchout.baselines.registry import Baseline
from branchout.baselines.task import Task
from branchout.data.memory import keep
from branchout.data.samples import Samples, concatenate
from branchout.model.classifier import Classifier
from branchout.model.heads import NORM


class NearestMean(nn.Module):
    """Scores 16·cos to the mean of each class's exemplars: among vectors of one length the nearest has the largest."""

    means: Tensor

    def __init__(self, network: Network, means: Tensor, kept: Samples) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("means", means)
        self.kept = kept

    def stored(self) -> int:
        """Numbers that it takes to answer, beside the network; its exemplars are for later steps."""
        return self.means.numel()

    def forward(self, pictures: Tensor) -> Tensor:
        return NORM**2 * F.normalize(self.network.features(pictures), dim=1) @ self.means.T


def learn(before: Classifier | NearestMean, task: Task) -> NearestMean:
    network, teacher = whole_network.student_and_teacher(
        before.network if isinstance(before, NearestMean) else before, task
    )
    whole_network.train(
        network,
        task,
        whole_network.new_and_exemplars(task),
        whole_network.distillation_loss(network, teacher, task),
    )
    features = whole_network.plain_outputs(network.features, task, task.new).cpu().numpy()
    kept = keep(task.new, per_class=task.per_class, rule="herding", features=features)
    return NearestMean(network, exemplar_means(network, task, concatenate([task.memory, kept])), kept)


def exemplar_means(network: Network, task: Task, exemplars: Samples) -> Tensor:
    """The mean direction (classes × k) of each class's exemplars, and of their mirrors where the task has mirrors."""

    def directions(pictures: Tensor) -> Tensor:
        u = F.normalize(network.features(pictures), dim=1)
        return u + F.normalize(network.features(pictures.flip(3)), dim=1) if task.augmentation.flip else u

    u = whole_network.plain_outputs(directions, task, exemplars)
    sums = torch.zeros(len(task.space.classes), u.shape[1], device=task.device)
    sums.index_add_(0, torch.from_numpy(task.labels(exemplars)).to(task.device), u)
    return F.normalize(sums, dim=1)


BASELINES = (Baseline("icarl", "iCaRL", learn, on="network"),)
