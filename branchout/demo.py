"""The demo: 800 characters that a shipped model knows, extended by 40, five of them old ones in a new typeface."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from branchout import api
from branchout.data import memory
from branchout.data.datasets import Dataset
from branchout.data.draw_scenario import draw_scenario
from branchout.data.glyphs import glyphs
from branchout.data.samples import Samples, concatenate
from branchout.data.scenarios import Scenario
from branchout.errors import BranchoutError
from branchout.files import check_output, write_text
from branchout.method.config import ExtendConfig
from branchout.progress import OnProgress

BASE, NOVEL, OVERLAP, EXEMPLARS = 800, 40, 5, 10
TEST_IMAGES = 10
"""Of each new character in OUT/test; of a base character there is one."""
FOLDERS = ("test", "old", "photos")
"""Of images. Others may have folders of these names, so that they are replaced only beside the marker."""
MARKER = ".branchout-demo"
WRITTEN = {"v2", ".v2.work", "predictions.png", "report.html", MARKER}
"""What the demo writes besides, and so may replace."""
UNKNOWN = ("beamed eighth notes", "black telephone")
"""Characters that neither the base nor the demo knows."""


def run(
    out: Path, say: Callable[[str], None], on_progress: OnProgress, device: str | None = None
) -> tuple[api.Model, api.Prepared]:
    """Extend the shipped base; writes what WRITTEN and FOLDERS list into OUT."""
    check_output(out, folder=True)
    own = WRITTEN | set(FOLDERS) if (out / MARKER).is_file() else WRITTEN
    others = {path.name for path in out.iterdir()} - own if out.exists() else set()
    if others:
        raise BranchoutError(f"{out} holds other files ({', '.join(sorted(others)[:3])}). Choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / MARKER, "")
    for name in ("v2", *FOLDERS):  # not the work folder of v2: an interrupted demo resumes
        if (out / name).exists():
            shutil.rmtree(out / name)
    data = glyphs()
    plan = draw_scenario("overlap-style", data, base=BASE, novel=NOVEL, overlap=OVERLAP)
    base = api.load("glyphs", device=device)
    train = plan.train(data)
    old = memory.keep(train.select(train.origin == 0), per_class=EXEMPLARS)
    new = train.select(train.origin == 1)
    say(
        f"Base: {len(base.classes)} characters. New: {len(new.classes)} characters in {len(new):,} images, {OVERLAP} "
        f"of them base characters in serif typefaces. Memory: {EXEMPLARS} images of each base character."
    )
    # Fewer epochs and cached views than the default: characters are learned quickly, and a demo should be short.
    config = ExtendConfig(epochs=12, views=2)
    val = concatenate([plan.dev(data), plan.test(data)])
    prepared = base.prepare(new, memory=old, val=val, config=config)
    model = base.extend_prepared(prepared, out=out / "v2", on_progress=on_progress)
    drawing = out / "predictions.png"
    draw_predictions(base, model, plan.test(data), plan.branches[1], drawing)
    say(f"Some predictions before and after: {drawing}")
    page = model.report(prepared.split.test, out=out / "report.html")
    say(f"The report, class by class, for a browser: {page}")
    write_folders(data, plan, old, out)
    say(f"Images to try it with: {out / 'test'}; ten photos of two characters that it does not know: {out / 'photos'}")
    return model, prepared


def write_folders(data: Dataset, plan: Scenario, old: Samples, out: Path) -> None:
    """Images for `serve`: OUT/test and OUT/old with one folder per class, and OUT/photos for an inbox."""
    test = plan.test(data)
    for name in test.classes:
        _write(test, name, TEST_IMAGES if name in plan.branches[1] else 1, out / "test" / name)
    for name in old.classes:
        _write(old, name, 2, out / "old" / name)
    for number, name in enumerate(UNKNOWN):
        _write(data.val, name, 5, out / "photos", first=5 * number + 1)


def _write(samples: Samples, name: str, count: int, folder: Path, first: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(np.flatnonzero(samples.names == name)[:count], first):
        Image.fromarray(samples.read(int(row))[:, :, 0]).save(folder / f"{number}.png")


def draw_predictions(
    before: api.Model, after: api.Model, samples: Samples, new_classes: tuple[str, ...], path: Path, count: int = 18
) -> None:
    """Some test images with the predictions of the old and the new model."""
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
