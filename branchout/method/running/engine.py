"""The frozen stages through onnxruntime on a CPU, where it is installed and the work is large enough to pay.

onnxruntime fuses what torch runs one operation after the other. Its results are rounded differently, so the choice
follows from the request alone, never from a measurement: the same request is always computed by the same engine.
$BRANCHOUT_ENGINE is `torch`, `onnxruntime`, or `auto`, the default.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import warnings
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from branchout.data.images import SMALL
from branchout.data.samples import digest
from branchout.disk_cache import cache_folder, load_cached, store_cached
from branchout.errors import BranchoutError, unknown
from branchout.method.features import weights_digest
from branchout.model.classifier import Classifier
from branchout.model.staged import Backbone

ENGINES = ("auto", "torch", "onnxruntime")
ENOUGH = 500
"""From this many forward passes on, onnxruntime saves more time than its export takes (once for each base)."""
ALLOWED = 1e-3
"""The largest difference from torch's outputs, as a share of the largest of them."""
OPSET = 17
CHUNK = 4
"""Images that onnxruntime computes at once: more take memory and gain no time."""


def engine_for(model: Classifier, device: torch.device, passes: int) -> str:
    """`onnxruntime` or `torch`, for this many images through the network."""
    asked = os.environ.get("BRANCHOUT_ENGINE", "auto")
    if asked not in ENGINES:
        raise unknown("BRANCHOUT_ENGINE", asked, ENGINES)
    if device.type != "cpu" or asked == "torch":
        return "torch"
    if find_spec("onnxruntime") is None:
        if asked == "onnxruntime":
            raise BranchoutError(
                'BRANCHOUT_ENGINE is onnxruntime, which is not installed. Type: pip install "branchout[export]"'
            )
        return "torch"
    pays = model.preprocessing.size > SMALL and passes >= ENOUGH
    return "onnxruntime" if pays or asked == "onnxruntime" else "torch"


def use_engine(model: Classifier, engine: str, starts: Sequence[int] = ()) -> str:
    """Have the model run its frozen stages in this engine; returns the one it runs in.

    `starts` are stages whose inputs are needed besides those of the model's own branches. Where the network cannot be
    exported, or its outputs differ, it stays with torch, with a warning.
    """
    model.engine = None
    on_cpu = model.base_head.weight.device.type == "cpu"  # a run that began there may resume on a GPU
    if engine == "torch" or not on_cpu:
        return "torch"
    points = sorted({*starts, *model.feature_starts})
    try:
        found = OnnxEngine(model, points)
        _check(model, found)
    except Exception as error:  # exporter and runtime raise many kinds of errors
        reason = str(error).strip().splitlines() or [type(error).__name__]
        logging.getLogger(__name__).warning("The network runs in torch, not in onnxruntime: %s", reason[0])
        return "torch"
    model.engine = found
    return engine


class OnnxEngine:
    """The inputs of some stages of a network, and its features, computed by onnxruntime."""

    def __init__(self, model: Classifier, starts: Sequence[int]) -> None:
        self.starts = tuple(starts)
        self.arrange = model.backbone.arrange
        self.graph = _exported(model, self.starts)

    @cached_property
    def session(self) -> Any:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        settings.log_severity_level = 3
        settings.enable_cpu_mem_arena = settings.enable_mem_pattern = False  # they keep memory while torch trains
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other processes decode images
        return onnxruntime.InferenceSession(self.graph, settings, providers=["CPUExecutionProvider"])

    def close(self) -> None:
        """Give back the session's memory. The next call opens another one."""
        vars(self).pop("session", None)

    def __call__(self, images: Tensor) -> dict[int, Tensor]:
        parts = [self.session.run(None, {"images": x.contiguous().numpy()}) for x in torch.split(images, CHUNK)]
        found = [torch.cat([torch.from_numpy(x) for x in outputs]) for outputs in zip(*parts, strict=True)]
        return {n: self.arrange(x) if x.ndim == 4 else x for n, x in zip(self.starts, found, strict=True)}


class _Stages(nn.Module):
    """What is exported: the inputs of the stages `starts`."""

    def __init__(self, backbone: Backbone, starts: Sequence[int]) -> None:
        super().__init__()
        self.backbone, self.starts = backbone, starts

    def forward(self, images: Tensor) -> list[Tensor]:
        return list(self.backbone.inputs_of(images, self.starts).values())


def _exported(model: Classifier, starts: Sequence[int]) -> bytes:
    """The network as an ONNX graph, from the cache if it was exported before."""
    sizes = model.preprocessing
    settings = repr((starts, model.arch, sizes.size, sizes.channels, torch.__version__))
    name = f"engines/{digest(weights_digest(model.backbone), settings)}"
    stored = load_cached(cache_folder(), name, None, np.uint8)
    if stored is not None:
        return stored.tobytes()
    data = _export(model.backbone, starts, torch.zeros(2, sizes.channels, sizes.size, sizes.size))
    store_cached(cache_folder(), name, np.frombuffer(data, np.uint8))
    return data


def _export(backbone: Backbone, starts: Sequence[int], example: Tensor) -> bytes:
    stages = _Stages(copy.deepcopy(backbone).to(memory_format=torch.contiguous_format), starts).eval()
    names = [f"at {start}" for start in starts]
    axes = {name: {0: "batch"} for name in ("images", *names)}
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The older of torch's two exporters, which takes a ninth of the time and needs no other package.
        torch.onnx.export(
            stages,
            (example,),
            written,  # type: ignore[arg-type]
            dynamo=False,
            opset_version=OPSET,
            input_names=["images"],
            output_names=names,
            dynamic_axes=axes,
        )
    return written.getvalue()


@torch.no_grad()
def _check(model: Classifier, engine: OnnxEngine) -> None:
    """Compare with torch on a few images of noise."""
    sizes = model.preprocessing
    shape = (4, sizes.channels, sizes.size, sizes.size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = model.activations(model.backbone.arrange(images), engine.starts)
    found = engine(images)
    for start, values in expected.items():
        difference = (found[start] - values).abs().max() / values.abs().max().clamp(min=1e-6)
        if not difference <= ALLOWED:  # also true for NaN
            raise BranchoutError(f"outputs of {model.arch['name']} differ by {difference:.1e} of the largest")
