"""Taking models apart and elsewhere: explain, export, push, pull."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from branchout.cli.app import OFTEN, Flip, Saved, app, console, must_be_free, open_model, quoted, say, then, warn
from branchout.errors import BranchoutError

if TYPE_CHECKING:
    from branchout.evaluate.explain import Column, Explanation, Verdict


@app.command(rich_help_panel=OFTEN)
def explain(
    model: Saved,
    pictures: Annotated[list[Path], typer.Argument(metavar="PICTURES", help="Image files, or folders of them.")],
    memory: Annotated[
        list[Path] | None,
        typer.Option(help="Labelled images: name those nearest to the picture. May be given several times."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes of each branch.")] = 3,
    nearest: Annotated[int, typer.Option(min=1, help="How many images of --memory.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Say why a picture gets its answer: branches, deltas, dial."""
    import json
    from contextlib import nullcontext

    from branchout.cli.display import progress
    from branchout.data.decode import UnreadableImage, decode
    from branchout.data.folders import images_in
    from branchout.errors import printable
    from branchout.training.loop import silent

    files = [file for given in pictures for file in images_in(given)]
    loaded = open_model(model)
    album = _album(memory, quiet=as_json) if memory else None
    readable: list[Path] = []

    def decoded() -> Iterator[Any]:
        for file in files:
            try:
                yield decode(file)
            except UnreadableImage as error:
                if len(files) == 1:
                    raise
                say(str(error), "left out:", error=True)
            else:
                readable.append(file)

    with nullcontext(silent) if as_json else progress(console) as report:
        found = loaded.explain(decoded(), top=top, memory=album, nearest=nearest, report=report)
    if not found:
        raise BranchoutError(f"none of these {len(files):,} pictures could be read")
    for file, why in zip(readable, found, strict=True):
        if as_json:
            print(json.dumps({"file": printable(file), **why.to_dict()}, ensure_ascii=False))
        else:
            _tell(printable(file), why, None if album is None else len(album))


def _album(folders: list[Path], quiet: bool) -> Any:
    """The labelled images of all folders in one table, each called by its whole path."""
    from dataclasses import replace

    import numpy as np

    from branchout import api
    from branchout.data.samples import concatenate

    problems: list[str] = []
    tables = []
    for folder in folders:
        samples = api.samples_in(folder, problems)
        tables.append(replace(samples, ids=np.array([str(folder / name) for name in samples.ids])))
    if quiet:
        for line in problems:
            say(line, "left out or worth a look:", error=True)
    else:
        warn(problems)
    return concatenate(tables)


def _tell(file: str, why: Explanation, images: int | None) -> None:
    """One picture's answer in words and one table."""
    from branchout.labels import branch_name

    winner, several = why.winner, len(why.branches) > 1
    say(f"{file}: {winner.name}, {100 * winner.probability:.1f}%" + (f" (known to {why.known})" if several else ""))
    if why.before:
        name, probability = why.before
        say(f"before {branch_name(len(why.branches) - 1)} the model said: {name}, {100 * probability:.1f}%")
    console.print(_sums(why))
    if several:
        for number, best in enumerate(why.branches):
            say(f"{branch_name(number)} on its own: {', '.join(f'{name} {value:.2f}' for name, value in best)}")
    if len(why.verdicts) > 1:
        first, second = (_shown_parts(verdict) for verdict in why.verdicts[:2])
        own, delta, dial = (one - other for one, other in zip(first, second, strict=True))
        parts = f": own logits {own:+.2f}, deltas {delta:+.2f}, dial {dial:+.2f}" if several else ""
        say(f"{winner.name} leads {why.verdicts[1].name} by {own + delta + dial:.2f}{parts}")
    if why.alone != winner.name:
        say(f"by own logits alone it would be: {why.alone}")
    if why.without_dial not in (winner.name, why.alone):
        say(f"without the dial it would be: {why.without_dial}")
    if images is not None:
        told = "\n  ".join(f"{n.cosine:.3f}  {n.name}: {n.file}" for n in why.nearest)
        say(f"nearest of {images:,} images to {branch_name(winner.branch)}, by the cosine of features:\n  {told}")


def _sums(why: Explanation) -> Table:
    """How the best classes' logits come about. Parts are rounded first and then added, so what is shown adds up."""
    from branchout.labels import branch_name

    pools = any(len(verdict.columns) > 1 for verdict in why.verdicts)
    several = len(why.branches) > 1
    headings = ["class", "branch", "own logit", "+ deltas", "+ dial", "= logit"] if several else ["class", "logit"]
    table = Table(title="where the logits come from" if several else None, title_justify="left", show_lines=False)
    for heading in [*headings, *(["pooled"] if pools else [])]:
        table.add_column(heading, justify="left" if heading in ("class", "branch", "pooled") else "right")
    for verdict in why.verdicts:
        for number, column in enumerate(verdict.columns):
            parts = _rounded(column)
            cells = [Text(verdict.name if number == 0 else "", "bold" if verdict is why.winner else "")]
            if several:
                cells += [Text(branch_name(column.branch)), Text(f"{parts[0]:.2f}")]
                cells += [Text(f"{part:+.2f}" if part else "") for part in parts[1:]]
            cells.append(Text(f"{sum(parts):.2f}"))
            if pools:
                cells.append(Text(_pooled(why.pooler, column.counts, verdict.logit, len(verdict.columns))))
            table.add_row(*cells)
    return table


def _rounded(column: Column) -> list[float]:
    return [round(part, 2) for part in (column.own, column.delta, column.dial)]


def _shown_parts(verdict: Verdict) -> list[float]:
    """The parts of what was pooled, as the table shows them."""
    used = [_rounded(column) for column in verdict.columns if column.counts]
    return [sum(part) / len(used) for part in zip(*used, strict=True)]


def _pooled(pooler: str, counts: bool, logit: float, columns: int) -> str:
    if columns == 1:
        return ""
    if pooler == "max":
        return "◂ max" if counts else ""
    return f"mean {logit:.2f}"


@app.command(rich_help_panel=OFTEN)
def export(
    model: Saved,
    onnx: Annotated[Path, typer.Option("--onnx", help="The file to write, such as v2.onnx.")],
    flip: Flip = False,
    verify: Annotated[
        Path | None, typer.Option(help="Check with these pictures, a file or folder, not with built-in ones.")
    ] = None,
) -> None:
    """Write a model as one ONNX file, checked against the original."""
    from branchout.cli.display import size
    from branchout.export import OPSET, check_installed
    from branchout.files import check_output

    check_installed()
    check_output(onnx, free=True)
    loaded = open_model(model)
    with console.status("writing and checking the file …"):
        made = loaded.export(onnx, flip=flip, verify=verify)
    sizes = loaded.classifier.preprocessing
    whose = "built-in " if verify is None else ""
    say(
        f"checked on {made.pictures:,} {whose}pictures: logits differ by at most {made.difference:.1e}, "
        f"{'every answer is' if made.agreeing == made.pictures else f'{made.agreeing:,} answers are'} the same"
    )
    say(
        f"{made.path}: {size(made.size)}B, opset {OPSET}, {len(loaded.classes):,} classes; "
        f"images (N × {sizes.channels} × {sizes.size} × {sizes.size}) in, logits and probabilities out"
        + (", averaged over the mirror image" if flip else "")
    )
    say("class names and how to prepare a picture are in the file's metadata: classes, preprocessing")


@app.command(rich_help_panel=OFTEN)
def push(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model: a folder.")],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Where on the Hugging Face hub.")],
    private: Annotated[bool, typer.Option("--private", help="For you and those you allow only.")] = False,
) -> None:
    """Push a saved model to the Hugging Face hub, as it is."""
    from branchout.model import hub

    open_model(str(model))  # a wrong folder is answered with those nearby
    page = hub.push(model, name, private=private)
    say(f"pushed to {page}")
    then(f"branchout predict {quoted(hub.PREFIX + name.removeprefix(hub.PREFIX))} photo.jpg")


@app.command(rich_help_panel=OFTEN)
def pull(
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="A model on the Hugging Face hub.")],
    out: Annotated[Path, typer.Option(help="Where it is saved.")],
) -> None:
    """Save a model from the Hugging Face hub in a folder of yours."""
    from branchout import api
    from branchout.model import hub

    must_be_free(out)
    loaded = api.load(hub.PREFIX + name.removeprefix(hub.PREFIX))
    loaded.save(out)
    say(f"{len(loaded.classes):,} classes; saved in {out}")
    then(f"branchout predict {quoted(out)} photo.jpg")
