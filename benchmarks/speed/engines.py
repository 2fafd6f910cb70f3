"""How long a CPU takes for the frozen part of a network: torch in two memory layouts, torch.compile, onnxruntime.

Weights are random. The engines take turns, so that a busy machine slows all of them; the smallest of their times is
what each takes when nothing disturbs it. The ratio is that of the first network.
"""

from __future__ import annotations

import copy
import os
import resource
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import torch

from benchmarks.speed.common import Rows, Settings, compared
from branchout.data.preprocess import Preprocessing
from branchout.method.running.engine import OnnxEngine
from branchout.model.bases import rebuild
from branchout.model.classifier import Classifier

NETWORKS = ("efficientnet_lite0", "resnet50")


class Times(NamedTuple):
    """Milliseconds for one image."""

    wall: float
    cpu: float


def network(name: str) -> Classifier:
    arch = {"family": "timm", "name": name, "num_classes": 1000}
    backbone, head = rebuild(arch)
    sizes = Preprocessing.from_scratch("photo", 224)
    assert head is not None
    return Classifier(arch, backbone, head, [f"class {n}" for n in range(1000)], sizes)


def engines(model: Classifier, batch: int) -> dict[str, Callable[[], object]]:
    """What runs one batch in each engine, after a first run."""
    images = torch.randn(batch, 3, 224, 224)
    contiguous = copy.deepcopy(model.backbone).to(memory_format=torch.contiguous_format)
    usual = copy.deepcopy(model.backbone).to(memory_format=torch.channels_last)
    arranged = images.contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(copy.deepcopy(usual))
    engine = OnnxEngine(model, [len(model.backbone.names)])
    found: dict[str, Callable[[], object]] = {
        "torch channels_last": lambda: usual(arranged),
        "torch contiguous": lambda: contiguous(images),
        "torch.compile": lambda: compiled(arranged),
        "onnxruntime": lambda: engine(images),
    }
    for name, run in list(found.items()):
        try:
            run()
        except Exception as error:  # torch.compile needs a C++ compiler
            print(f"{name} does not run here: {str(error).splitlines()[0]}")
            del found[name]
    return found


def in_turns(found: dict[str, Callable[[], object]], batch: int, repeats: int) -> dict[str, Times]:
    taken: dict[str, list[Times]] = {name: [] for name in found}
    for _ in range(repeats):
        for name, run in found.items():
            start, used = time.perf_counter(), _cpu_seconds()
            run()
            taken[name].append(Times(time.perf_counter() - start, _cpu_seconds() - used))
    return {
        name: Times(*(1000 * min(column) / batch for column in zip(*each, strict=True))) for name, each in taken.items()
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rows(settings: Settings) -> Rows:
    if find_spec("onnxruntime") is None:
        print("no engines: the extra 'export' is not installed")
        return
    os.environ["BRANCHOUT_CACHE"] = tempfile.mkdtemp()
    batch, found = settings.pick(16, 1), []
    with torch.no_grad():
        for name in NETWORKS[: settings.pick(2, 1)]:
            times = in_turns(engines(network(name), batch), batch, settings.pick(15, 1))
            for engine, each in times.items():
                print(f"{name}, {engine}: {each.wall:.1f} ms, {each.cpu:.1f} ms of CPU time", flush=True)
            found.append({"network": name, "milliseconds": {engine: each._asdict() for engine, each in times.items()}})
    first = found[0]["milliseconds"]
    yield (
        "engines",
        compared(
            f"onnxruntime, one image of 224 pixels through {NETWORKS[0]}",
            "torch in channels_last",
            first["onnxruntime"]["wall"] / 1000,  # type: ignore[index]
            first["torch channels_last"]["wall"] / 1000,  # type: ignore[index]
            networks=found,
            batch=batch,
            threads=torch.get_num_threads(),
            packages={"onnxruntime": version("onnxruntime")},
        ),
    )
