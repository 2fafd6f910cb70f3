"""What several tests need: few images of few characters, tiny networks, and ways to compare them."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from branchout import cli
from branchout.data.glyphs import glyphs
from branchout.data.memory import keep
from branchout.data.preprocess import Preprocessing
from branchout.data.samples import ArrayPixels, Samples
from branchout.labels import LabelSpace
from branchout.model.classifier import Classifier, Step
from branchout.model.heads import Correction, CosineHead
from branchout.model.resnet import build
from branchout.model.staged import Branch, branch_point

CPU = torch.device("cpu")
BASE = (
    "ampersand",
    "black heart suit",
    "digit eight",
    "digit three",
    "greek capital letter omega",
    "latin capital letter q",
    "latin capital letter r",
    "latin small letter a",
)
NEW = ("infinity", "latin small letter g", "upwards arrow")
LATER = ("commercial at", "number sign", "question mark")
SIZES = Preprocessing(32, 1, (0.5,), (0.25,))
SCRIPT = Path(sys.executable).parent / "branchout"
ARCH = {"family": "resnet", "name": "resnet10", "stem": "small", "width": 8, "in_channels": 1}


def drawn(train: int, val: int) -> tuple[Samples, Samples]:
    """Images of all the characters above, drawn once and kept as arrays."""
    data = glyphs(train, val, classes=[*BASE, *NEW, *LATER])
    tables = []
    for table in (data.train, data.val):
        pixels = np.stack([table.read(n) for n in range(len(table))])
        tables.append(Samples.build(ArrayPixels(pixels), table.names, table.ids))
    return tables[0], tables[1]


def tiles(names: Sequence[str], per_class: int, seed: int) -> Samples:
    """Every class is a pattern as large as a patch, repeated all over the picture, under much noise.

    A transformer without training tells them apart; characters it could not, and training one would take too long.
    """
    rng = np.random.default_rng(seed)
    patterns = {name: np.random.default_rng(n).normal(size=(8, 8)) for n, name in enumerate(names)}
    labels = [*names] * per_class
    pixels = [128 + 30 * (np.tile(patterns[name], (4, 4)) + rng.normal(size=(32, 32))) for name in labels]
    images = np.stack(pixels).clip(0, 255).astype(np.uint8)[..., None]
    return Samples.build(ArrayPixels(images), labels, [f"{name} {n}" for n, name in enumerate(labels)])


def exemplars(train: Samples, names: Sequence[str] = BASE, per_class: int = 5) -> Samples:
    return keep(train.of_classes(names), per_class=per_class, seed=3)


def untrained(*branches: Sequence[str], where: Sequence[str] = (), seed: int = 0) -> Classifier:
    """A tiny model with random weights and statistics: a base and one step for every further list of classes.

    From the second step on, branches correct earlier logits.
    """
    torch.manual_seed(seed)
    backbone = build("resnet10", width=8, in_channels=1)
    for name, tensor in backbone.state_dict().items():
        if name.endswith(("running_mean", "bias")):
            tensor.normal_(std=0.1)
        elif name.endswith("running_var") or (tensor.ndim == 1 and tensor.is_floating_point()):
            tensor.uniform_(0.5, 1.5)
    steps: list[Step] = []
    for names, place in zip(branches[1:], where or ["last"] * (len(branches) - 1), strict=True):
        point = branch_point(backbone, place)
        branch = Branch.clone(backbone, point)
        with torch.no_grad():
            for parameter in branch.own_parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        head, correction = CosineHead(backbone.features, len(names)), None
        if steps and point.start < len(backbone.names):
            correction = Correction(backbone.features, sum(map(len, branches[: len(steps) + 1])))
            nn.init.normal_(correction.weight, std=0.05)
        steps.append(Step(tuple(names), place, point.start, branch, head, correction=correction))
    head = CosineHead(backbone.features, len(branches[0]))
    return Classifier(ARCH, backbone, head, branches[0], SIZES, "glyph", steps)


def fixed_batch(count: int = 12, seed: int = 5) -> Tensor:
    """Random images to compare two models with."""
    return torch.randn(count, 1, 32, 32, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Classifier, pictures: Tensor) -> Tensor:
    return model.on_device(torch.device("cpu"))(model.backbone.arrange(pictures))


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# The command line.


class Answer(NamedTuple):
    status: int
    out: str
    err: str


def run(*words: str | Path) -> Answer:
    """What the command runs, in this process: quicker, and with the same handling of errors. The window is wide."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["branchout", *map(str, words)])
        patch.setenv("COLUMNS", "300")
        try:
            cli.main()
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 0
    return Answer(status, out.getvalue(), err.getvalue())


def start(*words: str | Path, **settings: str) -> subprocess.Popen[str]:
    """The real command, in a process of its own that can be interrupted even if the tests run in the background."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    return subprocess.Popen(
        [SCRIPT, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def typed(*words: str | Path) -> Answer:
    process = start(*words)
    out, err = process.communicate(timeout=200)
    return Answer(process.returncode, out, err)


def well(answer: Answer) -> str:
    """The output of a command that succeeded without a message on stderr."""
    assert answer.status == 0, answer.err
    assert answer.err == ""
    return answer.out


def refused(answer: Answer, *words: str) -> None:
    """Assert an error for users: status 1, a sentence without a traceback, and these words in it."""
    assert answer.status == 1, answer
    assert answer.err.startswith("error: ")
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err, answer.err


def some(samples: Samples, counts: dict[str, int]) -> Samples:
    """The first few images of each class."""
    return samples.select(np.concatenate([np.flatnonzero(samples.names == name)[:n] for name, n in counts.items()]))


SPACES = {
    "disjoint": LabelSpace.of(["a", "b", "c"], ["d", "e"]),
    "some overlap": LabelSpace.of(["a", "b", "c"], ["c", "d"]),
    "all overlap": LabelSpace.of(["a", "b", "c"], ["c", "a"]),
    "three steps": LabelSpace.of(["a", "b"], ["c", "a"], ["d"], ["a", "e"]),
}
"""Label spaces with and without overlap."""


def scores(space: LabelSpace, seed: int, images: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Random logits of every column, and random labels."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(images, space.columns)) * 2, rng.integers(0, len(space.classes), images)


def class_folders(samples: Samples, folder: Path, names: Sequence[str], most: int) -> Path:
    """A folder with one folder for each class, with at most so many images."""
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in np.flatnonzero(samples.names == name)[:most]:
            Image.fromarray(samples.read(int(number))[:, :, 0]).save(folder / name / f"{number}.png")
    return folder
