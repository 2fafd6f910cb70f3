"""A whole extension against joint training of all classes from scratch, both alone on the device.

Random images of the size and number of Tiny-ImageNet: 180 old and 20 new classes of 500 images, ten exemplars of each
old class. Both start from arrays of pixels. Joint training is measured for some of its 40 epochs; the others are added
at the median time of an epoch.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial

import numpy as np

from benchmarks.speed.common import Rows, Settings, compared
from branchout import api
from branchout.data.samples import ArrayPixels, Samples
from branchout.training.device import wait_for
from branchout.training.loop import Event
from branchout.training.pretrain import FAST

OLD, NEW, EXEMPLARS = 180, 20, 10


def samples(classes: range, each: int, size: int) -> Samples:
    rng = np.random.default_rng(classes.start)
    coarse = rng.integers(0, 256, (len(classes) * each, size // 8, size // 8, 3), dtype=np.uint8)
    names = np.repeat([f"class {n:03}" for n in classes], each)
    ids = [f"{classes.start}-{n}" for n in range(len(names))]
    return Samples.build(ArrayPixels(coarse.repeat(8, axis=1).repeat(8, axis=2)), names, ids)


def rows(settings: Settings) -> Rows:
    each, size, measured = (500, 64, 8) if settings.gpu else (20, 32, 2)
    old, new = (settings.pick(OLD, 6), settings.pick(NEW, 2)) if settings.gpu else (OLD // 3, NEW // 2)
    epochs = None if settings.gpu else 4
    if settings.tiny:
        old, new, each = 6, 2, 16
    images = {
        name: samples(range(*span), each, size)
        for name, span in {"joint": (0, old + new), "base": (0, old), "new": (old, old + new)}.items()
    }
    memory = samples(range(old), EXEMPLARS, size)
    times: list[float] = []

    def on_progress(event: Event) -> None:
        if "loss" in event.figures:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as cache:
        os.environ["BRANCHOUT_CACHE"] = cache  # nothing is decoded or computed before
        train = partial(
            api.pretrain, arch="resnet10", width=settings.width, size=size, kind="photo", device=settings.device
        )
        base = train(images["base"], epochs=1)
        base.extend(images["new"].select(np.arange(0, len(images["new"]), 4)), memory=memory, epochs=1)  # warms up
        start = time.perf_counter()
        extended = base.extend(images["new"], memory=memory, seed=1, epochs=epochs)
        wait_for(settings.device)
        ours = time.perf_counter() - start
        start = time.perf_counter()
        train(images["joint"], epochs=measured, on_progress=on_progress)
        wait_for(settings.device)
        whole = time.perf_counter() - start
    epoch = float(np.median(np.diff(times[-measured:])))
    full = FAST.epochs if settings.gpu else round(FAST.epochs * (epochs or 30) / 30)
    joint = whole + (full - measured) * epoch
    assert extended.outcome is not None
    yield (
        f"extension-{settings.device.type}",
        compared(
            f"whole extension, {old}+{new} classes of {each} images, {size} px",
            "joint training from scratch",
            ours,
            joint,
            parts=extended.outcome.seconds,
            goal="1/12 on a GPU",
            settings={
                "exemplars": EXEMPLARS,
                "joint_epochs": full,
                "joint_epochs_measured": measured,
                "joint_epoch_seconds": epoch,
                "extension_epochs": epochs or 30,
                "width": settings.width,
            },
        ),
    )
