"""How long a model with t branches takes for a batch, against its arithmetic: the trunk once, and t + 1 last stages.

    python benchmarks/speed/branches.py --out results

Measures a ResNet10 of half the usual width for 64-pixel images with 1, 5, 10 and 50 branches, in turns with its parts:
the trunk alone and one branch alone, of which the bound is the sum. Also measures the branches as one batched
computation (torch.func.vmap over their stacked weights). Writes OUT/speed/branches-DEVICE.json.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from branchout.bench import rows as results
from branchout.data.preprocess import Preprocessing
from branchout.model import architectures
from branchout.model.bases import rebuild
from branchout.model.classifier import Classifier, Step
from branchout.model.heads import CosineHead
from branchout.model.staged import Branch, branch_point

SIZES = Preprocessing(64, 3, (0.5,) * 3, (0.25,) * 3)
WIDTH, STEPS = 32, (1, 5, 10, 50)
NEW = 10
"""Classes of each step."""


def model_with(branches: int, device: torch.device) -> Classifier:
    arch = architectures.describe("resnet10", SIZES, width=WIDTH)
    backbone, _ = rebuild(arch)
    point = branch_point(backbone)
    names = [tuple(f"{step} {n}" for n in range(NEW)) for step in range(branches)]
    steps = [
        Step(each, "last", point.start, Branch.clone(backbone, point), CosineHead(backbone.features, NEW))
        for each in names
    ]
    head = CosineHead(backbone.features, 100)
    old = [f"old {n}" for n in range(100)]
    return Classifier(arch, backbone, head, old, SIZES, steps=steps).placed(device)


def seconds_of(works: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """The median seconds of each, in turns; on a CPU those of this process, so that a busy machine changes little."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repeats + 2):  # the first two warm up
        for name, work in works.items():
            start = clock()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number > 1:
                taken[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def batched(model: Classifier) -> Callable[[Tensor], Tensor]:
    """All branches as one computation."""
    branches = [step.branch for step in model.steps]
    weights, buffers = stack_module_state(branches)
    one = copy.deepcopy(branches[0]).to("meta")
    return lambda x: vmap(lambda w, b, x: functional_call(one, (w, b), (x,)), (0, 0, None))(weights, buffers, x)


@torch.inference_mode()
def measure(count: int, batch: int, repeats: int, device: torch.device) -> dict[str, float]:
    model = model_with(count, device)
    images = model.backbone.arrange(torch.rand(batch, 3, 64, 64, device=device))
    start = model.steps[0].start
    trunk = model.backbone.run(images, 0, start)
    together = batched(model)
    found = seconds_of(
        {
            "whole": lambda: model(images),
            "trunk": lambda: model.backbone.run(images, 0, start),
            "branch": lambda: model.backbone.run(trunk, start),
            "batched": lambda: together(trunk),
        },
        repeats,
        device,
    )
    bound = found["trunk"] + (count + 1) * found["branch"]
    return {
        "branches": count,
        "batch": batch,
        "ratio": found["whole"] / bound,
        "bound_seconds": bound,
        "batched_ratio": found["batched"] / (count * found["branch"]),
        **{f"{name}_seconds": value for name, value in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    rows = []
    for count in STEPS:
        rows.append(measure(count, options.batch, options.repeats, device))
        print({name: round(value, 4) for name, value in rows[-1].items()}, flush=True)
    row = {
        "of": f"ResNet10 with {STEPS[-1]} branches, {options.batch} images",
        "against": "its trunk once and its last stage once for the base and for each branch, measured alone",
        "ratio": rows[-1]["ratio"],
        "of_seconds": rows[-1]["whole_seconds"],
        "against_seconds": rows[-1]["bound_seconds"],
        "rows": rows,
        "threads": options.threads,
        **results.provenance(),
    }
    print(results.write(options.out / "speed", f"branches-{device.type}", row))


if __name__ == "__main__":
    main()
