"""Commands that hand models on: export, push, pull."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from branchout.cli import options
from branchout.cli.app import app, console, open_model, quoted, say, then
from branchout.units import size


@app.command(epilog="Example: branchout export v2/ --onnx v2.onnx")
def export(
    model: options.Saved,
    onnx: Annotated[Path, typer.Option("--onnx", help="The file to write, such as v2.onnx.")],
    flip: options.Flip = False,
    verify: Annotated[
        Path | None, typer.Option(help="Check with these images, a file or folder, instead of built-in ones.")
    ] = None,
) -> None:
    """Write a model as one ONNX file, checked against the model."""
    from branchout.export import OPSET, check_file, check_installed

    check_installed()
    check_file(onnx)
    loaded = open_model(model)
    with console.status("Writing and checking the file …"):
        made = loaded.export(onnx, flip=flip, verify=verify)
    sizes = loaded.classifier.preprocessing
    source = "built-in " if verify is None else ""
    same = "all predictions are" if made.agreeing == made.pictures else f"{made.agreeing:,} predictions are"
    say(f"checked on {made.pictures:,} {source}images: logits differ by at most {made.difference:.1e}, {same} the same")
    say(
        f"{made.path}: {size(made.size)}, opset {OPSET}, {len(loaded.classes):,} classes; "
        f"images (N × {sizes.channels} × {sizes.size} × {sizes.size}) in, logits and probabilities out"
        + (", averaged over the mirror image" if flip else "")
    )
    say("The file's metadata has two keys: classes (the class names) and preprocessing.")


@app.command(epilog="Example: branchout push v2/ owner/birds --private")
def push(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model: a folder.")],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The name on the Hugging Face hub.")],
    private: Annotated[bool, typer.Option("--private", help="Only you, and those you allow, can see it.")] = False,
) -> None:
    """Push a saved model to the Hugging Face hub."""
    from branchout.model import hub

    open_model(str(model))  # the error for a wrong folder lists those nearby
    page = hub.push(model, name, private=private)
    say(f"pushed to {page}")
    then(f"branchout predict {quoted(hub.PREFIX + name.removeprefix(hub.PREFIX))} photo.jpg")


@app.command(epilog="Example: branchout pull owner/birds --out v2/")
def pull(
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="A model on the Hugging Face hub.")],
    out: Annotated[Path, typer.Option(help="The folder to save it in.")],
) -> None:
    """Download a model from the Hugging Face hub into a folder."""
    from branchout import api
    from branchout.model import hub
    from branchout.training.work_folder import check_out

    check_out(out)
    loaded = api.load(hub.PREFIX + name.removeprefix(hub.PREFIX))
    loaded.save(out)
    say(f"{len(loaded.classes):,} classes; saved in {out}")
    then(f"branchout predict {quoted(out)} photo.jpg")
