"""The cached outputs of the frozen part: what is cached, where, and that training sees the same."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import BASE, CPU, LATER, NEW, SIZES, exemplars, same
from stage1_case import labelled, settings_of, trained

from branchout.data import augment
from branchout.data.augment import Augmentation
from branchout.data.images import in_order, open_images
from branchout.data.samples import Samples
from branchout.disk_cache import scratch_array
from branchout.errors import BranchoutError
from branchout.method import trunk_cache
from branchout.method.frozen import Frozen
from branchout.method.recipes import BRANCHOUT, PAPER, Stage1
from branchout.method.stage1 import train_branch
from branchout.method.trunk_cache import TrunkOutputs
from branchout.model.classifier import Classifier
from branchout.training.loop import seed_for


@pytest.mark.parametrize("recipe", [PAPER.stage_one, BRANCHOUT.stage_one], ids=["paper", "branchout"])
def test_cached_and_live_agree_where_all_views_are_alike(
    recipe: Stage1, models: dict[str, Classifier], train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(augment, "RATIO", (1.0, 1.0))
    monkeypatch.setattr(augment, "for_kind", lambda kind, size, few: Augmentation((1.0, 1.0), False))
    live = trained(models["base"], train, recipe, views=0)
    for views in (1, 3):
        cached = trained(models["base"], train, recipe, views)
        for key, value in live.items():
            assert torch.allclose(cached[key].float(), value.float(), atol=2e-4, rtol=1e-3), key


def test_small_images_on_a_gpu_are_computed_in_larger_batches(models: dict[str, Classifier], train: Samples) -> None:
    images = open_images(train, SIZES, CPU)
    assert 256 < len(images) < 1024
    for device, size in (("cpu", 256), ("cuda", len(images))):
        frozen = Frozen(models["base"], 0, BRANCHOUT.stage_one, device=torch.device(device))
        assert len(TrunkOutputs(frozen, [images], 1, limit=0)._order(images, 0)[0]) == size


def test_mixed_views_meet_others_in_every_view_and_are_kept_in_their_places(
    models: dict[str, Classifier], train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = open_images(train, SIZES, CPU)
    frozen = Frozen(models["base"], 1, BRANCHOUT.stage_one, device=CPU)
    frozen.augmentation = Augmentation((1.0, 1.0), False, mixed=True)
    monkeypatch.setattr(augment, "RATIO", (1.0, 1.0))
    monkeypatch.setattr(augment, "mix", lambda images, *_: images)
    cached = TrunkOutputs(frozen, [images], 2)
    first, second = (cached._order(images, seed) for seed in (1, 2))
    assert sorted(np.concatenate(first)) == list(range(len(images)))
    assert set(first[0]) != set(second[0])
    (plain,) = (frozen(batch) for batch in images.plain(in_order(len(images), len(images))))
    for kept, expected in zip(cached.tables[0], plain, strict=True):
        for view in range(2):
            rows = kept[view * len(images) : (view + 1) * len(images)]
            torch.testing.assert_close(rows.float(), expected.float(), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("recipe", [PAPER.stage_one, BRANCHOUT.stage_one], ids=["paper", "branchout"])
def test_views_that_memory_cannot_hold_are_kept_on_disk(
    recipe: Stage1,
    models: dict[str, Classifier],
    train: Samples,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path))
    model = models["base"]
    in_memory = trained(model, train, recipe, views=2)
    assert "on disk" not in caplog.text
    assert same(trained(model, train, recipe, views=2, limit=1000), in_memory)
    assert f"kept on disk, in {tmp_path}" in caplog.text
    assert not list(tmp_path.iterdir())  # the files have no names


def test_compressed_tables_are_kept_on_disk_where_there_is_room(
    models: dict[str, Classifier], train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, ...]] = []
    forgotten: list[int] = []

    def counted(shape: tuple[int, ...]) -> np.ndarray:
        taken.append(shape)
        return scratch_array(shape)

    def refused(shape: tuple[int, ...]) -> np.ndarray:
        raise BranchoutError("the disk quota is exceeded")

    monkeypatch.setattr(trunk_cache, "scratch_array", counted)
    monkeypatch.setattr(trunk_cache, "forget_pages", lambda *arrays: forgotten.append(len(arrays)))
    on_disk = trained(models["base"], train, BRANCHOUT.stage_one, views=2, compressed=True)
    assert len(taken) == 4  # feature maps and logits, of new images and of exemplars
    assert forgotten.count(4) >= 6  # after every batch of training
    monkeypatch.setattr(trunk_cache, "scratch_array", refused)
    assert same(trained(models["base"], train, BRANCHOUT.stage_one, views=2, compressed=True), on_disk)
    with pytest.raises(BranchoutError, match="quota"):
        trained(models["base"], train, BRANCHOUT.stage_one, views=2, limit=1000, compressed=True)
    for limit in ("scratch_room", "cache_limit"):
        with monkeypatch.context() as short:
            short.setattr(trunk_cache, limit, lambda: 1000)
            assert same(trained(models["base"], train, BRANCHOUT.stage_one, views=2, compressed=True), on_disk)
    assert len(taken) == 4


def test_tables_that_the_device_has_no_memory_for_are_kept_on_disk(
    models: dict[str, Classifier],
    train: Samples,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path))
    in_memory = trained(models["base"], train, BRANCHOUT.stage_one, views=2)
    real = TrunkOutputs._empty

    def full(self: TrunkOutputs, rows: int, like: torch.Tensor, *, on_disk: bool) -> torch.Tensor:
        if not on_disk and like.ndim == 2:  # the feature maps still fit
            raise torch.OutOfMemoryError
        return real(self, rows, like, on_disk=on_disk)

    monkeypatch.setattr(TrunkOutputs, "_empty", full)
    assert same(trained(models["base"], train, BRANCHOUT.stage_one, views=2), in_memory)
    assert "too little free memory" in caplog.text
    for limit in ("scratch_room", "cache_limit"):
        with monkeypatch.context() as short:
            short.setattr(trunk_cache, limit, lambda: 1000)
            with pytest.raises(torch.OutOfMemoryError):
                trained(models["base"], train, BRANCHOUT.stage_one, views=2)


def test_a_run_that_resumes_sees_the_same_views_whatever_disk_space_is_free(
    models: dict[str, Classifier], train: Samples, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def views(checkpoint: Path | None, room: int) -> list[int]:
        monkeypatch.setattr(trunk_cache, "scratch_room", lambda: room)
        frozen = Frozen(models["base"], 3, BRANCHOUT.stage_one, device=CPU)
        images = [open_images(train.of_classes(NEW), SIZES, CPU)]
        return TrunkOutputs(frozen, images, 6, limit=1000, checkpoint=checkpoint).cached_views

    checkpoint, kept = tmp_path / "branch.safetensors", tmp_path / "views.json"
    assert views(checkpoint, 1 << 30) == [6]
    assert views(checkpoint, 0) == []  # nothing was trained with them yet
    assert views(checkpoint, 1 << 30) == [6]
    checkpoint.touch()
    assert views(checkpoint, 0) == [6]
    assert views(None, 0) == []
    for damaged in ("{", "[6]", "{}", '{"views": ["six"]}'):
        kept.write_text(damaged)
        assert views(checkpoint, 1 << 30) == [6]
    kept.unlink()
    assert views(checkpoint, 0) == views(checkpoint, 1 << 30) == []  # a live run stays live
    kept.write_text('{"views": [6]}')
    monkeypatch.setenv("BRANCHOUT_CACHE_LIMIT", "0")
    assert views(checkpoint, 1 << 30) == []  # kept by a device with more memory


def test_compressed_maps_are_counted_as_they_are_kept(models: dict[str, Classifier], train: Samples) -> None:
    frozen = Frozen(models["base"], 4, BRANCHOUT.stage_one, device=CPU)
    images = [open_images(train.of_classes(NEW), SIZES, CPU)]
    logits = 4 * len(BASE)
    assert TrunkOutputs(frozen, images, 2).image_bytes == 4 * 32 * 8 * 8 + logits
    compressed = TrunkOutputs(frozen, images, 2, compressed=True)
    assert compressed.image_bytes == 32 * 9 * 8 + logits
    assert compressed.image_bytes == sum(table[0].nbytes for table in compressed.tables[0])


def test_as_many_views_as_fit_are_cached_and_else_the_trunk_runs_live(
    models: dict[str, Classifier], train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHOUT_CACHE_LIMIT", "0")  # nothing on disk
    model, recipe = models["base"], BRANCHOUT.stage_one
    live = trained(model, train, recipe, views=0)
    assert same(trained(model, train, recipe, views=2, limit=1000), live)
    floats = 32 * 8 * 8 + len(BASE)  # what enters layer4, and the frozen logits
    one_view = 4 * floats * 2 * len(train.of_classes(NEW))  # as much for exemplars as for new images
    assert same(trained(model, train, recipe, views=2, limit=2 * one_view - 1), live)
    assert not same(trained(model, train, recipe, views=2, limit=2 * one_view), live)
    four = trained(model, train, recipe, views=4, limit=1 << 30)
    assert same(trained(model, train, recipe, views=6, limit=5 * one_view - 1), four)


def test_the_cache_holds_what_the_frozen_network_makes_of_views(models: dict[str, Classifier], train: Samples) -> None:
    model = models["after a step"]
    frozen = Frozen(model, 3, BRANCHOUT.stage_one, device=CPU)
    sources = [open_images(train.of_classes(names), SIZES, CPU) for names in (NEW, LATER[:2])]
    trunk = TrunkOutputs(frozen, sources, 2, seed=5)
    trunk.cached_views = [2, 3]
    kept = trunk.tables
    for number, (images, views) in enumerate(zip(sources, [2, 3], strict=True)):
        assert [len(table) for table in kept[number]] == [views * len(images)] * 2
        for view in range(views):
            pictures = next(
                images.views(in_order(len(images), 256), frozen.augmentation, seed_for(5, view, 7 + number))
            )
            with torch.no_grad():
                trunk = model.backbone.run(pictures, 0, 3)
                columns = model.fused.frozen_columns(model.features(pictures))
            rows = view * len(images) + np.array([4, 0, 9])
            assert torch.allclose(kept[number][0][rows], trunk[[4, 0, 9]], atol=1e-5)
            assert torch.allclose(kept[number][1][rows], columns[[4, 0, 9]], atol=1e-4)


def test_epochs_go_round_the_cached_views_and_exemplars_are_seen_in_more_of_them(
    models: dict[str, Classifier], train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []
    rows: Callable[..., object] = trunk_cache._rows
    monkeypatch.setattr(
        trunk_cache,
        "_rows",
        lambda table, order, device: (seen.append(np.concatenate(order)), rows(table, order, device))[1],
    )
    model = models["base"]
    new, old = labelled(model, NEW, train.of_classes(NEW)), labelled(model, NEW, exemplars(train))
    settings = settings_of(BRANCHOUT.stage_one, epochs=5)
    train_branch(model, NEW, new, settings, exemplars=old, views=2, device=CPU)
    assert [set(order // len(new.labels)) for order in seen[::2]] == [{0}, {1}, {0}, {1}, {0}]
    views = round(2 * len(new.labels) / len(old.labels))
    assert set(np.concatenate(seen[1::2]) // len(old.labels)) == set(range(views))
    for order in seen[1::2]:  # each exemplar as often as any other, whatever its view
        counts = np.bincount(order % len(old.labels), minlength=len(old.labels))
        assert counts.max() - counts.min() <= 1
