"""How long a CPU takes for the frozen part of a network: torch in two memory layouts, torch.compile, onnxruntime.

    python benchmarks/speed/engines.py --out results

Weights are random. The engines take turns, so that a busy machine slows all of them; the smallest of their times is
what each takes when nothing disturbs it. Writes OUT/speed/engines.json; the ratio is that of the first network.
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from branchout.bench import rows as results
from branchout.data.preprocess import Preprocessing
from branchout.method.running.engine import OnnxTrunk
from branchout.model.bases import rebuild
from branchout.model.classifier import Classifier


class Times(NamedTuple):
    """Milliseconds for one image."""

    wall: float
    cpu: float


def network(name: str) -> Classifier:
    arch = {"family": "timm", "name": name, "num_classes": 1000}
    backbone, head = rebuild(arch)
    sizes = Preprocessing(224, 3, (0.5,) * 3, (0.25,) * 3)
    assert head is not None
    return Classifier(arch, backbone, head, [f"class {n}" for n in range(1000)], sizes)


def engines(model: Classifier, batch: int) -> dict[str, Callable[[], object]]:
    """What runs one batch in each engine, after a first run."""
    images = torch.randn(batch, 3, 224, 224)
    contiguous = copy.deepcopy(model.backbone).to(memory_format=torch.contiguous_format)
    usual = copy.deepcopy(model.backbone).to(memory_format=torch.channels_last)
    arranged = images.contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(copy.deepcopy(usual))
    trunk = OnnxTrunk(model, [len(model.backbone.names)])
    found: dict[str, Callable[[], object]] = {
        "torch channels_last": lambda: usual(arranged),
        "torch contiguous": lambda: contiguous(images),
        "torch.compile": lambda: compiled(arranged),
        "onnxruntime": lambda: trunk(images),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["efficientnet_lite0", "resnet50"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["BRANCHOUT_CACHE"] = tempfile.mkdtemp()
    rows = []
    with torch.no_grad():
        for name in options.networks:
            times = in_turns(engines(network(name), options.batch), options.batch, options.repeats)
            for engine, each in times.items():
                print(f"{name}, {engine}: {each.wall:.1f} ms, {each.cpu:.1f} ms of CPU time", flush=True)
            rows.append({"network": name, "milliseconds": {engine: each._asdict() for engine, each in times.items()}})
    first = rows[0]["milliseconds"]
    ours, theirs = first["onnxruntime"]["wall"] / 1000, first["torch channels_last"]["wall"] / 1000
    about = results.provenance()
    about["versions"] |= {"onnxruntime": version("onnxruntime")}
    row = {
        "of": f"onnxruntime, one image of 224 pixels through {options.networks[0]}",
        "against": "torch in channels_last",
        "ratio": ours / theirs,
        "of_seconds": ours,
        "against_seconds": theirs,
        "networks": rows,
        "batch": options.batch,
        "threads": options.threads,
        **about,
    }
    print(f"ratio {ours / theirs:.2f}; written to {results.write(options.out / 'speed', 'engines', row)}")


if __name__ == "__main__":
    main()
