"""Training a base from scratch: a transformer learns, and is trained by another schedule than a ResNet."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import BASE, CPU, NEW, SIZES, exemplars, same, snapshot, tiles

from branchout import api
from branchout.bench.base_model import SavedBase
from branchout.data.images import open_images
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.training.loop import Event
from branchout.training.pretrain import FAST, PAPER, TRANSFORMER, pretrain, schedule_for


def test_a_schedule_goes_with_the_network() -> None:
    assert schedule_for("resnet10") == schedule_for("resnet50", "fast") == FAST
    assert schedule_for("resnet10", "paper") == PAPER
    assert schedule_for("vit_tiny") == TRANSFORMER
    with pytest.raises(BranchoutError, match=r"vit_tiny hardly learns.*--schedule fast"):
        schedule_for("vit_tiny", "paper")
    with pytest.raises(BranchoutError, match="no schedule is called 'slow'; known are: paper, fast"):
        schedule_for("vit_tiny", "slow")


def test_a_transformer_learns_and_grows_a_branch(tmp_path: Path) -> None:
    train, val = (tiles([*BASE, *NEW], 20, seed) for seed in (0, 1))
    losses: list[float] = []

    def watch(event: Event) -> None:
        if event.work == "Training the base model":
            losses.append(event.figures["loss"])

    optimisation = replace(TRANSFORMER, epochs=8, lr=0.05)  # which few images turn into a rate of 0.0016
    model = api.pretrain(
        train.of_classes(BASE),
        arch="vit_tiny",
        width=32,
        size=32,
        kind="glyph",
        optimisation=optimisation,
        device=CPU,
        on_progress=watch,
    )
    assert losses[-1] < 0.5 * losses[0]
    assert model.classifier.arch["family"] == "vit"
    assert model.evaluate(val.of_classes(BASE)).after.all > 0.8  # chance: 0.125
    made = SavedBase("here", model.saved).optimisation
    assert made == optimisation
    grown = model.extend(
        train.of_classes(NEW), memory=exemplars(train), val=val.of_classes([*BASE, *NEW]), out=tmp_path / "v2", epochs=2
    )
    assert [step.branch.names for step in grown.classifier.steps] == [("blocks.11",)]
    again, pictures = api.load(tmp_path / "v2"), [val.read(number) for number in range(12)]
    assert again.predict(pictures) == grown.predict(pictures)
    assert set(again.classes) == {*BASE, *NEW}


class StoppedError(Exception):
    pass


def test_a_transformer_killed_and_trained_on_is_the_one_never_killed(train: Samples, tmp_path: Path) -> None:
    few = train.of_classes(BASE[:3])
    images = open_images(few, SIZES, CPU, cache=tmp_path)

    def trained(checkpoint: Path | None, stop: int | None = None) -> dict[str, torch.Tensor]:
        def watch(event: Event) -> None:
            if event.done == stop:
                raise StoppedError

        settings = {"arch": "vit_tiny", "width": 16, "kind": "glyph", "device": CPU, "checkpoint": checkpoint}
        optimisation = replace(TRANSFORMER, epochs=3)
        made = pretrain(
            images, few.labels, few.classes, SIZES, **settings, optimisation=optimisation, on_progress=watch
        )
        return snapshot(made)

    with pytest.raises(StoppedError):
        trained(tmp_path / "c.safetensors", stop=2)
    assert same(trained(tmp_path / "c.safetensors"), trained(None))


def test_without_a_schedule_each_network_has_its_own(train: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    from branchout.training import pretrain as module

    used = []
    monkeypatch.setattr(module, "fit", lambda *words, **options: used.append(words[5]))
    for arch in ("resnet10", "vit_tiny"):
        made = api.pretrain(train.of_classes(BASE), arch=arch, width=8, size=32, kind="glyph", device=CPU)
        assert made.saved.history[0].get("optimiser", "sgd") == used[-1].optimiser
    assert [each.optimiser for each in used] == ["sgd", "adamw"]
    assert [each.epochs for each in used] == [FAST.epochs, TRANSFORMER.epochs]
