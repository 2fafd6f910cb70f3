"""Several processes compute what one computes; all in double precision, where rounding cannot turn a ReLU."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import BASE, CPU, NEW, SIZES, exemplars, tiles, untrained
from in_processes import in_processes
from torch import Tensor, nn

from branchout import api
from branchout.data.augment import Augmentation, for_kind
from branchout.data.images import ResidentImages, StreamedImages, in_order, open_images, shuffled
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.method.features import extract
from branchout.model.checkpoint import SavedModel
from branchout.training import processes
from branchout.training.batch_norm import WholeBatchNorm
from branchout.training.loop import Event, fit, precision
from branchout.training.optimisation import Optimisation
from branchout.training.work_folder import work_folder

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def patterns() -> Samples:
    return tiles(["checks", "dots", "lines", "waves"], 16, seed=0)


def assert_same_weights(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


def pretrained(patterns: Samples, arch: str = "resnet10", **settings: object) -> State:
    optimisation = Optimisation(**{"epochs": 2, "lr": 0.03, "batch": 15, **settings})  # 64 images: drops the last 4
    shape = {"arch": arch, "width": 4 if arch == "resnet10" else 64, "size": 32}
    model = api.pretrain(patterns, **shape, kind="glyph", optimisation=optimisation, device="cpu")
    return {name: tensor.clone() for name, tensor in model.classifier.state_dict().items()}


@pytest.mark.parametrize("count", [2, 4])
def test_pretraining_in_several_processes_gives_the_same_model(count: int, patterns: Samples) -> None:
    (alone,) = in_processes(1, partial(pretrained, patterns))
    for found in in_processes(count, partial(pretrained, patterns)):
        assert_same_weights(found, alone)


def test_clipped_gradients_are_those_of_the_whole_batch(patterns: Samples) -> None:
    adam = partial(pretrained, patterns, optimiser="adamw", lr=1e-3)
    (alone,) = in_processes(1, adam)
    assert_same_weights(in_processes(2, adam)[1], alone)


def extension(train: Samples, val: Samples, **settings: object) -> tuple[State, list[float], tuple[float, ...]]:
    """A first step; with `second` the next one, whose branch corrects earlier logits."""
    base = api.Model(SavedModel(untrained(BASE), (), ({},)), None, CPU)
    first, then = (NEW[:-1], NEW[-1:]) if settings.pop("second", False) else (NEW, ())
    seen = val.of_classes([*BASE, *first])
    grown = base.extend(train.of_classes(first), memory=exemplars(train), val=seen, **{"epochs": 2, **settings})
    if then:
        memory = exemplars(train, [*BASE, *first])
        grown = grown.extend(train.of_classes(then), memory=memory, val=val, **{"epochs": 2, **settings})
        assert grown.classifier.steps[-1].correction is not None
    assert grown.outcome is not None
    state = {name: tensor.clone() for name, tensor in grown.classifier.state_dict().items()}
    return state, grown.outcome.losses, grown.saved.step_points[-1].point


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (2, {}),
        (4, {"fuse": True}),
        (2, {"views": 0}),
        (2, {"recipe": "paper"}),
        (2, {"branch": "fc", "epochs": None}),
        (2, {"second": True}),
    ],
    ids=["cached", "four, with stage II", "live trunk", "paper's grid", "head alone", "second step"],
)
def test_extending_in_several_processes_gives_the_same_model(
    count: int, settings: dict[str, object], train: Samples, val: Samples
) -> None:
    extend = partial(extension, train, val.of_classes([*BASE, *NEW]), **settings)
    ((state, losses, point),) = in_processes(1, extend)
    for found, their_losses, their_point in in_processes(count, extend):
        assert_same_weights(found, state)
        assert their_losses == pytest.approx(losses)
        assert their_point == pytest.approx(point)


# What `accelerate launch` asks for.

ACCUMULATION, PRECISION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_MIXED_PRECISION"


def test_accumulated_gradients_are_those_of_the_whole_batch(patterns: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformer has no BatchNorm, which uses the images of one part."""
    some = patterns.select(np.arange(0, 64, 2))
    transformer = partial(pretrained, some, "vit_tiny", optimiser="adamw", lr=1e-3, epochs=1)
    (whole,) = in_processes(1, transformer)
    for count, parts in ((1, 3), (2, 2)):
        monkeypatch.setenv(ACCUMULATION, str(parts))
        for found in in_processes(count, transformer):
            assert_same_weights(found, whole)


def test_a_branch_is_trained_by_accumulated_gradients(
    train: Samples, val: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = partial(extension, train, val.of_classes([*BASE, *NEW]), recipe="paper", branch="fc")
    ((state, losses, _),) = in_processes(1, extend)
    monkeypatch.setenv(ACCUMULATION, "2")
    for found, their_losses, _ in in_processes(2, extend):
        assert_same_weights(found, state)
        assert their_losses == pytest.approx(losses)


@pytest.mark.parametrize("sizes", [[12], [7, 5], [13, 9]])
def test_parts_of_a_batch_are_divided_among_the_processes_as_a_batch_is(sizes: list[int]) -> None:
    rows = torch.arange(float(sum(sizes)))[:, None]

    def gathered() -> list[tuple[list[float], list[int]]]:
        ends = np.cumsum(sizes)
        bounds = zip(ends - sizes, ends, strict=True)
        own = torch.cat([rows[start:end][processes.rank() :: processes.count()] for start, end in bounds])
        return [
            (processes.gather(own[part.own], part.sizes).flatten().tolist(), part.whole.tolist())
            for part in processes.divided(sizes, 2)
        ]

    for parts in in_processes(2, gathered):
        assert all(found == expected for found, expected in parts)
        assert sorted(parts[0][1] + parts[1][1]) == list(range(sum(sizes)))


def test_a_batch_too_small_for_its_parts_is_refused(patterns: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACCUMULATION, "9")
    for error in in_processes(2, partial(pretrained, patterns)):
        assert "15 images" in str(error)
        assert "9 parts" in str(error)
        assert ACCUMULATION in str(error)


def test_the_precision_is_that_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed() -> torch.dtype:
        with precision(CPU):
            return (torch.ones(2, 2, dtype=torch.float32) @ torch.ones(2, 2, dtype=torch.float32)).dtype

    for asked, found in (("no", torch.float32), ("bf16", torch.bfloat16)):
        monkeypatch.setenv(PRECISION, asked)
        assert in_processes(2, computed) == [found] * 2


@pytest.mark.parametrize(
    ("name", "value", "alike", "told"),
    [
        (PRECISION, "fp16", False, r"fp16.*--mixed_precision bf16"),
        (ACCUMULATION, "none", False, ACCUMULATION),
        (ACCUMULATION, "0", False, ACCUMULATION),
        (ACCUMULATION, "2", True, f"bench.*{ACCUMULATION}"),
        (PRECISION, "bf16", True, r"bench.*--mixed_precision no"),
    ],
)
def test_what_accelerate_asks_in_vain_is_refused(
    name: str, value: str, alike: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BranchoutError, match=told):
        processes.begin(alike=alike)
    assert processes.count() == processes.accumulation() == 1


def test_the_environment_of_another_launcher_connects_nothing(
    base: api.Model, train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that uses the library may itself be one of several processes."""
    some = train.select(np.arange(3))
    expected = base.features(some)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", PRECISION: "bf16"}.items():
        monkeypatch.setenv(name, value)
    assert processes.part() == (0, 1)
    assert processes.precision() is None
    np.testing.assert_array_equal(api.load(base.folder, device="cpu").features(some), expected)


# What each process sees.


@pytest.mark.parametrize("kind", ["resident", "streamed", "padded"])
def test_processes_share_the_views_of_a_batch(kind: str, train: Samples) -> None:
    """Every image once, in the view that one process would see."""
    some = train.select(np.arange(17))
    opened = StreamedImages(some, SIZES, CPU, workers=0) if kind == "streamed" else open_images(some, SIZES, CPU)
    assert isinstance(opened, StreamedImages if kind == "streamed" else ResidentImages)
    how = Augmentation((1.0, 1.0), flip=True, pad=2) if kind == "padded" else for_kind("glyph", 32)
    batches = shuffled(len(some), 7, seed=1)
    whole = list(opened.views(batches, how, 5))
    for count in (2, 4):
        parts = [list(opened.views(batches, how, 5, (rank, count))) for rank in range(count)]
        for n, batch in enumerate(whole):
            joined = torch.empty_like(batch)
            for rank in range(count):
                joined[rank::count] = parts[rank][n]
            torch.testing.assert_close(joined, batch)


class Counted:
    """Images that count which of them are asked for."""

    def __init__(self, images: object) -> None:
        self.images, self.asked = images, []

    def __len__(self) -> int:
        return len(self.images)

    def plain(self, batches: list[np.ndarray]) -> Iterator[Tensor]:
        self.asked += np.concatenate(batches).tolist()
        return self.images.plain(batches)


def test_each_process_computes_the_features_of_its_own_images(train: Samples) -> None:
    some = train.select(np.arange(13))

    def shard() -> tuple[Tensor, list[int]]:
        images = Counted(open_images(some, SIZES, CPU))
        return extract(untrained(BASE, NEW), images, device=CPU), images.asked

    ((features, asked),) = in_processes(1, shard)
    found = in_processes(3, shard)
    assert sorted(number for _, numbers in found for number in numbers) == asked == list(range(13))
    for theirs, _ in found:
        torch.testing.assert_close(theirs, features)


def test_batch_norm_of_a_shared_batch_is_that_of_the_whole() -> None:
    """Also if processes have different numbers of images, and one has none."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, 5, 3, 4, 4, generator=generator, dtype=torch.float64)

    def trained() -> tuple[State, Tensor]:
        layer = nn.BatchNorm2d(3)
        own = x[processes.rank() :: processes.count()].clone().requires_grad_()
        with WholeBatchNorm():
            out = processes.gather(layer(own), [len(x)])
        F.mse_loss(out, target).backward()
        assert own.grad is not None
        gradient = processes.gather(own.grad, [len(x)]) / processes.count()  # what averaging makes of it
        return {name: tensor.clone() for name, tensor in layer.state_dict().items()}, gradient

    layer, all_x = nn.BatchNorm2d(3).double(), x.clone().requires_grad_()
    F.mse_loss(layer(all_x), target).backward()
    for count in (1, 2, 6):
        for state, gradient in in_processes(count, trained):
            assert_same_weights(state, layer.state_dict())
            torch.testing.assert_close(gradient, all_x.grad)


def test_every_image_is_seen_once_an_epoch(train: Samples) -> None:
    some = train.select(np.arange(24))

    def seen() -> list[int]:
        weight = nn.Linear(1, 1)
        found: list[int] = []

        def batches(epoch: int) -> Iterator[np.ndarray]:
            for batch in shuffled(len(some), 5, epoch):
                own = batch[processes.rank() :: processes.count()]
                found.extend(own.tolist())
                yield own

        fit(weight, list(weight.parameters()), batches, 5, lambda own: weight(torch.ones(len(own), 1)).sum(),
            Optimisation(epochs=2, lr=0.0), device=CPU)  # fmt: skip
        return found

    both = in_processes(2, seen)
    first = [numbers[: len(numbers) // 2] for numbers in both]
    assert sorted(first[0] + first[1]) == list(range(24))
    assert sorted(both[0] + both[1]) == sorted([*range(24), *range(24)])


def saved(patterns: Samples, out: Path, stop: bool = False) -> State:
    """A run into `out`; with `stop` the first process ends after two epochs."""

    def on_progress(event: Event) -> None:
        if stop and event.done == 2:
            raise KeyboardInterrupt

    model = api.pretrain(patterns, out=out, width=4, size=32, kind="glyph", device="cpu", on_progress=on_progress,
                         optimisation=Optimisation(epochs=4, lr=0.03, batch=16))  # fmt: skip
    return {name: tensor.clone() for name, tensor in model.classifier.state_dict().items()}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1)])
def test_checkpoints_serve_any_number_of_processes(before: int, after: int, patterns: Samples, tmp_path: Path) -> None:
    (whole,) = in_processes(1, partial(saved, patterns, tmp_path / "whole"))
    ended, *others = in_processes(before, partial(saved, patterns, tmp_path / "base", stop=True))
    assert ended is None
    assert len(others) == before - 1
    for noticed in others:
        assert "Another process" in str(noticed)
        assert "same command again" in str(noticed)
    assert (work_folder(tmp_path / "base") / "pretrain.safetensors").is_file()
    for found in in_processes(after, partial(saved, patterns, tmp_path / "base")):
        assert_same_weights(found, whole)
    assert not work_folder(tmp_path / "base").exists()
    assert (tmp_path / "base" / "branchout.json").is_file()


def refusal(function: Callable[[], object]) -> str:
    try:
        function()
    except BranchoutError as error:
        return str(error)
    return ""


def test_a_process_that_sees_other_files_says_so() -> None:
    found = in_processes(2, lambda: refusal(lambda: processes.check_same(processes.rank(), "checkpoint")))
    assert not found[0]
    assert "process 1 of 2" in found[1].lower()
    assert "checkpoint" in found[1]
    assert "same paths" in found[1]


def test_features_that_only_one_process_finds_in_its_cache_are_computed_together(
    train: Samples, tmp_path: Path
) -> None:
    some = train.select(np.arange(6))

    def features() -> tuple[Tensor, int]:
        images = Counted(open_images(some, SIZES, CPU))
        own = tmp_path / str(processes.rank())  # as on two machines
        with processes.independent(processes.count() == 1):
            found = extract(untrained(BASE), images, device=CPU, cache=own, fingerprint="six")
        return found, len(images.asked)

    ((expected, _),) = in_processes(1, features)
    for found, computed in in_processes(2, features):
        torch.testing.assert_close(found, expected)
        assert computed == 3


def test_one_process_exchanges_nothing() -> None:
    rows = torch.randn(3, 2)
    assert processes.gather(rows, [3]) is rows
    assert processes.sum_up(rows) is rows
    assert processes.part() == (0, 1)
    assert in_order(3, 2)[0].tolist() == [0, 1]


def test_more_processes_than_images_of_a_batch_are_refused(patterns: Samples) -> None:
    for error in in_processes(3, partial(pretrained, patterns.select(np.arange(2)))):
        assert "2 images" in str(error)
        assert "3 processes" in str(error)


@pytest.mark.parametrize(("local_rank", "gpus", "expected"), [(0, 1, 0), (2, 1, 0), (1, 2, 1), (2, 2, 0)])
def test_processes_share_gpus_where_there_are_too_few(
    local_rank: int, gpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(processes, "_launch", processes.Launch(count=3, rank=local_rank, local_rank=local_rank))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    processes.choose_gpu()
    assert chosen == [expected]
