"""The feature cache: right, read back, and never stale or half-written."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import BASE, CPU, NEW, SIZES, untrained
from torch import Tensor

from branchout.data.augment import Augmentation, for_kind
from branchout.data.images import ResidentImages, in_order, open_images
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.method import features
from branchout.method.features import extract, weights_digest
from branchout.model.classifier import Classifier
from branchout.model.resnet import build
from branchout.training.loop import seed_for


@pytest.fixture(scope="module")
def model() -> Classifier:
    return untrained(BASE, NEW, BASE[:2], where=["layer4", "fc"])


@pytest.fixture(scope="module")
def images(train: Samples) -> ResidentImages:
    opened = open_images(train.select(np.arange(0, len(train), 9)), SIZES, CPU)
    assert isinstance(opened, ResidentImages)
    return opened


class Unreadable:
    """Pictures that must not be asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def plain(self, batches: object) -> Sequence[Tensor]:
        raise AssertionError("the pictures were read again")

    def views(self, *_: object) -> Sequence[Tensor]:
        raise AssertionError("the pictures were read again")


def kept_files(cache: Path) -> list[Path]:
    return sorted((cache / "features").glob("*.npy"))


def by_hand(model: Classifier, pictures: Tensor) -> Tensor:
    """One picture at a time: the base's vector and the first step's; the second step has none of its own."""
    rows = []
    with torch.no_grad():
        for picture in pictures:
            trunk = picture[None]
            for name in ("stem", "layer1", "layer2", "layer3"):
                trunk = model.backbone.get_submodule(name)(trunk)
            own = model.steps[0].branch.get_submodule("layer4")(trunk)
            rows.append(torch.cat([model.backbone.get_submodule("layer4")(trunk), own]))
    return torch.stack(rows)


def test_features_of_plain_pictures(model: Classifier, images: ResidentImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "BATCH", 7)
    found = extract(model, images, device=CPU)
    pictures = torch.cat(list(images.plain(in_order(len(images), 100))))
    assert found.shape == (1, len(images), 2, 64)
    assert torch.allclose(found[0], by_hand(model, pictures), atol=1e-5)


def test_features_of_views(model: Classifier, images: ResidentImages) -> None:
    found = extract(model, images, views=3, seed=4, device=CPU)
    assert found.shape == (3, len(images), 2, 64)
    for view in range(3):
        order = in_order(len(images), 500)
        pictures = torch.cat(list(images.views(order, for_kind("glyph", 32), seed_for(4, view))))
        assert torch.allclose(found[view], by_hand(model, pictures), atol=1e-5)
    assert (found[0] - found[1]).abs().max() > 0.01


@pytest.mark.parametrize("views", [0, 2])
def test_the_second_call_reads_no_picture(
    model: Classifier, images: ResidentImages, views: int, tmp_path: Path
) -> None:
    settings = {"views": views, "device": CPU, "cache": tmp_path, "fingerprint": "x"}
    first = extract(model, images, **settings)
    assert torch.equal(extract(model, Unreadable(len(images)), **settings), first)
    assert len(kept_files(tmp_path)) == 1
    with pytest.raises(AssertionError, match="read again"):
        extract(model, Unreadable(len(images)), **(settings | {"fingerprint": ""}))


def test_what_is_read_back_may_be_changed_without_changing_the_file(
    model: Classifier, images: ResidentImages, tmp_path: Path
) -> None:
    first = extract(model, images, device=CPU, cache=tmp_path, fingerprint="x").clone()
    extract(model, images, device=CPU, cache=tmp_path, fingerprint="x").zero_()
    assert torch.equal(extract(model, images, device=CPU, cache=tmp_path, fingerprint="x"), first)


CHANGES: dict[str, Callable[[dict[str, object]], object]] = {
    "fingerprint": lambda s: s | {"fingerprint": "y"},
    "views": lambda s: s | {"views": 3},
    "plain": lambda s: s | {"views": 0},
    "seed": lambda s: s | {"seed": 1},
    "augmentation": lambda s: s | {"augmentation": Augmentation((0.5, 0.6), False)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_settings_have_a_file_of_their_own(
    change: str, model: Classifier, images: ResidentImages, tmp_path: Path
) -> None:
    settings = {"views": 2, "seed": 0, "device": CPU, "cache": tmp_path, "fingerprint": "x"}
    extract(model, images, **settings)
    other = CHANGES[change](settings)
    found = extract(model, images, **other)
    assert len(kept_files(tmp_path)) == 2
    assert torch.equal(found, extract(model, images, **(other | {"cache": None})))


@pytest.mark.parametrize("place", ["backbone.layer1.0.bn1.running_mean", "branches.0.layer4.0.conv2.weight"])
def test_other_weights_have_a_file_of_their_own(place: str, images: ResidentImages, tmp_path: Path) -> None:
    model = untrained(BASE, NEW)
    before = weights_digest(model.backbone, model.branches)
    first = extract(model, images, device=CPU, cache=tmp_path, fingerprint="x").clone()
    with torch.no_grad():
        model.state_dict()[place].view(-1)[0].add_(1.0)
    assert weights_digest(model.backbone, model.branches) != before
    second = extract(model, images, device=CPU, cache=tmp_path, fingerprint="x")
    assert len(kept_files(tmp_path)) == 2
    assert not torch.equal(first, second)
    assert torch.equal(second, extract(model, images, device=CPU))


def test_other_wiring_of_the_same_weights_has_a_file_of_its_own(images: ResidentImages, tmp_path: Path) -> None:
    for places in (["fc"], []):
        model = untrained(BASE, *([NEW] * len(places)), where=places)
        extract(model, images, device=CPU, cache=tmp_path, fingerprint="x")
    assert len(kept_files(tmp_path)) == 2


def test_the_same_weights_without_a_last_relu_have_a_file_of_their_own(images: ResidentImages, tmp_path: Path) -> None:
    found = []
    for last_relu in (True, False):
        backbone = build("resnet10", width=8, in_channels=1, last_relu=last_relu)
        usual = untrained(BASE)
        backbone.load_state_dict(usual.backbone.state_dict())
        arch = usual.arch if last_relu else {**usual.arch, "last_relu": False}
        model = Classifier(arch, backbone.freeze(), usual.base_head, BASE, SIZES, "glyph")
        found.append(extract(model, images, device=CPU, cache=tmp_path, fingerprint="x"))
    assert found[0].min() >= 0 > found[1].min()


def test_a_new_augmentation_of_a_kind_makes_old_views_stale(
    model: Classifier, images: ResidentImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"views": 1, "device": CPU, "cache": tmp_path, "fingerprint": "x"}
    first = extract(model, images, **settings).clone()
    monkeypatch.setattr(features.augment, "for_kind", lambda kind, size: Augmentation((0.3, 0.4), False))
    assert not torch.equal(extract(model, images, **settings), first)


def test_a_file_half_written_is_never_used(
    model: Classifier, images: ResidentImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"device": CPU, "cache": tmp_path, "fingerprint": "x"}
    whole = np.save

    def halfway(file: object, array: np.ndarray) -> None:
        whole(file, array)
        file.truncate(300)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", halfway)
    with pytest.raises(KeyboardInterrupt):
        extract(model, images, **settings)
    assert kept_files(tmp_path) == []
    monkeypatch.undo()
    assert torch.equal(extract(model, images, **settings), extract(model, images, device=CPU))
    assert len(kept_files(tmp_path)) == 1


@pytest.mark.parametrize("left", [0, 3, 90, 500, -4], ids=lambda left: f"{left} bytes")
def test_a_file_cut_short_is_made_anew(left: int, model: Classifier, images: ResidentImages, tmp_path: Path) -> None:
    settings = {"device": CPU, "cache": tmp_path, "fingerprint": "x"}
    first = extract(model, images, **settings)
    (file,) = kept_files(tmp_path)
    file.write_bytes(file.read_bytes()[:left])
    assert torch.equal(extract(model, images, **settings), first)
    assert torch.equal(extract(model, Unreadable(len(images)), **settings), first)  # and it is whole again


def test_a_file_of_another_shape_is_made_anew(model: Classifier, images: ResidentImages, tmp_path: Path) -> None:
    settings = {"device": CPU, "cache": tmp_path, "fingerprint": "x"}
    first = extract(model, images, **settings)
    (file,) = kept_files(tmp_path)
    np.save(file, first[:, :-1].numpy())
    assert torch.equal(extract(model, images, **settings), first)


def test_features_that_are_not_finite_are_refused(model: Classifier, images: ResidentImages) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(broken.backbone.parameters()).fill_(float("nan"))
    with pytest.raises(BranchoutError, match=rf"NaN or infinite features for {len(images)} of {len(images)} images"):
        extract(broken, images, device=CPU)
