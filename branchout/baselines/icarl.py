"""iCaRL: the network is trained on new images and exemplars with distillation, and answers with the class whose
exemplars' mean feature is nearest. Exemplars of the new classes are herded: chosen one by one so that their mean stays
near the class's.

Source: Rebuffi et al., CVPR 2017. As published a linear head with bias has one sigmoid a class, old outputs are
distilled by the binary cross-entropy to the teacher's sigmoids, and the last block of CIFAR's ResNet has no ReLU. The
rate starts at 2 and falls by 5 after 49 and 63 of 70 epochs. The loss is the mean over all classes so far and weight
decay is 5e-5, as in the code of Douillard et al. (ECCV 2020), whose iCaRL later tables on CIFAR-100 compare with; in
Rebuffi's it is the mean over 100 outputs, and 2e-5. The network is Rebuffi's: no block of Douillard's ends in a ReLU,
and only the classifier reads features after one. Departures there: biases decay too, and brightness is jittered, as in
all later work on CIFAR-100. The iCaRL of Hou et al. (CVPR 2019) is another: a softmax with the distillation of LwF.

Departures of the default, which starts from the shared base: cross-entropy and distillation (temperature 2) over a
softmax, as Hou et al. (CVPR 2019) and later tables have it: logits of a base that was trained with a softmax are no
odds. The two weigh 1 − λ and λ = old/(old + new), as in BiC and WA: with ten exemplars a class and many old classes
equal weights forget more than the original, whose old outputs outweigh the new by their number.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import published_training, whole_network
from branchout.baselines.networks import Network
from branchout.baselines.task import Baseline, Published, Task
from branchout.data.memory import keep
from branchout.data.samples import Samples, concatenate
from branchout.model.classifier import Classifier
from branchout.model.heads import NORM
from branchout.training.optimisation import Optimisation

DESCENT = Optimisation(epochs=70, lr=2.0, batch=128, weight_decay=5e-5, schedule="icarl")


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
    loss_of = whole_network.distillation_loss(network, teacher, task)
    whole_network.train(network, task, whole_network.new_and_exemplars(task), loss_of)
    return nearest_mean(network, task)


def nearest_mean(network: Network, task: Task) -> NearestMean:
    """The network with the means of as many exemplars as the memory has room for once this step is over."""
    room = task.after or task.per_class
    features = whole_network.plain_outputs(network.features, task, task.new).cpu().numpy()
    kept = keep(task.new, per_class=room, rule="herding", rows=features)
    old = [task.memory.select(whole_network.first_of_each(task.memory, room))] if len(task.memory) else []
    return NearestMean(network, exemplar_means(network, task, concatenate([*old, kept])), kept)


def exemplar_means(network: Network, task: Task, exemplars: Samples) -> Tensor:
    """The mean direction (classes × k) of each class's exemplars, and of their mirrors where the task has mirrors."""

    def directions(pictures: Tensor) -> Tensor:
        u = F.normalize(network.features(pictures), dim=1)
        return u + F.normalize(network.features(pictures.flip(3)), dim=1) if task.augmentation.flip else u

    u = whole_network.plain_outputs(directions, task, exemplars)
    sums = torch.zeros(len(task.space.classes), u.shape[1], device=task.device)
    sums.index_add_(0, torch.from_numpy(task.labels(exemplars)).to(task.device), u)
    return F.normalize(sums, dim=1)


def sigmoid_loss(z: Tensor, target: Tensor, remembered: Tensor | None, new: Tensor) -> Tensor:
    """Binary cross-entropy of every output: to the label, and for classes that are not `new` to the teacher's."""
    wanted = F.one_hot(target, z.shape[1]).to(z)
    if remembered is not None:
        old = ~new[: remembered.shape[1]]
        wanted[:, : len(old)][:, old] = remembered.sigmoid()[:, old]
    return F.binary_cross_entropy_with_logits(z, wanted)


def first_as_published(task: Task) -> NearestMean:
    loss_of = partial(sigmoid_loss, remembered=None, new=whole_network.in_step(task))
    descent = published_training.scaled(DESCENT, task.pretraining)
    network = published_training.first(task, loss_of, relu="but the last", bias=True, optimisation=descent)
    return nearest_mean(network, task)


def learn_as_published(before: NearestMean, task: Task) -> NearestMean:
    network, teacher = whole_network.student_and_teacher(before.network, task, published_training.linear_head)
    new = whole_network.in_step(task)

    def loss_of(pictures: Tensor, target: Tensor) -> Tensor:
        return sigmoid_loss(network(pictures), target, teacher(pictures), new)

    samples = whole_network.new_and_exemplars(task)
    whole_network.train(network, task, samples, loss_of, optimisation=published_training.scaled(DESCENT, task.network))
    return nearest_mean(network, task)


BASELINES = (
    Baseline("icarl", "iCaRL", learn, on="network", published=Published(first_as_published, learn_as_published)),
)
