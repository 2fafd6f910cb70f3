"""Routing against loops over samples."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import untrained
from torch import Tensor

from branchout.baselines import routing
from branchout.baselines.task import Task
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.model.classifier import Classifier

BRANCHES = (["ant", "bee", "cow"], ["bee", "dog"], ["cow", "elk", "fox"])


@pytest.fixture(scope="module")
def model() -> Classifier:
    """Two steps, each with a class that was known before."""
    return untrained(*BRANCHES)


def some_features(model: Classifier, count: int = 60) -> Tensor:
    return torch.randn(count, 3, model.backbone.features, generator=torch.Generator().manual_seed(2))


def slow_answer(model: Classifier, features: Tensor, branch: int) -> tuple[str, float]:
    """What one branch says of one picture."""
    p = model.fused.heads[branch](features[branch][None]).softmax(1)[0]
    return BRANCHES[branch][int(p.argmax())], float(p.max())


def test_the_surest_branch_answers(model: Classifier) -> None:
    features = some_features(model)
    scores = routing.Routed(model.fused)(features)
    for each, score in zip(features, scores, strict=True):
        name, confidence = max((slow_answer(model, each, d) for d in range(3)), key=lambda answer: answer[1])
        assert model.space.classes[int(score.argmax())] == name
        assert float(score.max()) == pytest.approx(confidence, abs=1e-6)


def test_the_branch_that_the_router_names_answers_alone(model: Classifier) -> None:
    features = some_features(model)
    router = routing.Router(3 * model.backbone.features, 3)
    scores = routing.Routed(model.fused, router)(features)
    chosen = router(features).argmax(1)
    assert set(chosen.tolist()) == {0, 1, 2}
    for each, score, branch in zip(features, scores, chosen.tolist(), strict=True):
        assert model.space.classes[int(score.argmax())] == slow_answer(model, each, branch)[0]
        heard = {model.space.classes[n] for n in (score >= 0).nonzero().flatten().tolist()}
        assert heard == set(BRANCHES[branch])


def slow_loss(scores: Tensor, origin: Tensor) -> float:
    """The paper's L_rt-bal, term by term."""
    total = 0.0
    for split in range(scores.shape[1]):
        terms = [-float(F.log_softmax(s, 0)[split]) for s, o in zip(scores, origin, strict=True) if o == split]
        total += sum(terms) / len(terms) / scores.shape[1] if terms else 0.0
    return total


def test_the_loss_is_the_papers() -> None:
    scores = torch.randn(23, 3, generator=torch.Generator().manual_seed(1))
    origin = torch.tensor([0] * 15 + [1] * 2 + [2] * 6)
    assert float(routing.balanced_loss(scores, origin)) == pytest.approx(slow_loss(scores, origin), rel=1e-5)


def test_splits_weigh_the_same_whatever_their_size() -> None:
    scores = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    origin = torch.tensor([0, 0, 0, 1, 1, 1])
    often = torch.cat([scores, scores[:3].repeat(9, 1)])
    assert torch.allclose(
        routing.balanced_loss(often, torch.cat([origin, torch.zeros(27, dtype=torch.long)])),
        routing.balanced_loss(scores, origin),
    )


def test_a_batch_without_one_split_has_a_loss() -> None:
    scores = torch.randn(4, 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = routing.balanced_loss(scores, torch.zeros(4, dtype=torch.long))
    loss.backward()
    half = F.cross_entropy(scores.detach(), torch.zeros(4, dtype=torch.long)) / 2
    assert torch.allclose(loss.detach(), half)
    assert torch.isfinite(scores.grad).all()


def test_the_router_is_at_the_optimum_and_the_same_images_give_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    origin = torch.tensor([0] * 150 + [1] * 50)
    features = torch.randn(200, 2, 6, generator=generator) + 0.5 * origin[:, None, None]
    router = routing.fitted(features, origin, 2).requires_grad_(True)
    loss = routing.balanced_loss(router(features), origin) + 1e-4 / 2 * router.linear.weight.square().sum()
    loss.backward()
    assert router.linear.weight.grad.norm() < 1e-3
    slow = torch.zeros(2, 12, dtype=torch.float64, requires_grad=True)
    read = (4 * F.normalize(features.double(), dim=-1)).flatten(1)
    for _ in range(1000):  # plain descent
        value = routing.balanced_loss(read @ slow.T, origin) + 1e-4 / 2 * slow.square().sum()
        (gradient,) = torch.autograd.grad(value, slow)
        slow = (slow - 0.2 * gradient).detach().requires_grad_(True)
    assert value.item() - 1e-3 < loss.item() <= value.item() + 1e-5
    assert torch.equal(routing.fitted(features, origin, 2).linear.weight, router.linear.weight)


def test_the_oracles_router_does_not_depend_on_the_seed(branched: Callable[[Task], Classifier], task: Task) -> None:
    one, other = (
        routing.learned(branched(task), replace(task, seed=seed), oracle=True).head.router.linear.weight
        for seed in (1, 2)
    )
    assert torch.equal(one, other)


def test_new_looks_of_old_classes_go_to_the_new_branch(
    branched: Callable[[Task], Classifier], overlapping_task: Task, new_look_test: Samples
) -> None:
    """What the router learns is where a sample came from, not which class it shows."""
    model = branched(overlapping_task)
    scorer = routing.learned(model, overlapping_task)
    pictures = next(overlapping_task.images(new_look_test).plain([torch.arange(len(new_look_test)).numpy()]))
    routed = scorer.head.router(torch.stack(model.features(pictures), dim=1)).argmax(1)
    assert routed.float().mean() > 0.8


def test_the_oracle_needs_all_images(branched: Callable[[Task], Classifier], task: Task) -> None:
    with pytest.raises(BranchoutError, match="all training images"):
        routing.learned(branched(task), replace(task, everything=None), oracle=True)
