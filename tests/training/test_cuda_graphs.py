"""Recorded training steps, with a recorder that runs on a CPU: what is repeated, what is refused, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.training import cuda_graphs, processes
from branchout.training.cuda_graphs import EagerStep, GraphStep, fastest

CPU = torch.device("cpu")
STEPS = 12


@dataclass(frozen=True)
class Batch:
    x: Tensor
    y: Tensor
    z: Tensor | None
    new: int


class Replays:
    """Repeats a step by running it again. It can fail as CUDA does."""

    def __init__(self, *, waits: bool = False, fails: bool = False) -> None:
        self.waits, self.fails = waits, fails
        self.repeated = 0

    @contextmanager
    def warming_up(self, *, strict: bool) -> Iterator[None]:
        yield
        if strict and self.waits:
            raise RuntimeError("called a synchronizing CUDA operation\nmore lines")

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")

        def repeat() -> Tensor:
            self.repeated += 1
            return work()

        return repeat


class Training:
    def __init__(self, recorder: Replays | None = None) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.optimiser = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)
        self.recorder = recorder
        self.calls = 0

    def loss(self, batch: Batch) -> Tensor:
        self.calls += 1
        return F.cross_entropy(self.network(batch.x), batch.y)

    def run(self, sizes: list[int]) -> list[float]:
        given = (self.network, list(self.network.parameters()), self.optimiser, self.loss, None)
        recorder = self.recorder
        step = EagerStep(*given) if recorder is None else GraphStep(*given, recorder=recorder, device=CPU)
        losses = []
        for number, size in enumerate(sizes):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(size, 6, generator=generator)
            y = torch.randint(3, (size,), generator=generator)
            losses.append(float(step(Batch(x, y, None, size), 0.1 / (1 + number))))
        return losses


def assert_same(found: Training, expected: Training, sizes: list[int]) -> None:
    assert found.run(sizes) == pytest.approx(expected.run(sizes), rel=1e-5)
    pairs = zip(found.network.state_dict().items(), expected.network.state_dict().values(), strict=True)
    for (name, mine), theirs in pairs:
        assert torch.allclose(mine, theirs, atol=1e-5), name  # also the statistics and counts of BatchNorm


def test_recorded_steps_train_as_ordinary_ones_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    recorder = Replays()
    assert_same(Training(recorder), Training(), [5] * STEPS)
    assert recorder.repeated == STEPS - cuda_graphs.WARM_UP
    assert caplog.text.count("CUDA graph") == 1


def test_a_batch_of_another_shape_is_an_ordinary_step_among_recorded_ones() -> None:
    recorder = Replays()
    sizes = [5] * 8 + [3] + [5] * 3
    assert_same(Training(recorder), Training(), sizes)
    assert recorder.repeated == len(sizes) - cuda_graphs.WARM_UP - 1


@pytest.mark.parametrize(
    ("recorder", "sizes", "reason"),
    [
        (Replays(waits=True), [5] * STEPS, "called a synchronizing CUDA operation"),
        (Replays(fails=True), [5] * STEPS, "operation not permitted"),
        (Replays(), [5, 4] * 6, "differ in shape"),
    ],
    ids=["waits for the device", "cannot be recorded", "several shapes"],
)
def test_a_step_that_cannot_be_recorded_is_an_ordinary_one(
    recorder: Replays, sizes: list[int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert_same(Training(recorder), Training(), sizes)
    assert recorder.repeated == 0
    assert caplog.text.count("No CUDA graph") == 1
    assert reason in caplog.text
    assert "more lines" not in caplog.text


def test_a_loss_that_draws_random_numbers_on_the_host_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pair = Training(Replays()), Training()
    for each in pair:
        each.loss = lambda batch, each=each: Training.loss(each, batch) * (1 + torch.rand(()))  # type: ignore[method-assign,misc]
    torch.manual_seed(3)
    found = pair[0].run([5] * STEPS)
    torch.manual_seed(3)
    assert found == pytest.approx(pair[1].run([5] * STEPS), rel=1e-5)
    assert "random numbers on the host" in caplog.text


def test_a_loss_that_python_changes_is_found_out_and_the_wrong_step_undone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    class Frozen(Replays):
        """As a graph does, it repeats the factor of the time of recording."""

        def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
            repeat = super().record(work)

            def with_old_factor() -> Tensor:
                factors["frozen"] = 1.0
                try:
                    return repeat()
                finally:
                    del factors["frozen"]

            return with_old_factor

    factors: dict[str, float] = {}
    pair = Training(Frozen()), Training()
    for each in pair:
        # The fourth step, which is the first that is repeated, has another factor.
        def loss(batch: Batch, each: Training = each) -> Tensor:
            late = each.network[1].num_batches_tracked.item() >= cuda_graphs.WARM_UP  # type: ignore[union-attr,operator]
            return Training.loss(each, batch) * factors.get("frozen", 2.0 if late else 1.0)

        each.loss = loss  # type: ignore[method-assign]
    assert_same(*pair, [5] * STEPS)
    assert "a recorded step has the loss" in caplog.text


def test_adam_can_be_recorded() -> None:
    network = nn.Linear(2, 2)
    optimiser = torch.optim.AdamW(network.parameters(), fused=True)
    step: GraphStep[Batch] = GraphStep(
        network, list(network.parameters()), optimiser, lambda _: _.x, 1.0, recorder=Replays(), device=CPU
    )
    assert all(group["capturable"] and group["lr"] is step.rate for group in optimiser.param_groups)


@pytest.mark.parametrize(
    ("device", "steps", "kind", "reason"),
    [
        ("cpu", 10_000, EagerStep, ""),
        ("cuda", 20, EagerStep, "20 steps are too few"),
        ("cuda", 10_000, GraphStep, ""),
    ],
)
def test_the_kind_of_step_follows_from_device_and_length(
    device: str,
    steps: int,
    kind: type,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", lambda _: Replays())
    monkeypatch.setattr(cuda_graphs.torch, "zeros", lambda *_, **__: Tensor())  # this machine may have no such device
    training = Training()
    eager = EagerStep(training.network, list(training.network.parameters()), training.optimiser, training.loss)
    step = fastest(eager, torch.device(device), steps)
    assert type(step) is kind
    assert reason in caplog.text


def halves(batch: Batch, parts: int) -> list[tuple[float, Batch]]:
    pieces = zip(batch.x.tensor_split(parts), batch.y.tensor_split(parts), strict=True)
    return [(len(y) / len(batch.y), Batch(x, y, None, len(y))) for x, y in pieces]


@pytest.mark.parametrize("most", [8, 3])
def test_a_batch_too_large_for_the_device_is_trained_in_parts(most: int, caplog: pytest.LogCaptureFixture) -> None:
    def trained(limit: int) -> list[Tensor]:
        torch.manual_seed(0)
        network = nn.Linear(6, 3)

        def loss(batch: Batch) -> Tensor:
            if len(batch.x) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return F.cross_entropy(network(batch.x), batch.y)

        optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
        step = EagerStep(network, list(network.parameters()), optimiser, loss, None, halves)
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
            step(Batch(x, y, None, 16), 0.1)
        return [parameter.detach() for parameter in network.parameters()]

    whole = trained(16)
    assert not caplog.text
    for found, expected in zip(trained(most), whole, strict=True):
        torch.testing.assert_close(found, expected)
    assert f"{16 // most if most == 8 else 8} parts" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):  # not even single images fit
        trained(0)


@pytest.mark.parametrize("recorded", [False, True])
def test_running_out_of_memory_is_said_where_a_batch_has_too_few_images_to_divide(recorded: bool) -> None:
    network = nn.Linear(6, 3)

    def loss(batch: Batch) -> Tensor:
        raise torch.OutOfMemoryError(f"CUDA out of memory for {len(batch.x)} images")

    def split(batch: Batch, parts: int) -> list[tuple[float, Batch]]:
        rows = processes.divided([len(batch.y)], parts)
        return [(len(each.whole) / len(batch.y), Batch(batch.x[each.own], batch.y, None, 0)) for each in rows]

    given = (network, list(network.parameters()), torch.optim.SGD(network.parameters(), lr=0.1), loss, None, split)
    step = GraphStep(*given, recorder=Replays(), device=CPU) if recorded else EagerStep(*given)
    with pytest.raises(torch.OutOfMemoryError, match=f"for {2 if recorded else 6} images"):
        step(Batch(torch.zeros(6, 6), torch.zeros(6, dtype=torch.int64), None, 6), 0.1)


def test_too_little_memory_for_a_recording_does_not_divide_batches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    class Full(Replays):
        def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
            self.recording = True
            try:
                work()
            finally:
                self.recording = False
            raise AssertionError("the recording has memory")

    recorder = Full()
    recorder.recording = False
    network = nn.Linear(6, 3)

    def loss(batch: Batch) -> Tensor:
        if recorder.recording:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return F.cross_entropy(network(batch.x), batch.y)

    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    given = (network, list(network.parameters()), optimiser, loss, None, halves)
    step = GraphStep(*given, recorder=recorder, device=CPU)
    for _ in range(cuda_graphs.WARM_UP + 2):
        step(Batch(torch.randn(8, 6), torch.arange(8) % 3, None, 8), 0.1)
    assert (step.parts, step.refused, step.may_divide) == (1, True, True)
    assert "out of memory" in caplog.text
    assert "parts from now on" not in caplog.text
