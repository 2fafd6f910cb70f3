"""The training loop: schedules and steps against the written-out formulas; a stopped run ends as if never stopped."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import CPU, same, snapshot
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from branchout.errors import BranchoutError
from branchout.training.checkpoints import epochs_done
from branchout.training.loop import Event, fit, learning_rate, seed_for
from branchout.training.optimisation import Optimisation

EPOCHS, STEPS = 6, 4
SETTINGS = [
    Optimisation(EPOCHS, lr=0.05, batch=8, schedule="thirds"),
    Optimisation(EPOCHS, lr=0.05, batch=8, schedule="cosine", nesterov=True, weight_decay=0.01),
    Optimisation(EPOCHS, lr=0.05, batch=8, schedule="constant"),
]
ADAMW = Optimisation(EPOCHS, lr=0.01, batch=8, schedule="cosine", weight_decay=0.05, optimiser="adamw")
by_schedule = pytest.mark.parametrize("optimisation", SETTINGS, ids=lambda o: o.schedule)
by_optimiser = pytest.mark.parametrize("optimisation", [*SETTINGS, ADAMW], ids=lambda o: f"{o.optimiser} {o.schedule}")


class StoppedError(Exception):
    """What a kill is in these tests."""


class Run:
    """A small network with statistics, whose batches depend on the epoch alone."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))
        self.epochs: list[int] = []
        self.stop_after: int | None = None
        self.stop_within: tuple[int, int] | None = None

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        self.epochs.append(epoch)
        generator = torch.Generator().manual_seed(seed_for(7, epoch))
        for step in range(STEPS):
            if self.stop_within == (epoch, step):
                raise StoppedError
            yield torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def on_progress(self, event: Event) -> None:
        if event.done == self.stop_after:
            raise StoppedError

    def fit(self, optimisation: Optimisation, checkpoint: Path | None = None, save_every: int = 1) -> list[float]:
        return fit(
            self.network,
            list(self.network.parameters()),
            self.batches,
            STEPS,
            self.loss,
            optimisation,
            device=CPU,
            checkpoint=checkpoint,
            save_every=save_every,
            on_progress=self.on_progress,
        )


def fresh(optimisation: Optimisation) -> tuple[list[float], dict[str, Tensor]]:
    run = Run()
    return run.fit(optimisation), snapshot(run.network)


def test_learning_rates_are_the_written_out_schedules() -> None:
    epochs, steps, lr = 30, 7, 0.4
    for epoch in range(epochs):
        for step in range(steps):
            progress = (epoch + step / steps) / epochs
            third = 1.0 if epoch < 10 else 0.1 if epoch < 20 else 0.01
            done = epoch * steps + step
            warm = 0.05 * epochs * steps  # 10.5 steps
            turn = math.pi * (done - warm) / (epochs * steps - warm)
            cosine = done / warm if done < warm else 0.5 + 0.5 * math.cos(turn)
            for schedule, share in (("constant", 1.0), ("thirds", third), ("cosine", cosine)):
                found = learning_rate(Optimisation(epochs, lr=lr, schedule=schedule), progress)
                assert found == pytest.approx(lr * share, abs=1e-12), (schedule, epoch, step)


@pytest.mark.parametrize(
    ("schedule", "epochs", "expected"),
    [
        ("icarl", 70, {0: 2.0, 48: 2.0, 49: 0.4, 62: 0.4, 63: 0.08, 69: 0.08}),
        ("der", 170, {0: 0.0, 5: 1.0, 10: 2.0, 109: 2.0, 110: 0.2, 129: 0.2, 130: 0.02, 169: 0.02}),
        ("half", 30, {0: 2.0, 14: 2.0, 15: 0.2, 29: 0.2}),
        ("plain-cosine", 100, {0: 2.0, 50: 1.0, 100: 0.0}),
    ],
)
def test_published_schedules_change_at_their_epochs(schedule: str, epochs: int, expected: dict[int, float]) -> None:
    optimisation = Optimisation(epochs, lr=2.0, schedule=schedule)
    for epoch, rate in expected.items():
        assert learning_rate(optimisation, epoch / epochs) == pytest.approx(rate), epoch


@pytest.mark.parametrize("epochs", [1, 2, 3, 7, 30, 90])
def test_thirds_never_fall_below_a_hundredth_and_change_at_whole_epochs_when_they_can(epochs: int) -> None:
    rates = [
        learning_rate(Optimisation(epochs, lr=1.0), (e + s / 13) / epochs) for e in range(epochs) for s in range(13)
    ]
    assert sorted(rates, reverse=True) == rates
    assert {round(rate, 6) for rate in rates} == {1.0, 0.1, 0.01}
    if epochs % 3 == 0:
        assert [rates.count(rate) for rate in sorted(set(rates))] == [13 * epochs // 3] * 3


@by_schedule
def test_steps_are_those_of_momentum_descent(optimisation: Optimisation) -> None:
    losses, trained = fresh(optimisation)
    run = Run()
    slow = run.network
    momentum = {name: torch.zeros_like(p) for name, p in slow.named_parameters()}
    for epoch in range(EPOCHS):
        seen = []
        for step, batch in enumerate(run.batches(epoch)):
            loss = run.loss(batch)
            seen.append(loss.item())
            gradients = torch.autograd.grad(loss, list(slow.parameters()))
            rate = learning_rate(optimisation, (epoch * STEPS + step) / (EPOCHS * STEPS))
            with torch.no_grad():
                for (name, p), gradient in zip(slow.named_parameters(), gradients, strict=True):
                    g = gradient + optimisation.weight_decay * p
                    momentum[name] = 0.9 * momentum[name] + g
                    p -= rate * (g + 0.9 * momentum[name] if optimisation.nesterov else momentum[name])
        assert losses[epoch] == pytest.approx(sum(seen) / STEPS, abs=1e-5)
    for name, tensor in slow.state_dict().items():
        assert torch.allclose(tensor.float(), trained[name].float(), atol=1e-5), name


@pytest.mark.parametrize("scale", [1.0, 100.0], ids=["small gradients", "gradients to clip"])
def test_steps_are_those_of_adam_with_decay_of_matrices_and_clipped_gradients(scale: float) -> None:
    run, other = Run(), Run()
    fast, slow = run.network, other.network
    run.loss, other.loss = ((lambda batch, of=of: scale * Run.loss(of, batch)) for of in (run, other))  # type: ignore[misc]
    run.fit(ADAMW)
    first, second = ({name: torch.zeros_like(p) for name, p in slow.named_parameters()} for _ in range(2))
    norms = []
    for count, (epoch, step) in enumerate(((e, s) for e in range(EPOCHS) for s in range(STEPS)), 1):
        batch = list(other.batches(epoch))[step]
        gradients = torch.autograd.grad(other.loss(batch), list(slow.parameters()))
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients)))
        rate = learning_rate(ADAMW, (epoch * STEPS + step) / (EPOCHS * STEPS))
        with torch.no_grad():
            for (name, p), gradient in zip(slow.named_parameters(), gradients, strict=True):
                g = gradient / max(norms[-1], 1)
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g.square()
                p *= 1 - rate * (0.05 if p.ndim == 2 else 0)
                p -= rate * first[name] / (1 - 0.9**count) / ((second[name] / (1 - 0.999**count)).sqrt() + 1e-8)
    assert (min(norms) > 1) == (scale > 1)
    for name, tensor in slow.named_parameters():
        if name != "0.bias":  # normalisation follows it, so its gradient is nothing but rounding
            assert torch.allclose(tensor, fast.state_dict()[name], atol=1e-4), name


def test_an_optimiser_nobody_knows_is_answered_with_the_known() -> None:
    with pytest.raises(BranchoutError, match="no optimiser is called 'lion'; known are: sgd, adamw"):
        Run().fit(replace(ADAMW, optimiser="lion"))


@by_optimiser
@pytest.mark.parametrize("epoch", range(1, EPOCHS + 1))
def test_a_run_stopped_after_any_epoch_ends_as_if_never_stopped(
    optimisation: Optimisation, epoch: int, tmp_path: Path
) -> None:
    losses, trained = fresh(optimisation)
    stopped = Run()
    stopped.stop_after = epoch
    with pytest.raises(StoppedError):
        stopped.fit(optimisation, tmp_path / "c.safetensors")
    resumed = Run()
    assert resumed.fit(optimisation, tmp_path / "c.safetensors") == losses
    assert resumed.epochs == list(range(epoch, EPOCHS))  # nothing was done twice
    assert same(snapshot(resumed.network), trained)


def test_a_run_stopped_within_epochs_again_and_again_ends_as_if_never_stopped(tmp_path: Path) -> None:
    losses, trained = fresh(SETTINGS[1])
    for place in ((0, 3), (1, 0), (1, 1), (4, 2), (5, 3)):
        stopped = Run()
        stopped.stop_within = place
        with pytest.raises(StoppedError):
            stopped.fit(SETTINGS[1], tmp_path / "c.safetensors")
    resumed = Run()
    assert resumed.fit(SETTINGS[1], tmp_path / "c.safetensors") == losses
    assert same(snapshot(resumed.network), trained)


LONG = replace(SETTINGS[0], epochs=12)


def judged(losses: list[float], run: Run, checkpoint: Path | None = None) -> int:
    """Train with these losses on held-out images; returns after how many epochs it ended."""
    left = iter(losses)
    done: list[Event] = []

    def on_progress(event: Event) -> None:
        done.append(event)
        run.on_progress(event)

    taken = fit(
        run.network,
        list(run.network.parameters()),
        run.batches,
        STEPS,
        run.loss,
        LONG,
        device=CPU,
        checkpoint=checkpoint,
        held_out_loss=lambda: next(left),
        on_progress=on_progress,
    )
    assert not done or done[-1].done == done[-1].total == len(taken)  # a bar is full at the end
    return len(taken)


def test_training_ends_in_its_last_third_once_the_loss_on_held_out_images_stops_improving() -> None:
    assert judged([1.0, 1.0, 1.0], Run()) == 11
    assert judged([1.0, 0.9, 0.9, 0.9], Run()) == 12
    assert judged([1.0, 0.9995, 0.9992], Run()) == 11  # less than a thousandth is no improvement
    assert judged([1.0, 1.1, 0.9, 0.95], Run()) == 12


def test_training_that_ends_early_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "branchout")
    assert judged([1.0, 1.0, 1.0], Run()) == 11
    (said,) = (line for line in caplog.messages if "ended" in line)
    assert f"11 of {LONG.epochs} epochs" in said
    assert "held-out images no longer falls" in said
    caplog.clear()
    assert judged([1.0, 0.9, 0.8, 0.7, 0.6], Run()) == LONG.epochs
    assert not [line for line in caplog.messages if "ended" in line]


def test_a_run_that_ends_early_ends_there_when_it_is_resumed(tmp_path: Path) -> None:
    whole = Run()
    assert judged([1.0, 1.0, 1.0], whole) == 11
    for stopped_after in (10, 11):
        path = tmp_path / f"{stopped_after}.safetensors"
        killed = Run()
        killed.stop_after = stopped_after
        with pytest.raises(StoppedError):
            judged([1.0, 1.0, 1.0], killed, path)
        resumed = Run()
        assert judged([1.0], resumed, path) == 11
        assert resumed.epochs == list(range(stopped_after, 11))
        assert same(snapshot(resumed.network), snapshot(whole.network))


def test_a_run_saved_now_and_then_resumes_where_it_was_saved(tmp_path: Path) -> None:
    stopped, run = Run(), Run()
    stopped.stop_after = 5
    with pytest.raises(StoppedError):
        stopped.fit(SETTINGS[0], tmp_path / "c.safetensors", save_every=2)
    losses, trained = fresh(SETTINGS[0])
    assert run.fit(SETTINGS[0], tmp_path / "c.safetensors", save_every=2) == losses
    assert run.epochs == list(range(4, EPOCHS))
    assert same(snapshot(run.network), trained)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.04},
        {"epochs": EPOCHS + 1},
        {"batch": 9},
        {"nesterov": True},
        {"schedule": "constant"},
        {"optimiser": "adamw"},
    ],
)
def test_a_checkpoint_of_other_settings_is_not_used(change: dict[str, object], tmp_path: Path) -> None:
    Run().fit(SETTINGS[0], tmp_path / "c.safetensors")
    other = replace(SETTINGS[0], **change)
    losses, trained = fresh(other)
    run = Run()
    assert run.fit(other, tmp_path / "c.safetensors") == losses
    assert run.epochs == list(range(other.epochs))
    assert same(snapshot(run.network), trained)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_checkpoint_cut_short_means_starting_anew(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    stopped = Run()
    stopped.stop_after = 3
    with pytest.raises(StoppedError):
        stopped.fit(SETTINGS[0], path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if kept == 0.5 else int(kept)])
    losses, trained = fresh(SETTINGS[0])
    run = Run()
    assert run.fit(SETTINGS[0], path) == losses
    assert run.epochs == list(range(EPOCHS))
    assert same(snapshot(run.network), trained)


def test_a_kill_while_the_checkpoint_is_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from branchout.training import checkpoints

    path = tmp_path / "c.safetensors"
    whole, written = checkpoints.save_file, []

    def halfway(tensors: object, file: Path, about: object) -> None:
        whole(tensors, file, about)
        written.append(file)
        if len(written) == 3:
            file.write_bytes(file.read_bytes()[:50])
            raise StoppedError

    monkeypatch.setattr(checkpoints, "save_file", halfway)
    with pytest.raises(StoppedError):
        Run().fit(SETTINGS[0], path)
    monkeypatch.undo()
    run = Run()
    assert run.fit(SETTINGS[0], path) == fresh(SETTINGS[0])[0]
    assert run.epochs == list(range(2, EPOCHS))


def test_a_finished_run_is_only_read_back(tmp_path: Path) -> None:
    losses = Run().fit(SETTINGS[0], tmp_path / "c.safetensors")
    again = Run()
    assert again.fit(SETTINGS[0], tmp_path / "c.safetensors") == losses
    assert again.epochs == []
    assert same(snapshot(again.network), fresh(SETTINGS[0])[1])


def test_the_epochs_of_a_checkpoint_are_known_from_its_header(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    assert epochs_done(None, EPOCHS) == epochs_done(path, EPOCHS) == 0
    stopped = Run()
    stopped.stop_after = 3
    with pytest.raises(StoppedError):
        stopped.fit(SETTINGS[0], path)
    assert epochs_done(path, EPOCHS) == 3
    assert epochs_done(path, 2) == 0  # of another run
    path.write_bytes(b"damaged")
    assert epochs_done(path, EPOCHS) == 0


def test_a_checkpoint_from_before_there_was_a_choice_of_optimisers_is_used(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    stopped = Run()
    stopped.stop_after = 3
    with pytest.raises(StoppedError):
        stopped.fit(SETTINGS[0], path)
    with safe_open(path, "pt") as file:
        written = json.loads(file.metadata()["settings"])
        assert {name for name in file.keys() if "/0" in name and "state" not in name} == {"momentum/0"}  # noqa: SIM118
    assert set(written) == {"epochs", "lr", "batch", "weight_decay", "nesterov", "schedule"}  # as they always were
    resumed = Run()
    assert resumed.fit(SETTINGS[0], path) == fresh(SETTINGS[0])[0]
    assert resumed.epochs == [3, 4, 5]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_training_and_keeps_the_last_good_state(bad: float, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    run = Run()
    good, steps = run.loss, iter(range(1000))
    run.loss = lambda batch: good(batch) * (bad if next(steps) == 2 * STEPS + 1 else 1.0)  # type: ignore[method-assign]
    with pytest.raises(BranchoutError, match=r"stopped in epoch 3.*not a finite number.*epoch 2.*lower learning rate"):
        run.fit(SETTINGS[0], path)
    again = Run()
    assert again.fit(SETTINGS[0], path) == fresh(SETTINGS[0])[0]
    assert again.epochs == [2, 3, 4, 5]


def test_the_state_that_is_said_to_be_kept_is_the_one_that_was_saved(tmp_path: Path) -> None:
    run = Run()
    good, steps = run.loss, iter(range(1000))
    run.loss = lambda batch: good(batch) * (math.nan if next(steps) == 3 * STEPS else 1.0)  # type: ignore[method-assign]
    with pytest.raises(BranchoutError, match=r"stopped in epoch 4.*after epoch 2 is kept"):
        run.fit(SETTINGS[0], tmp_path / "c.safetensors", save_every=2)


def test_weights_that_are_not_finite_stop_training_too() -> None:
    with pytest.raises(BranchoutError, match=r"stopped in epoch 1.*lower learning rate"):
        Run().fit(replace(SETTINGS[2], lr=1e38))


def changed(data: bytes, rng: np.random.Generator) -> bytes:
    """A file with some bytes changed, cut out, added, or all of it cut short."""
    kind, at = rng.integers(4), int(rng.integers(len(data) if rng.random() < 0.3 else 800))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes(rng.integers(256, size=int(rng.integers(1, 20))).astype(np.uint8)) + data[at + 1 :]
    if kind == 2:
        return data[:at] + data[at + int(rng.integers(1, 9)) :]
    return data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]


def test_changed_checkpoints_are_ignored_and_training_starts_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c.safetensors"
    stopped = Run()
    stopped.stop_after = 3
    with pytest.raises(StoppedError):
        stopped.fit(SETTINGS[0], path)
    whole, expected = path.read_bytes(), fresh(SETTINGS[0])
    rng = np.random.default_rng(0)
    ignored = 0
    for _ in range(100):
        path.write_bytes(changed(whole, rng))
        run = Run()
        assert run.fit(SETTINGS[0], path) == expected[0]
        assert same(snapshot(run.network), expected[1])
        ignored += run.epochs == list(range(EPOCHS))
    assert ignored > 60
    assert "Training starts over" in caplog.text


@pytest.mark.parametrize("change", ["shape", "dtype", "missing", "nan", "losses", "no metadata", "folder"])
def test_a_checkpoint_of_another_network_is_ignored(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c.safetensors"
    Run().fit(SETTINGS[0], path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        about = dict(file.metadata())
    del about["checksum"]
    key = "state/0.weight"
    if change == "shape":
        tensors[key] = tensors[key][:3].clone()
    if change == "dtype":
        tensors[key] = tensors[key].double()
    if change == "missing":
        del tensors["momentum/1"]
    if change == "nan":
        tensors[key][0, 0] = math.nan
    if change == "losses":
        about["losses"] = '{"a": 1}'
    path.unlink()
    run = Run()
    if change == "folder":
        path.mkdir()
        with pytest.raises(BranchoutError, match=r"c\.safetensors"):  # nothing can be written there either
            run.fit(SETTINGS[0], path)
    else:
        save_file(tensors, path, None if change == "no metadata" else about)
        assert run.fit(SETTINGS[0], path) == fresh(SETTINGS[0])[0]
        assert run.epochs == list(range(EPOCHS))
    assert "Training starts over" in caplog.text
