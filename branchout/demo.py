"""The demo: 800 characters that a shipped model knows, extended by 40, five of them old ones in a new typeface."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from branchout import api
from branchout.cli.display import progress
from branchout.data import memory, scenarios
from branchout.data.glyphs import glyphs
from branchout.data.samples import Samples, concatenate
from branchout.errors import BranchoutError

if TYPE_CHECKING:
    from rich.console import Console

BASE, NOVEL, OVERLAP, EXEMPLARS = 800, 40, 5, 10
OURS = {"v2", ".v2.work", "predictions.png", "report.html"}
"""What the demo writes, and so may replace."""


def run(out: Path, console: Console) -> api.Model:
    """Extend the shipped base; writes OUT/v2, OUT/predictions.png and OUT/report.html."""
    if out.exists():
        others = {path.name for path in out.iterdir()} - OURS if out.is_dir() else {out.name}
        if others:
            raise BranchoutError(f"{out} holds other things ({', '.join(sorted(others)[:3])}); choose another --out")
        shutil.rmtree(out / "v2", ignore_errors=True)  # what a stopped demo left goes on
    data = glyphs()
    plan = scenarios.build("overlap-style", data, base=BASE, novel=NOVEL, overlap=OVERLAP)
    base = api.load("glyphs")
    train = plan.train(data)
    old = memory.keep(train.select(train.origin == 0), per_class=EXEMPLARS)
    new = train.select(train.origin == 1)
    val = concatenate([plan.dev(data), plan.test(data)])
    console.print(
        f"base: {len(base.classes)} characters. New: {len(new.classes)} characters in {len(new):,} images, "
        f"{OVERLAP} of them known already, now in serif typefaces. Kept: {EXEMPLARS} images of each old one.",
        highlight=False,
    )
    with progress(console) as report:
        # Fewer epochs and cached views than the default: characters are learned quickly, and nobody likes to wait.
        model = base.extend(new, memory=old, val=val, out=out / "v2", report=report, epochs=12, views=2)
    picture = out / "predictions.png"
    draw_predictions(base, model, plan.test(data), plan.branches[1], picture)
    console.print(f"a few answers, before and after: {picture}", highlight=False)
    # On the very images of the table, those that chose nothing; their features are still in the cache.
    page = model.report(base.material(new, old, val).test, out=out / "report.html")
    console.print(f"all of them, class by class, in a browser: {page}", highlight=False)
    return model


def draw_predictions(
    before: api.Model, after: api.Model, samples: Samples, new_classes: tuple[str, ...], path: Path, count: int = 18
) -> None:
    """Some test images with what the old and the new model say of them."""
    from matplotlib.figure import Figure

    rng = np.random.default_rng(3)
    is_new = np.isin(samples.names, list(new_classes))
    chosen = np.concatenate(
        [
            rng.permutation(np.flatnonzero(is_new))[: count * 2 // 3],
            rng.permutation(np.flatnonzero(~is_new))[: count // 3],
        ]
    )
    pictures = [samples.read(int(i)) for i in chosen]
    said = [[answers[0] for answers in model.predict(pictures, top=1)] for model in (before, after)]
    columns = 6
    figure = Figure(figsize=(13, 2.2 * -(-count // columns)))
    for place, (index, picture) in enumerate(zip(chosen, pictures, strict=True)):
        axes = figure.add_subplot(-(-count // columns), columns, place + 1)
        axes.imshow(picture[:, :, 0] if picture.shape[2] == 1 else picture, cmap="gray", vmin=0, vmax=255)
        axes.set_axis_off()
        truth = str(samples.names[index])
        lines = [f"{truth}{' (new)' if is_new[index] else ''}"]
        for when, answers in zip(("before", "after"), said, strict=True):
            name, probability = answers[place]
            mark = "right" if name == truth else "wrong"
            lines.append(f"{when}: {mark}, {100 * probability:.0f}%" if name == truth else f"{when}: {name}")
        axes.set_title("\n".join(_short(line) for line in lines), fontsize=7, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _short(text: str, most: int = 34) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
