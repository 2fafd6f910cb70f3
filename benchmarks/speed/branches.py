"""How long a model with t branches takes for a batch, against its arithmetic: the trunk once, and t + 1 last stages.

Measures a ResNet10 of half the usual width for 64-pixel images with 1, 5, 10 and 50 branches, each with a correction
from the second on, in turns with its parts: the trunk alone and one branch alone, of which the bound is the sum. Also
measures the branches as one batched computation (torch.func.vmap over their stacked weights). A GPU evaluates a folder
in batches of 256 images; eight at once are what a server may get.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from benchmarks.speed.common import Rows, Settings, compared, in_turns
from branchout.data.preprocess import Preprocessing
from branchout.model import architectures
from branchout.model.bases import rebuild
from branchout.model.classifier import Classifier, Step
from branchout.model.heads import Correction, CosineHead
from branchout.model.staged import Branch, branch_point

SIZES = Preprocessing.from_scratch("photo", 64)
WIDTH, STEPS = 32, (1, 5, 10, 50)
OLD, NEW = 100, 10
"""Classes of the base and of each step."""
BATCHES = {"cuda": (8, 256)}


def model_with(branches: int, device: torch.device) -> Classifier:
    arch = architectures.describe("resnet10", SIZES, width=WIDTH)
    backbone, _ = rebuild(arch)
    point = branch_point(backbone)
    features = backbone.features
    steps = [
        Step(
            tuple(f"{step} {n}" for n in range(NEW)),
            "last",
            point.start,
            Branch.clone(backbone, point),
            CosineHead(features, NEW),
            correction=Correction(features, OLD + step * NEW) if step else None,
        )
        for step in range(branches)
    ]
    old = [f"old {n}" for n in range(OLD)]
    return Classifier(arch, backbone, CosineHead(features, OLD), old, SIZES, steps=steps).on_device(device)


def batched(model: Classifier) -> Callable[[Tensor], Tensor]:
    """All branches as one computation."""
    branches = [step.branch for step in model.steps]
    branches = [copy.deepcopy(branch).to(memory_format=torch.contiguous_format) for branch in branches]
    weights, buffers = stack_module_state(branches)
    one = copy.deepcopy(branches[0]).to("meta")
    return lambda x: vmap(lambda w, b, x: functional_call(one, (w, b), (x,)), (0, 0, None))(weights, buffers, x)


@torch.inference_mode()
def measure(count: int, batch: int, repeats: int, device: torch.device) -> dict[str, float]:
    model = model_with(count, device)
    images = model.backbone.arrange(torch.rand(batch, 3, 64, 64, device=device))
    start = model.steps[0].start
    trunk = model.backbone.run(images, 0, start)
    together, plain = batched(model), trunk.contiguous()  # vmap knows no other memory layout
    found = in_turns(
        {
            "whole": lambda: model(images),
            "trunk": lambda: model.backbone.run(images, 0, start),
            "branch": lambda: model.backbone.run(trunk, start),
            "batched": lambda: together(plain),
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


def rows(settings: Settings) -> Rows:
    found = []
    for batch in BATCHES.get(settings.device.type, (8,)):
        for count in STEPS[: settings.pick(4, 2)]:
            found.append(measure(count, batch, settings.pick(21, 1), settings.device))
            print({name: round(value, 4) for name, value in found[-1].items()}, flush=True)
    last = found[-1]
    yield (
        f"branches-{settings.device.type}",
        compared(
            f"ResNet10 with {last['branches']} branches, {last['batch']} images",
            "its trunk once and its last stage once for the base and for each branch, measured alone",
            last["whole_seconds"],
            last["bound_seconds"],
            rows=found,
            threads=torch.get_num_threads(),
        ),
    )
