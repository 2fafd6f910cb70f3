"""Score fusion against a version that trains one point at a time with a loop over samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from branchout.data.images import class_balanced
from branchout.labels import LabelSpace
from branchout.method import stage2 as stage_two
from branchout.method.recipes import GRID, PAPER, REFERENCE, Stage2
from branchout.method.score_fusion import HeadLayout, Stage2Data
from branchout.method.stage2 import train_grid
from branchout.training.optimisation import Optimisation

K = 6


def quick(settings: Stage2, grid: tuple[tuple[float, float], ...] = GRID) -> Stage2:
    return replace(settings, grid=grid, optimisation=replace(settings.optimisation, epochs=3, batch=16))


def random_data(space: LabelSpace, features: int, seed: int, per_class: int = 4) -> Stage2Data:
    generator = torch.Generator().manual_seed(seed)
    pairs = [(c, d) for d, names in enumerate(space.branches) for c in space.index(names) for _ in range(per_class)]
    labels, origin = (torch.tensor(values) for values in zip(*pairs, strict=True))
    return Stage2Data(
        u=torch.randn(2, len(pairs), features, K, generator=generator, dtype=torch.float64),
        z=torch.randn(2, len(pairs), space.columns, generator=generator, dtype=torch.float64) * 3,
        labels=labels,
        origin=origin,
    )


def slow_single_point(
    layout: HeadLayout, data: Stage2Data, settings: Stage2, alpha: float, beta: float, start: list[Tensor], seed: int
) -> list[Tensor]:
    """The paper's stage II for one point, sample by sample and straight from the equations."""
    space, branches = layout.space, len(layout.space.branches)
    deltas = [delta.clone().requires_grad_() for delta in start]
    router = torch.eye(branches, dtype=torch.float64, requires_grad=True)
    parameters = [*deltas, router] if settings.learned_router else deltas
    momentum = [torch.zeros_like(p) for p in parameters]
    for epoch in range(settings.optimisation.epochs):
        mixed = int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
        for batch in class_balanced(data.labels.numpy(), 4, settings.optimisation.batch, mixed):
            losses, routed = [], [[] for _ in range(branches)]
            for i in batch.tolist():
                u, z = data.u[epoch % 2, i], data.z[epoch % 2, i]
                from_base = int(data.origin[i]) == 0
                fused = []
                for d in range(branches):
                    own = z[space.slice_of(d)]
                    others = sorted({layout.feature_of[e] for e in range(branches) if e != d})
                    change = 0.0
                    for n, f in enumerate(others):
                        part = u[f] @ deltas[d][n * K : (n + 1) * K]
                        of_new_branch = f > 0 or d == 0
                        scaled = from_base and of_new_branch and (d == 0 or settings.beta_on_head)
                        change = change + (beta * part if scaled else part)
                    if from_base and d > 0 and settings.beta_on_head:
                        own = beta * own
                    fused.append(own + change)
                flat = torch.cat(fused)
                scores = []
                for name in range(len(space.classes)):
                    columns = [c for c, owner in enumerate(space.class_of_column) if owner == name]
                    scores.append(flat[columns].max() if layout.pooler == "max" else flat[columns].mean())
                losses.append(-torch.log_softmax(torch.stack(scores), 0)[data.labels[i]])
                r = torch.stack([part.max() for part in fused])
                r = r @ router if settings.learned_router else r
                routed[int(data.origin[i])].append(-torch.log_softmax(r, 0)[data.origin[i]])
            rt = sum(torch.stack(part).mean() for part in routed if part) / branches
            loss = (1 - alpha) * torch.stack(losses).mean() + alpha * rt
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            with torch.no_grad():
                for p, g, m in zip(parameters, gradients, momentum, strict=True):
                    g = torch.zeros_like(p) if g is None else g
                    m.mul_(0.9).add_(g + settings.optimisation.weight_decay * p)
                    p.sub_(settings.optimisation.lr * m)
    return [delta.detach() for delta in deltas]


DISJOINT = LabelSpace.of(["a", "b", "c"], ["d", "e"])
OVERLAPPING = LabelSpace.of(["a", "b", "c"], ["c", "d"])
THREE_STEPS = LabelSpace.of(["a", "b"], ["c"], ["d", "a"])


@pytest.mark.parametrize(("space", "inputs"), [(DISJOINT, K), (THREE_STEPS, 3 * K)], ids=["one step", "two steps"])
def test_deltas_start_as_one_linear_layer_would(space: LabelSpace, inputs: int) -> None:
    layout = HeadLayout(space, tuple(range(len(space.branches))), "max")
    like = torch.zeros(1, dtype=torch.float64)
    start = stage_two.initial_deltas(layout, K, 200, 1, REFERENCE.stage_two, 1, like)
    largest = max(float(delta.detach().abs().max()) for delta in start)
    assert 0.99 * inputs**-0.5 < largest <= inputs**-0.5


@pytest.mark.parametrize("settings", [PAPER.stage_two, REFERENCE.stage_two], ids=["paper", "reference"])
@pytest.mark.parametrize(
    ("space", "feature_of", "pooler"),
    [
        (DISJOINT, (0, 1), "max"),
        (OVERLAPPING, (0, 1), "max"),
        (OVERLAPPING, (0, 0), "average"),
        (THREE_STEPS, (0, 1, 2), "max"),
    ],
    ids=["disjoint", "overlap", "fc-only", "steps"],
)
def test_grid_equals_the_equations_point_by_point(
    settings: Stage2, space: LabelSpace, feature_of: tuple[int, ...], pooler: str
) -> None:
    grid = ((0.0, 1.0), (0.4, 0.2), (1.0, 0.0))
    settings = quick(settings, grid)
    layout = HeadLayout(space, feature_of, pooler)
    data = [random_data(space, max(feature_of) + 1, seed) for seed in (0, 1)]
    trained = train_grid(layout, data, settings, seed=5, per_class=4)
    start = stage_two.initial_deltas(layout, K, 2, 1, settings, 5, data[0].u)
    for s in range(2):
        for point, (alpha, beta) in enumerate(grid):
            alone = [delta[s, :, 0].detach() for delta in start]
            expected = slow_single_point(layout, data[s], settings, alpha, beta, alone, 5 + s)
            for got, want in zip(trained.at(s, point), expected, strict=True):
                assert (got - want).abs().max() <= 1e-8


def test_whole_grid_equals_single_points_whatever_the_memory_limit() -> None:
    layout = HeadLayout(OVERLAPPING, (0, 1))
    data = [random_data(OVERLAPPING, 2, 0)]
    whole = train_grid(layout, data, quick(PAPER.stage_two), per_class=4)
    chunked = train_grid(layout, data, quick(PAPER.stage_two), per_class=4, memory_limit=20_000)
    for a, b in zip(whole.deltas, chunked.deltas, strict=True):
        assert a.shape[1] == len(GRID)
        assert (a - b).abs().max() <= 1e-8
    for point in (0, 17, 35):
        alone = train_grid(layout, data, quick(PAPER.stage_two, (GRID[point],)), per_class=4)
        for a, b in zip(whole.at(0, point), alone.at(0, 0), strict=True):
            assert (a - b).abs().max() <= 1e-8


def test_points_do_differ() -> None:
    trained = train_grid(
        HeadLayout(DISJOINT, (0, 1)), [random_data(DISJOINT, 2, 0)], quick(PAPER.stage_two), per_class=4
    )
    assert (trained.at(0, 0)[0] - trained.at(0, 35)[0]).abs().max() > 1e-3


def test_a_batch_without_one_of_the_splits_gives_numbers() -> None:
    settings = quick(PAPER.stage_two, ((0.5, 0.5), (1.0, 1.0)))
    settings = replace(settings, optimisation=replace(settings.optimisation, batch=1))
    trained = train_grid(
        HeadLayout(DISJOINT, (0, 1)), [random_data(DISJOINT, 2, 0, per_class=1)], settings, per_class=1
    )
    assert all(delta.isfinite().all() for delta in trained.deltas)


def test_only_deltas_get_gradients() -> None:
    data = random_data(DISJOINT, 2, 0)
    frozen = (data.u.requires_grad_(), data.z.requires_grad_())
    before = [tensor.detach().clone() for tensor in frozen]
    settings = replace(quick(PAPER.stage_two, ((0.4, 0.4),)), optimisation=Optimisation(epochs=1, schedule="constant"))
    seen: list[set[int]] = []

    class Watched(torch.optim.SGD):
        def __init__(self, params, **options):  # type: ignore[no-untyped-def]
            params = list(params)
            seen.append({p.numel() for p in params})
            super().__init__(params, **options)

    original, torch.optim.SGD = torch.optim.SGD, Watched  # type: ignore[misc]
    try:
        train_grid(HeadLayout(DISJOINT, (0, 1)), [data], settings, per_class=4)
    finally:
        torch.optim.SGD = original  # type: ignore[misc]
    assert seen == [{K * 3, K * 2, 4}]  # W_bn, W_nb and the 2×2 router, nothing else
    assert all(torch.equal(a, b) for a, b in zip(frozen, before, strict=True))


def test_the_learning_rate_follows_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self, *args: (rates.append(self.param_groups[0]["lr"]), step(self, *args))[1]
    )
    settings = quick(PAPER.stage_two, ((0.4, 0.4),))
    data = [random_data(DISJOINT, 2, 0)]
    for schedule, expected in (("constant", [0.1, 0.1, 0.1]), ("thirds", [0.1, 0.01, 0.001])):
        rates.clear()
        one = replace(settings, optimisation=replace(settings.optimisation, schedule=schedule))
        train_grid(HeadLayout(DISJOINT, (0, 1)), data, one, per_class=4)
        steps = len(rates) // 3  # of an epoch
        assert rates == pytest.approx([rate for rate in expected for _ in range(steps)])


def test_a_grid_too_large_for_the_device_is_trained_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, data = HeadLayout(DISJOINT, (0, 1)), [random_data(DISJOINT, 2, 0)]
    whole = train_grid(layout, data, quick(PAPER.stage_two), per_class=4)
    train, sizes = stage_two._train, []

    def small_device(*given: object, **options: object) -> list[Tensor]:
        sizes.append(len(given[3]))  # type: ignore[arg-type]
        if sizes[-1] > 5:
            raise torch.OutOfMemoryError
        return train(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(stage_two, "_train", small_device)
    parts = train_grid(layout, data, quick(PAPER.stage_two), per_class=4)
    assert max(sizes) > 5 >= min(sizes)
    for mine, theirs in zip(parts.deltas, whole.deltas, strict=True):
        assert torch.allclose(mine, theirs)
    monkeypatch.setattr(stage_two, "_train", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):  # not even one point fits
        train_grid(layout, data, quick(PAPER.stage_two), per_class=4)
