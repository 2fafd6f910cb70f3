"""The frozen stages in onnxruntime: the same numbers as torch's, or torch with a warning."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import BASE, NEW, fixed_batch, logits, untrained

from branchout import api
from branchout.data.samples import Samples
from branchout.disk_cache import cache_folder
from branchout.errors import BranchoutError
from branchout.method import stage1
from branchout.method.config import ExtendConfig
from branchout.method.running import engine
from branchout.method.running.engine import ENOUGH, engine_for, use_engine
from branchout.model.classifier import Classifier

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHOUT_CACHE", str(tmp_path / "cache"))


def test_logits_and_activations_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pictures = untrained(BASE, NEW, where=["layer3"]), fixed_batch()
    expected, start = logits(model, pictures), len(model.backbone.names) - 1
    inside = model.activations(pictures, [start])[start]
    assert use_engine(model, "onnxruntime", [start]) == "onnxruntime"
    with monkeypatch.context() as patch:
        patch.setattr(model.backbone, "run", lambda *_: pytest.fail("torch ran the backbone"))
        torch.testing.assert_close(logits(model, pictures), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.activations(pictures, [start])[start], inside, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits(model, pictures), logits(model, pictures))
    assert model.activations(pictures, [1]).keys() == {1}  # what was not exported runs in torch
    assert use_engine(model, "torch") == "torch"
    assert torch.equal(logits(model, pictures), expected)


def test_a_network_is_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained(BASE)
    use_engine(model, "onnxruntime")
    assert len(list((cache_folder() / "engines").glob("*.npy"))) == 1
    monkeypatch.setattr(engine, "_export", lambda *_: pytest.fail("it was exported again"))
    assert use_engine(model, "onnxruntime") == "onnxruntime"


@pytest.mark.parametrize("fault", ["export", "outputs"])
def test_a_network_that_cannot_be_used_stays_in_torch(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> bytes:
        raise RuntimeError("no operator for this layer\nand a long trace")

    model = untrained(BASE)
    if fault == "export":
        monkeypatch.setattr(engine, "_export", fails)
    else:
        monkeypatch.setattr(engine, "ALLOWED", -1.0)
    with caplog.at_level(logging.WARNING):
        assert use_engine(model, "onnxruntime") == "torch"
    assert model.engine is None
    assert "runs in torch" in caplog.text
    assert ("no operator for this layer" if fault == "export" else "differ by") in caplog.text


def test_the_request_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    small = untrained(BASE)
    assert engine_for(small, CPU, 10 * ENOUGH) == "torch"
    large = photo_sized(small)
    assert engine_for(large, CPU, ENOUGH) == "onnxruntime"
    assert engine_for(large, CPU, ENOUGH - 1) == "torch"
    assert engine_for(large, torch.device("cuda"), ENOUGH) == "torch"
    monkeypatch.setenv("BRANCHOUT_ENGINE", "torch")
    assert engine_for(large, CPU, ENOUGH) == "torch"
    monkeypatch.setenv("BRANCHOUT_ENGINE", "onnxruntime")
    assert engine_for(small, CPU, 1) == "onnxruntime"
    monkeypatch.setattr(engine, "find_spec", lambda _: None)
    with pytest.raises(BranchoutError, match=r"pip install .*export"):
        engine_for(small, CPU, 1)
    monkeypatch.setenv("BRANCHOUT_ENGINE", "auto")
    assert engine_for(large, CPU, ENOUGH) == "torch"
    monkeypatch.setenv("BRANCHOUT_ENGINE", "onxruntime")
    with pytest.raises(BranchoutError, match="did you mean onnxruntime"):
        engine_for(small, CPU, 1)


def photo_sized(model: Classifier) -> Classifier:
    sizes = replace(model.preprocessing, size=224)
    return Classifier(model.arch, model.backbone, model.base_head, BASE, sizes)


def test_extend_and_evaluate_run_in_it_and_say_so(
    base: api.Model, train: Samples, val: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    run = engine.OnnxEngine.__call__
    monkeypatch.setattr(
        engine.OnnxEngine, "__call__", lambda self, images: runs.append(len(images)) or run(self, images)
    )
    monkeypatch.setenv("BRANCHOUT_ENGINE", "onnxruntime")
    new = train.of_classes(NEW)
    model = base.extend(new, epochs=1)
    assert sum(runs) > 4 * len(new) / 2  # the views that were trained with, and more
    assert model.saved.history[-1]["engine"] == "onnxruntime"
    assert base.classifier.engine is None
    assert model.classifier.engine is None
    runs.clear()
    found = model.evaluate(val.of_classes([*BASE, *NEW]))
    assert sum(runs) - 4 == len(found.labels)  # each image once, for before and after; four to compare with torch
    monkeypatch.setenv("BRANCHOUT_ENGINE", "torch")
    same = model.evaluate(val.of_classes([*BASE, *NEW]))
    assert (found.answers == same.answers).mean() >= 0.97
    assert (found.before_answers == same.before_answers).mean() >= 0.97


def test_its_memory_is_given_back_while_the_branch_is_trained(
    base: api.Model, train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[engine.OnnxEngine] = []
    made, loss_of = engine.OnnxEngine.__init__, stage1.stage1_loss
    monkeypatch.setattr(engine.OnnxEngine, "__init__", lambda self, *args: (engines.append(self), made(self, *args))[1])
    opened: list[bool] = []

    def watched(*args: object) -> torch.Tensor:
        opened.append("session" in vars(engines[-1]))
        return loss_of(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(stage1, "stage1_loss", watched)
    monkeypatch.setenv("BRANCHOUT_ENGINE", "onnxruntime")
    base.extend(train.of_classes(NEW), epochs=1)
    assert opened
    assert not any(opened)
    assert "session" in vars(engines[-1])  # features of the finished model


@pytest.mark.parametrize("minutes", [None, 5.0])
def test_the_history_names_the_engine_that_ran(
    minutes: float | None, base: api.Model, train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> bytes:
        raise RuntimeError("no operator for this layer")

    monkeypatch.setenv("BRANCHOUT_ENGINE", "onnxruntime")
    monkeypatch.setattr(engine, "_export", fails)
    said: list[str] = []
    prepared = base.prepare(train.of_classes(NEW), config=ExtendConfig(epochs=1, views=1, minutes=minutes))
    model = base.extend_prepared(prepared, announce=said.append)
    assert model.saved.history[-1]["engine"] == "torch"
    assert all("onnxruntime" not in line for line in said)
