"""What `Model.compact` does: read the images, run the compaction, and compare size, speed and accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from branchout import __version__
from branchout.api.predictor import Predictor
from branchout.data.samples import Samples
from branchout.disk_cache import cache_folder
from branchout.method.compact import CompactConfig, Compacted, Compaction, check_compaction
from branchout.method.distil import MOST_WITHIN, WITHIN
from branchout.method.features import weights_digest
from branchout.method.running.compaction_plan import plan_lines
from branchout.method.running.prepared_extension import now
from branchout.metrics import Accuracies
from branchout.model import checkpoint
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier
from branchout.progress import OnProgress
from branchout.training.progress_file import recorded
from branchout.training.work_folder import working_on

TIMED = 32
"""Images in a batch whose speed is measured."""
ROUNDS = 5


@dataclass(frozen=True)
class ModelStats:
    """The figures of a model before or after compaction."""

    branches: int
    parameters: int
    bytes: int
    """Of all weights on disk, in full precision."""
    images_per_second: float
    accuracies: Accuracies | None


@dataclass(frozen=True)
class CompactionOutcome:
    """A compaction: the new model, its figures and those of the old one, and warnings."""

    saved: SavedModel = field(repr=False)
    before: ModelStats
    after: ModelStats
    images: int
    """How many held-out images the accuracies were measured on."""
    warnings: tuple[str, ...]


def compact(
    model: Predictor,
    memory: Samples,
    config: CompactConfig,
    *,
    val: Samples | None = None,
    unlabelled: Samples | None = None,
    out: Path | None = None,
    on_progress: OnProgress,
    announce: Callable[[str], None] | None = None,
    warn: Callable[[str], None],
) -> CompactionOutcome:
    """Compact a model and save it as `out`, if given; a run that was stopped resumes.

    Before training starts, `warn` is called with what is wrong with the images, and `announce` with what will be done.
    """
    saved, device = model.saved, model.device
    warnings = check_compaction(saved, memory, config)
    settings = {
        "command": "compact",
        **asdict(config),
        "model": weights_digest(saved.model()),
        "memory": memory.fingerprint(),
        "validation": "none" if val is None else val.fingerprint(),
        "images": "none" if unlabelled is None else unlabelled.fingerprint(),
        "weights of the loss": f"{WITHIN}, {MOST_WITHIN}",
    }
    run = Compaction(
        saved,
        memory,
        config,
        val=val,
        unlabelled=unlabelled,
        device=device,
        cache=cache_folder(),
        on_progress=on_progress,
    )  # outside of the work folder: what is refused here has not begun
    for problem in (*warnings, *run.notices):
        warn(problem)
    with working_on(out, settings) as work:
        with recorded(work, on_progress) as reported:
            run.work, run.on_progress = work, reported
            if announce is not None:
                for line in plan_lines(run, saved, reported):
                    announce(line)
            made = run.run()
        small = SavedModel(made.model.rebuilt(made.model.steps).to(device), made.step_points)
        event = _event(saved, small, config, made, memory)
        earlier = [{**event, "measured": None, "before": None, "sizes": None}] * (config.branches - 1)
        small = replace(small, history=(*saved.history[:1], *earlier, event))
        if out is not None:
            checkpoint.save(small, out, source=model.folder)
    measured = made.measured
    before = _stats(saved, made.before, device)
    after = _stats(small, None if measured is None else measured.after, device)
    return CompactionOutcome(small, before, after, measured.images if measured else 0, (*warnings, *made.notices))


def _event(
    saved: SavedModel, small: SavedModel, config: CompactConfig, made: Compacted, memory: Samples
) -> dict[str, object]:
    """What the model's history keeps, in place of the steps that were merged.

    Where the goal could not be kept, the accuracies before are those of another goal and are left out.
    """
    same_goal = small.step_points[-1].goal == saved.step_points[-1].goal
    return {
        "what": "compact",
        "when": now(),
        **asdict(config),
        "epochs": len(made.losses),
        "engine": made.engine,
        "goal": small.step_points[-1].goal,
        "steps": len(saved.classifier.steps),
        "images": len(memory),
        "sizes": {"before": _sizes(saved), "after": _sizes(small)},
        "before": None if made.before is None or not same_goal else asdict(made.before),
        "measured": None if made.measured is None else made.measured.to_dict(),
        "losses": [round(loss, 5) for loss in made.losses],
        "seconds": round(made.seconds, 2),
        "version": __version__,
    }


def _stats(saved: SavedModel, found: Accuracies | None, device: torch.device) -> ModelStats:
    speed = images_per_second(saved.model().on_device(device), device)
    return ModelStats(**_sizes(saved), images_per_second=speed, accuracies=found)


def _sizes(saved: SavedModel) -> dict[str, int]:
    model = saved.model()
    return {
        "branches": model.own_branches,
        "parameters": sum(model.parameter_counts().values()),
        "bytes": checkpoint.weight_bytes(saved),
    }


@torch.no_grad()
def images_per_second(model: Classifier, device: torch.device) -> float:
    """Images classified in a second, in batches of 32, without decoding: the best of some rounds."""
    sizes = model.preprocessing
    images = model.backbone.arrange(torch.zeros(TIMED, sizes.channels, sizes.size, sizes.size, device=device))
    times = []
    for _ in range(1 + ROUNDS):  # the first one warms up
        start = time.perf_counter()
        model(images).argmax(1).tolist()  # waits for the device
        times.append(time.perf_counter() - start)
    return TIMED / min(times[1:])
