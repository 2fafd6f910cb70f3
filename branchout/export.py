"""Export the fused model to one ONNX file, checked against the original before it gets its final name.

Input: preprocessed images (N×C×size×size). Output: logits and probabilities of all classes. The class names and the
preprocessing are stored in the file's metadata, which any ONNX runtime can read.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from branchout import __version__
from branchout.data.preprocess import Picture
from branchout.data.samples import Image
from branchout.errors import BranchoutError, first_line, printable
from branchout.evaluate.compare import logits
from branchout.files import atomic_write, check_output
from branchout.labels import branch_name
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier

OPSET = 18
"""The oldest that torch's exporter writes without conversion; runtimes have supported it since early 2023."""
ALLOWED = 1e-3
"""The largest difference allowed between a logit of the file and of the original."""
LARGEST = 2_000_000_000
"""The most bytes of one file: protobuf stores its size in 31 bits."""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
STEPS = (
    "Rotate the image by its EXIF orientation and composite transparency over white. Convert it to grey (1 channel) "
    "or RGB (3). Resize it with the interpolation named, antialiased, so that its shorter side is floor(size / crop) "
    "and the longer one in proportion, rounded down; cut size × size pixels out of the middle, where half a pixel goes "
    "to the even neighbour. Divide by 255, subtract mean, divide by std. Layout: batch, channel, row, column."
)


@dataclass(frozen=True)
class Exported:
    """What was written, and how much it differs from the original."""

    path: Path
    size: int
    pictures: int
    difference: float
    """The largest difference between two logits."""
    agreeing: int
    """Images with the same predicted class."""


class Graph(nn.Module):
    """The classifier as it is exported: from images to logits and probabilities."""

    def __init__(self, model: Classifier, flip: bool) -> None:
        super().__init__()
        self.model = model
        self.flip = flip

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        # Mirrored images are part of the same batch: a second pass would be a second copy of the graph.
        seen = torch.cat([images, images.flip(3)]) if self.flip else images
        found: Tensor = self.model(seen)
        if self.flip:
            found = found.reshape(2, -1, found.shape[1]).mean(0)
        return found, found.softmax(1)


def check_file(out: Path) -> None:
    """Raise, before any work is done, if no ONNX file can be written here."""
    check_output(out, free=True)
    if out.suffix.lower() != ".onnx":
        raise BranchoutError(
            f"{printable(out)} is not the name of an ONNX file: it must end with .onnx. "
            f"Type: --onnx {printable(out.with_suffix('.onnx'))}"
        )


def export_onnx(saved: SavedModel, out: Path, pictures: Iterable[Picture], *, flip: bool = False) -> Exported:
    """Write the model at its operating point. For `pictures` the file must give the same logits as the model."""
    check_installed()
    check_file(out)
    # A copy, on the CPU and contiguous: the exporter writes channels_last tensors as extra operations.
    model = copy.deepcopy(saved.model()).cpu().to(memory_format=torch.contiguous_format)
    if flip and model.kind == "glyph":
        raise BranchoutError("a mirrored character is another character: --flip is for photographs")
    batches = list(_batches([model.preprocessing.prepare(picture) for picture in pictures]))
    if not batches:
        raise BranchoutError("No images to check the exported model with")
    traced = trace(model, flip)
    for key, value in metadata(saved, model, flip).items():
        traced.metadata_props.add(key=key, value=value)
    with atomic_write(out) as partial:
        partial.write_bytes(traced.SerializeToString())
        differences, agreeing = _compared(model, partial, batches, flip)
        if not max(differences) <= ALLOWED:  # also true for NaN
            raise BranchoutError(
                f"The ONNX file differs from the model: on {sum(map(len, batches))} images logits differ by up to "
                f"{max(differences):.2g}, and {ALLOWED:g} is allowed. Nothing was written. "
                f"Please report the network ({model.arch['name']}) and the versions of torch, onnx and onnxruntime"
            )
        size = partial.stat().st_size
    return Exported(out, size, sum(map(len, batches)), max(differences), agreeing)


def check_installed() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise BranchoutError(f'Export needs {" and ".join(missing)}. Type: pip install "branchout[export]"')


def trace(model: Classifier, flip: bool) -> Any:
    """The model as an ONNX graph for batches of any size."""
    weights = sum(p.numel() * 4 for p in model.parameters())
    if weights > LARGEST:
        raise BranchoutError(
            f"This model has {weights / 1e9:.1f} GB of weights; one ONNX file holds at most {LARGEST / 1e9:.0f} GB"
        )
    sizes = model.preprocessing
    example = torch.zeros(2, sizes.channels, sizes.size, sizes.size)
    try:
        with _quietly():
            program = torch.onnx.export(
                Graph(model, flip).eval(),
                (example,),
                dynamo=True,
                opset_version=OPSET,
                input_names=["images"],
                output_names=["logits", "probabilities"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
                verbose=False,
            )
    except Exception as error:  # the exporter raises many kinds of errors
        raise BranchoutError(f"{model.arch['name']} cannot be exported to ONNX: {first_line(error)}") from error
    assert program is not None
    proto: Any = program.model_proto
    proto.producer_name, proto.producer_version = "branchout", __version__
    proto.doc_string = f"A classifier of {len(model.space.classes):,} classes. Preprocessing: see metadata."
    return proto


def metadata(saved: SavedModel, model: Classifier, flip: bool) -> dict[str, str]:
    """What a program needs beside the graph, as JSON; `classes` is in the order of the logits."""
    facts: dict[str, Any] = {
        "classes": list(model.space.classes),
        "preprocessing": {**asdict(model.preprocessing), "steps": STEPS},
        "branches": {branch_name(n): list(names) for n, names in enumerate(model.space.branches)},
        "network": model.arch["name"],
        "flip": flip,
        "goal": saved.step_points[-1].goal if saved.step_points else None,
        "branchout": __version__,
    }
    return {key: json.dumps(value, ensure_ascii=False) for key, value in facts.items()}


def built_in_pictures(kind: str) -> list[Image]:
    """Sixteen images that every installation has: characters for a glyph model, else crops of two photographs."""
    if kind == "glyph":
        from branchout.data.glyphs import faces_of_classes, glyphs

        names = list(faces_of_classes())
        drawn = glyphs(1, 1, classes=names[:: len(names) // 16][:16]).val
        return [drawn.read(n) for n in range(len(drawn))]
    from sklearn.datasets import load_sample_image

    rng = np.random.default_rng(0)
    found = []
    for name in ("china.jpg", "flower.jpg"):
        photograph = load_sample_image(name)
        for _ in range(8):
            height, width = rng.integers(120, 400, 2)
            top = rng.integers(0, photograph.shape[0] - height)
            left = rng.integers(0, photograph.shape[1] - width)
            found.append(np.ascontiguousarray(photograph[top : top + height, left : left + width]))
    return found


def _batches(prepared: Sequence[Tensor]) -> Iterator[Tensor]:
    """A batch of one image, then larger ones: this detects a file that works for one batch size only."""
    if prepared:
        yield torch.stack(list(prepared[:1]))
    for start in range(1, len(prepared), 32):
        yield torch.stack(list(prepared[start : start + 32]))


def _compared(model: Classifier, path: Path, batches: Sequence[Tensor], flip: bool) -> tuple[list[float], int]:
    """The largest difference in each batch, and how many images get the same class."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    differences, agreeing = [], 0
    for batch in batches:
        images = model.preprocessing.normalise(batch)
        expected = logits(model, images, flip).numpy()
        found = session.run(["logits"], {"images": images.numpy()})[0]
        differences.append(float(np.abs(found - expected).max()))
        agreeing += int((found.argmax(1) == expected.argmax(1)).sum())
    return differences, agreeing


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the exporter's warnings; its result is checked afterwards."""
    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name in levels:
                logging.getLogger(name).setLevel(logging.ERROR)
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
