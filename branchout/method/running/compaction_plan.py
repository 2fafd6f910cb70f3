"""What a compaction will do, in words, before it starts: branches, images, epochs, time, size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from branchout.data.images import SMALL
from branchout.method.compact import Compaction
from branchout.method.distil import merged_steps
from branchout.method.running.forecast import described_validation
from branchout.method.running.measure_speed import measure_speeds
from branchout.method.running.speeds import Speeds
from branchout.model.checkpoint import SavedModel, weight_bytes
from branchout.progress import OnProgress
from branchout.training.checkpoints import epochs_done
from branchout.units import count, duration, size


def plan_lines(run: Compaction, saved: SavedModel, on_progress: OnProgress) -> Iterator[str]:
    """The plan of a compaction of `saved`, or what is left of it; a few seconds of measurement forecast its time."""
    speeds = measure_speeds(run.old, run.split, [run.where], run.device, run.engine, False, on_progress)
    done = epochs_done(run.checkpoint, run.epochs)
    resumed = f", of which {done:,} {'is' if done == 1 else 'are'} done" if done else ""
    seconds = duration(forecast_seconds(run, speeds, done)) + (" more" if done else "")
    yield (
        f"plan: distil {count(run.old.own_branches, 'step branch', 'step branches')} into {run.config.branches} in "
        f"{count(run.epochs, 'epoch')}{resumed}: about {seconds} (frozen part in {speeds.engine})"
    )
    without_labels = 0 if run.unlabelled is None else len(run.unlabelled)
    more = f" and {without_labels:,} without labels from --images" if without_labels else ""
    yield f"it learns from {count(len(run.learned) - without_labels, 'image')} of --memory{more}"
    yield f"validation: {described_validation(run.split, dial=True, ends_training=False)}"
    left_out = ["deltas"] if any(points.deltas for points in saved.step_points) else []
    left_out += ["class means"] if any(step.class_means is not None for step in run.old.steps) else []
    without = f" without {' and '.join(left_out)}" if left_out else ""
    before, after = bytes_before_and_after(run, saved)
    yield f"weights on disk{without}: {size(before)} → about {size(after)}"


def forecast_seconds(run: Compaction, speeds: Speeds, done: int = 0) -> float:
    """How long the frozen part and the distillation take after the epochs that are done.

    A CPU decodes large images again for every view. A run that resumes computes its cached views anew.
    """
    left = run.epochs - done
    if not left:
        return 0.0
    passes = run.views or left
    decoded = 1 if speeds.gpu or run.base.preprocessing.size <= SMALL else passes
    trained = left * run.config.branches * speeds.training[run.where]
    return len(run.learned) * (decoded * speeds.reading / speeds.cores + passes * speeds.frozen + trained)


def bytes_before_and_after(run: Compaction, saved: SavedModel) -> tuple[int, int]:
    """What the weights take on disk, without deltas and class means: it is not known before training whether the new
    model will have any."""
    without_means = [replace(step, class_means=None) for step in run.old.steps]
    bare = SavedModel(
        run.old.rebuilt(without_means), tuple(replace(points, deltas=[]) for points in saved.step_points), saved.history
    )
    steps = merged_steps(run.base, run.old.steps, run.groups, run.space, run.where)
    small = SavedModel(run.base.rebuilt(steps), bare.step_points[: len(steps)])
    return weight_bytes(bare), weight_bytes(small)
