"""Heads on cached features: the images they see, how they read features, and the loop that trains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines.task import Task
from branchout.data.images import class_balanced, on_device
from branchout.data.memory import keep
from branchout.data.samples import Samples, concatenate
from branchout.errors import BranchoutError
from branchout.labels import Ints
from branchout.method.features import extract
from branchout.model.classifier import Classifier
from branchout.model.heads import NORM, CosineHead, Head, to_norm
from branchout.training.loop import fit, seed_for


@dataclass(frozen=True)
class Cached:
    """Features of some images by a frozen model."""

    features: Tensor  # (views, N, feature vectors, k)
    labels: Tensor  # (N,)
    origin: Tensor  # (N,)

    @classmethod
    def of(cls, features: Tensor, task: Task, samples: Samples) -> Cached:
        columns = (torch.from_numpy(column).to(task.device) for column in (task.labels(samples), samples.origin))
        return cls(features, *columns)


def balanced(task: Task) -> Samples:
    """The exemplars, and as many images of each class of this step: what stage II sees."""
    return concatenate([task.memory, keep(task.new, per_class=task.per_class, seed=task.seed)])


def everything(task: Task) -> Samples:
    """All training images so far, for oracles and `-all` variants."""
    if task.everything is None:
        raise BranchoutError(
            "this method sees all training images of all steps, and the task has none: set `everything`"
        )
    return task.everything


def cached(model: Classifier, task: Task, samples: Samples, *, views: int) -> Cached:
    """Features of some augmented views of each image; of the plain images if `views` is 0."""
    features = (
        task.features(model, samples, views, task.seed)
        if task.features
        else extract(
            model,
            task.images(samples),
            views=views,
            augmentation=task.head_augmentation,
            seed=task.seed,
            device=task.device,
            on_progress=task.on_progress,
        )
    )
    return Cached.of(features, task, samples)


def train(
    head: nn.Module,
    task: Task,
    data: Cached,
    scores: Callable[[Tensor], Tensor] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    order: Callable[[int], Sequence[Ints]] | None = None,
) -> None:
    """Train a head as stage II trains deltas; epoch e sees view e modulo their number.

    The `loss` is that of the head's scores, or of `scores`, for features (n, feature vectors, k). Unless `order` gives
    other batches of an epoch, it sees as many images of one class as of any other.
    """
    numbers = data.labels.cpu().numpy()

    def balanced_order(epoch: int) -> Sequence[Ints]:
        return class_balanced(numbers, task.per_class, task.heads.batch, seed_for(task.seed, epoch))

    order, scores = order or balanced_order, scores or head

    def epoch_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        view = data.features[epoch % len(data.features)]
        for index in on_device(order(epoch), task.device):
            yield view[index], data.labels[index]

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(scores(batch[0]), batch[1])

    steps, parameters = len(order(0)), list(head.parameters())
    fit(head, parameters, epoch_batches, steps, loss_of, task.heads, device=task.device, on_progress=task.on_progress)
    head.requires_grad_(False)


def minimise(loss: Callable[[], Tensor], parameters: Sequence[Tensor], iterations: int = 200) -> None:
    """L-BFGS until the loss stops changing."""
    solver = torch.optim.LBFGS(parameters, max_iter=iterations, line_search_fn="strong_wolfe")

    def evaluated() -> Tensor:
        solver.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    solver.step(evaluated)  # type: ignore[no-untyped-call]


def seed_step(task: Task) -> None:
    """Seed torch by the task's seed and step."""
    torch.manual_seed(seed_for(task.seed, task.step))


def concatenated(features: Tensor) -> Tensor:
    """h_b ⊕ h_n ⊕ …, each at norm 4 so that none outweighs another: (N, feature vectors, k) → (N, all of them · k)."""
    return to_norm(features).flatten(1)


class ScaledLinear(nn.Module):
    """A linear head that reads features brought to length 4 on average, its weights stretched to match.

    It computes what the head did. But a step of gradient descent changes a logit by the squared length of the
    features, so with those of a timm network the rates made for norm 4 would throw the weights far off.
    """

    scale: Tensor

    def __init__(self, head: nn.Linear, features: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", NORM / features.norm(dim=-1).mean().clamp(min=1e-12))
        self.weight = nn.Parameter(head.weight.detach() / self.scale)
        self.bias = nn.Parameter(
            torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias.detach().clone()
        )

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h * self.scale, self.weight, self.bias)


def trainable(head: Head, features: Tensor) -> CosineHead | ScaledLinear:
    """A copy of a head that can be trained on such features."""
    if isinstance(head, nn.Linear):
        return ScaledLinear(head, features)
    classes, width = head.weight.shape
    copy = CosineHead(width, classes).to(head.weight.device)
    copy.load_state_dict(head.state_dict())
    return copy


def plain_head(head: CosineHead | ScaledLinear) -> Head:
    """A head after training, as an ordinary head."""
    if isinstance(head, CosineHead):
        return head.requires_grad_(False)
    classes, width = head.weight.shape
    plain = nn.Linear(width, classes).to(head.weight.device)
    plain.load_state_dict({"weight": head.weight * head.scale, "bias": head.bias})
    return plain.requires_grad_(False)
