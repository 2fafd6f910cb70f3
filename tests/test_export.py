"""An exported file answers as the model does, anywhere, and nothing is left of one that would not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from helpers import fixed_batch, untrained
from PIL import Image

from branchout import api
from branchout import export as exporting
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.export import Graph, built_in_pictures, export_onnx
from branchout.model.checkpoint import SavedModel, StepPoints
from branchout.model.class_means import ClassMeans

# What somebody writes who has the file, a picture library and nothing of ours: all of it from the metadata.
STRANGER = """
import json, sys
import numpy as np
import onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
told = {key: json.loads(text) for key, text in session.get_modelmeta().custom_metadata_map.items()}
how = told["preprocessing"]
filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

def prepare(path):
    picture = Image.open(path).convert("L" if how["channels"] == 1 else "RGB")
    shorter = int(how["size"] / how["crop"])
    width, height = (side * shorter // min(picture.size) for side in picture.size)
    picture = picture.resize((width, height), filters[how["interpolation"]])
    left, top = round((width - how["size"]) / 2), round((height - how["size"]) / 2)
    picture = picture.crop((left, top, left + how["size"], top + how["size"]))
    pixels = np.asarray(picture, dtype=np.float32).reshape(how["size"], how["size"], how["channels"]) / 255
    return ((pixels - np.float32(how["mean"])) / np.float32(how["std"])).transpose(2, 0, 1)

images = np.stack([prepare(path) for path in sys.argv[2:]])
found = []
for batch in (images, *np.split(images, len(images))):
    logits, probabilities = session.run(["logits", "probabilities"], {"images": batch})
    rows = zip(logits, probabilities)
    found.append([[told["classes"][row.argmax()], float(row.max()), z.tolist()] for z, row in rows])
assert not {"torch", "branchout"} & set(sys.modules), "it must do without"
print(json.dumps({"together": found[0], "alone": [rows[0] for rows in found[1:]]}))
"""


def asked_by_a_stranger(file: Path, pictures: list[Path]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, file, *pictures], capture_output=True, text=True, check=False, cwd=file.parent
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def points(b: float, deltas: list[Any] | None = None) -> StepPoints:
    frontier = {"kind": "dial", "settings": [[b]], "figures": {}, "images": 1, "measured": "dev"}
    return StepPoints(frontier, [deltas] if deltas else [], 0, "balanced")


def mixed(pooler: str, b: float = 0.7) -> SavedModel:
    """Three branches that share classes and a feature vector, deltas and class means as strong as logits, a dial that
    matters."""
    plain = untrained(("a", "b", "c"), ("d", "b"), ("e", "a", "b"), where=("fc", "layer3"))
    generator = torch.Generator().manual_seed(0)
    means = ClassMeans.of(*(torch.randn(*shape, generator=generator) for shape in ((5, 2 * 64), (5,), (5,))), 0.5)
    model = plain.rebuilt([plain.steps[0], replace(plain.steps[1], class_means=means)], pooler)
    model.kind = "photo"
    deltas = [
        torch.randn(len(sources) * model.backbone.features, len(names), generator=generator) * 0.3
        for sources, names in zip(model.fused.delta_inputs, model.space.branches, strict=True)
    ]
    return SavedModel(model, (points(0.1), points(b, deltas)))


def grey(count: int = 3) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (count, 40, 50, 1), dtype=np.uint8))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """The mixed model in several ways: to trace one takes seconds."""
    made = {}
    for pooler, flip in (("max", False), ("max", True), ("average", False)):
        made[pooler, flip] = tmp_path_factory.mktemp("onnx") / "m.onnx"
        assert export_onnx(mixed(pooler), made[pooler, flip], grey(), flip=flip).difference < 1e-4
    return made


def answers(file: Path, images: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    logits, probabilities = session.run(["logits", "probabilities"], {"images": images.numpy()})
    return logits, probabilities


def test_in_a_process_without_torch_it_answers_as_the_model_does(
    extended_twice: api.Model, val: Samples, tmp_path: Path
) -> None:
    file = tmp_path / "v3.onnx"
    weight = extended_twice.classifier.backbone.get_parameter("stem.conv1.weight")
    before, layout = extended_twice.predict(val.read(0)), weight.stride()
    made = extended_twice.export(file)
    assert (extended_twice.predict(val.read(0)), weight.stride()) == (before, layout)  # the model itself is as it was
    assert made.path == file
    assert made.size == file.stat().st_size
    assert made.difference < 1e-4
    assert made.agreeing == made.pictures == 16
    pictures = []
    for number, sides in enumerate([(32, 32), (64, 40), (41, 97), (200, 150), (33, 32)]):
        pictures.append(tmp_path / f"{number}.png")
        drawn = Image.fromarray(val.read(number * 20)[:, :, 0]).resize(sides)
        (drawn.convert("RGB") if number % 2 else drawn).save(pictures[-1])
    found = asked_by_a_stranger(file, pictures)
    assert len(found["together"]) == len(found["alone"]) == 5
    for together, alone, [(name, probability)] in zip(
        found["together"], found["alone"], extended_twice.predict(pictures, top=1), strict=True
    ):
        for answer, certainty, logits in (together, alone):
            assert answer == name
            assert certainty == pytest.approx(probability, abs=1e-4)
            assert len(logits) == len(extended_twice.classes)
    assert len({answer for answer, *_ in found["alone"]}) > 1  # else a constant would do


def test_a_timm_base_with_a_crop_and_mirror_images(tmp_path: Path) -> None:
    model = api.load("efficientnet_lite0")
    pictures = []
    for number, picture in enumerate(built_in_pictures("photo")[4:12:4]):
        pictures.append(tmp_path / f"{number}.png")
        Image.fromarray(picture).save(pictures[-1])
    made = model.export(tmp_path / "lite.onnx", flip=True, verify=tmp_path)
    assert made.pictures == 2
    found = asked_by_a_stranger(tmp_path / "lite.onnx", pictures)
    plain = model.predict(pictures, top=1)
    for (name, probability, _), [(expected, wanted)], [(_, unflipped)] in zip(
        found["alone"], model.predict(pictures, top=1, flip=True), plain, strict=True
    ):
        assert name == expected
        assert probability == pytest.approx(wanted, abs=1e-3)
        assert abs(unflipped - wanted) > 1e-3  # else the mirror image had no part in it


@pytest.mark.parametrize(("pooler", "flip"), [("max", False), ("max", True), ("average", False)])
def test_branches_deltas_dial_and_pooler_are_all_in_it(
    pooler: str, flip: bool, exported: dict[tuple[str, bool], Path]
) -> None:
    model = mixed(pooler).model()
    for count in (1, 5):
        images = fixed_batch(count)
        with torch.no_grad():
            expected = (model(images) + model(images.flip(3))) / 2 if flip else model(images)
        logits, probabilities = answers(exported[pooler, flip], images)
        assert logits.shape == (count, 5)
        np.testing.assert_allclose(logits, expected.numpy(), atol=1e-4)
        np.testing.assert_allclose(probabilities, expected.softmax(1).numpy(), atol=1e-5)


def test_the_file_describes_itself(exported: dict[tuple[str, bool], Path]) -> None:
    proto = onnx.load(exported["max", False])
    onnx.checker.check_model(proto, full_check=True)
    assert {entry.domain: entry.version for entry in proto.opset_import} == {"": exporting.OPSET}
    assert proto.producer_name == "branchout"
    [given] = proto.graph.input
    batch, *sides = given.type.tensor_type.shape.dim
    assert given.name == "images"
    assert batch.dim_param
    assert [side.dim_value for side in sides] == [1, 32, 32]
    assert [output.name for output in proto.graph.output] == ["logits", "probabilities"]
    told = {entry.key: json.loads(entry.value) for entry in proto.metadata_props}
    assert told["classes"] == ["a", "b", "c", "d", "e"]
    assert told["branches"] == {"the base": ["a", "b", "c"], "step 1": ["d", "b"], "step 2": ["e", "a", "b"]}
    assert told["goal"] == "balanced"
    assert told["flip"] is False
    for key, value in asdict(mixed("max").classifier.preprocessing).items():
        assert told["preprocessing"][key] == (list(value) if isinstance(value, tuple) else value)
    assert "crop" in told["preprocessing"]["steps"]


def test_weights_are_in_the_file_once(exported: dict[tuple[str, bool], Path]) -> None:
    """Mirror images go through the same graph, not through a copy of it."""
    assert exported["max", True].stat().st_size < exported["max", False].stat().st_size * 1.1


@pytest.mark.parametrize("b", [0.7 + 2e-3, float("nan")])
def test_a_file_that_answers_otherwise_is_not_left_behind(
    b: float, exported: dict[tuple[str, bool], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_file(*_: object) -> Any:
        proto = onnx.load(exported["max", False])
        del proto.metadata_props[:]
        return proto

    monkeypatch.setattr(exporting, "trace", other_file)
    with pytest.raises(BranchoutError, match="differs from the model"):
        export_onnx(mixed("max", b), tmp_path / "m.onnx", grey())
    assert list(tmp_path.iterdir()) == []
    export_onnx(mixed("max"), tmp_path / "m.onnx", grey())  # the same file for the model it is of
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_done_is_said_before_anything_is_traced(
    extended: api.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "trace", lambda *_: pytest.fail("traced"))
    out = tmp_path / "m.onnx"
    with pytest.raises(BranchoutError, match="a mirrored character is another character"):
        extended.export(out, flip=True)
    with pytest.raises(BranchoutError, match="there is no image or folder"):
        extended.export(out, verify=tmp_path / "nowhere")
    with pytest.raises(BranchoutError, match="no images"):
        extended.export(out, verify=tmp_path)
    with pytest.raises(BranchoutError, match="No images to check"):
        extended.export(out, verify=[])
    (tmp_path / "half.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(BranchoutError, match=r"half\.png"):
        extended.export(out, verify=tmp_path / "half.png")
    out.write_text("mine")
    with pytest.raises(BranchoutError, match="already exists"):
        extended.export(out)
    assert out.read_text() == "mine"
    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(BranchoutError, match=r'onnxscript. Type: pip install "branchout\[export\]"'):
        extended.export(tmp_path / "other.onnx")


def test_too_large_or_impossible_networks_are_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no operator for this\nand a page of details")

    monkeypatch.setattr(torch.onnx, "export", refuse)
    with pytest.raises(BranchoutError, match=r"resnet10 cannot be exported to ONNX: no operator for this$"):
        export_onnx(mixed("max"), tmp_path / "m.onnx", grey())
    monkeypatch.setattr(exporting, "LARGEST", 1000)
    with pytest.raises(BranchoutError, match="one ONNX file holds at most"):
        export_onnx(mixed("max"), tmp_path / "m.onnx", grey())
    assert list(tmp_path.iterdir()) == []


def test_built_in_pictures_are_pictures() -> None:
    for kind, channels in (("photo", 3), ("glyph", 1)):
        found = built_in_pictures(kind)
        assert len(found) == 16
        assert all(p.dtype == np.uint8 and p.shape[2] == channels and p.std() > 5 for p in found)
        assert len({p.tobytes() for p in found}) == 16


def test_the_graph_is_the_classifier() -> None:
    model = mixed("average").model()
    with torch.no_grad():
        logits, probabilities = Graph(model, flip=False)(fixed_batch(4))
        assert torch.equal(logits, model(fixed_batch(4)))
    assert torch.equal(probabilities, logits.softmax(1))


def test_of_many_pictures_some_serve() -> None:
    files = [Path(str(n)) for n in range(1000)]
    assert api.some_of(files, 10) == files[::100]
    assert api.some_of(files[:7], 10) == files[:7]


def test_one_array_is_one_picture(extended: api.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(exporting, "export_onnx", lambda saved, out, pictures, flip: seen.extend(pictures))
    extended.export(tmp_path / "m.onnx", verify=np.zeros((40, 32, 1), np.uint8))
    assert [np.shape(each) for each in seen] == [(40, 32, 1)]
    extended.export(tmp_path / "m.onnx", verify=np.zeros((3, 40, 32, 1), np.uint8))
    assert len(seen) == 4
