"""Arguments and options that several commands have. Commands refer to them as `options.Device`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from branchout.goals import GOALS

Data = Annotated[
    str,
    typer.Argument(metavar="DATA", help="A folder with one folder per class, a benchmark's folder, or 'glyphs'."),
]
ClassFacts = Annotated[
    Path | None,
    typer.Option("--classes", help='JSON with "domains", "base_domain" and "siblings" of the classes.'),
]
Base = Annotated[
    str,
    typer.Option(
        "--base",
        help="A saved model, glyphs, a network's name (see `branchout bases`), a checkpoint, a Hugging Face folder.",
    ),
]
New = Annotated[
    Path,
    typer.Argument(metavar="NEW", help="New images: one folder per class. It may hold new images of old classes too."),
]
Memory = Annotated[Path | None, typer.Option(help="Exemplars: kept images of old classes, one folder per class.")]
Memories = Annotated[
    list[Path] | None,
    typer.Option(
        "--memory",
        metavar="PATH",
        help="Exemplars: kept images of old classes, one folder per class. May be given several times.",
    ),
]
Val = Annotated[
    Path | None,
    typer.Option(help="Validation images, one folder per class; without them a fifth of the images is held out."),
]
Saved = Annotated[str, typer.Argument(metavar="MODEL", help="A saved model: a folder, or hf-hub:owner/name.")]
Opened = Annotated[str, typer.Argument(metavar="MODEL", help="A saved model, or any base that --base accepts.")]
Pictures = Annotated[list[Path], typer.Argument(metavar="IMAGES", help="Image files, or folders of them.")]
Labelled = typer.Argument(metavar="TEST", help="Labelled images: one folder per class.")
ClassesFrom = Annotated[
    str | None,
    typer.Option(
        "--classes-from",
        metavar="folders|leaves",
        help="Nested class folders: the outermost or the innermost folder names the class.",
    ),
]
_GOAL = typer.Option(help=f"{', '.join(GOALS)}, or a minimum: 'novel>=0.80' ('novel>=80%').")
Goal = Annotated[str, _GOAL]
GoalOrNone = Annotated[str | None, _GOAL]
Recipe = Annotated[str, typer.Option(help="branchout, paper (the paper's text) or reference (its authors' code).")]
Where = Annotated[
    str | None,
    typer.Option(
        "--branch",
        help="What is cloned and trained: last (the last stage), a stage, a module, or fc (a new head only). Default: "
        "last, or what fits the time.",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0.1, help="Time limit in minutes: what fits it is trained. Default: 7 for photos on a CPU, else none."
    ),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="GB of memory for images, frozen features and stage II each; images and frozen features beyond it are "
        "kept on disk.",
    ),
]
Arch = Annotated[
    str | None, typer.Option(help="The architecture of a checkpoint file: resnet18, torchvision:resnet18.")
]
HeadFile = Annotated[
    Path | None, typer.Option("--head", help="A file with the linear head (weight, bias) of a base that has none.")
]
ClassNames = Annotated[
    Path | None, typer.Option("--classes", help="The base's class names: one on each line, or a JSON list.")
]
Flip = Annotated[bool, typer.Option("--flip", help="Average over the image and its mirror image. Takes twice as long.")]
TensorBoard = Annotated[
    Path | None, typer.Option("--tensorboard", metavar="DIR", help="Also write TensorBoard event files here.")
]
Seed = Annotated[int, typer.Option(min=0, help="The random seed.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps; by default a CUDA GPU if there is one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
