"""Where models come from: `load` opens one, `pretrain` trains one from scratch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

from branchout import __version__
from branchout.api.model import Model
from branchout.api.sources import Source, samples_in
from branchout.data.datasets import resolve
from branchout.data.images import open_images
from branchout.data.preprocess import Preprocessing
from branchout.data.samples import Samples
from branchout.data.scenarios import Scenario
from branchout.disk_cache import cache_folder
from branchout.errors import BranchoutError, whole_number
from branchout.method.running.prepared_extension import now
from branchout.model import architectures, bases, checkpoint, hub
from branchout.model.checkpoint import SavedModel
from branchout.model.manifest import is_saved_model
from branchout.progress import OnProgress, silent
from branchout.training import pretrain as pretraining
from branchout.training import processes
from branchout.training.device import Device, device_named
from branchout.training.optimisation import Optimisation, settings_dict
from branchout.training.progress_file import recorded
from branchout.training.work_folder import check_out, working_on


def load(
    base: str | Path,
    *,
    arch: str | None = None,
    head: str | Path | None = None,
    classes: Sequence[str] | Path | None = None,
    device: Device = None,
) -> Model:
    """Open a model: a saved one (a folder), `glyphs` (built in), or any base that `branchout bases` explains.

    A base is a timm name, `torchvision:NAME`, a Hugging Face folder, or a checkpoint file with its architecture
    `arch`. `head` is a file with `weight` and `bias` of a linear layer, for a backbone without classes; `classes` names
    its rows: a list, or a file with one name on each line. `hf-hub:owner/name` is a folder on the Hugging Face hub.
    """
    on_device = device_named(device)
    path = hub.fetch(str(base)) if hub.is_hub_name(base) else Path(base)
    if str(base) == "glyphs":
        with as_file(files("branchout") / "assets" / "glyphs-base") as folder:
            return Model(checkpoint.load(folder), folder, on_device)
    if is_saved_model(path):  # one from the hub is not in a folder of the user's own
        return Model(checkpoint.load(path), None if hub.is_hub_name(base) else path, on_device)
    if not path.is_dir() and path.suffix not in bases.WEIGHTS and (path.exists() or "/" in str(base)):
        checkpoint.load(path)  # raises: says what a saved model is and what was found instead
    classifier = bases.open_base(path, arch=arch, head=None if head is None else Path(head), classes=classes)
    event = {"what": "opened", "base": str(base), "version": __version__}
    return Model(SavedModel(classifier, (), (event,)), None, on_device)


def pretrain(
    data: Source,
    *,
    val: Source | None = None,
    scenario: str | Path | None = None,
    out: str | Path | None = None,
    arch: str = "resnet10",
    width: int | None = None,
    size: int | None = None,
    kind: str | None = None,
    schedule: str = "fast",
    epochs: int | None = None,
    optimisation: Optimisation | None = None,
    half: bool = False,
    classes_from: str | None = None,
    seed: int = 0,
    device: Device = None,
    on_progress: OnProgress = silent,
    warn: Callable[[str], None] = lambda _: None,
) -> Model:
    """Train a base model from scratch: one of our ResNets, or a small vision transformer, with a cosine head.

    `data` is a folder with one folder of images per class, a benchmark's folder, `glyphs`, or samples; with `scenario`,
    a file, only its base classes are used. Validation images are those of `val`, or of the dataset; they measure the
    accuracy. With `out` the model is saved there (in half precision with `half`), and a run that was stopped resumes
    when it is called again. `warn` is called with problems of files.
    """
    seed = whole_number("seed", seed, 0)
    architectures.check(arch, size, width)
    optimisation = optimisation or pretraining.schedule_for(arch, schedule)
    if epochs is not None:
        optimisation = replace(optimisation, epochs=whole_number("epochs", epochs, 1))
    out = check_out(out)
    on_device = device_named(device)
    train, test, kind_of_data = _base_images(data, val, scenario, warn, classes_from)
    kind = kind or kind_of_data
    preprocessing = Preprocessing.from_scratch(kind, size or (32 if kind == "glyph" else 64))
    settings = {"command": "pretrain", "arch": arch, "width": width, "size": preprocessing.size, "seed": seed,
                "optimisation": repr(optimisation), "images": train.fingerprint()}  # fmt: skip
    with working_on(out, settings) as work:
        start = time.perf_counter()
        with processes.first_on_machine():
            images = open_images(train, preprocessing, on_device, cache=cache_folder())
        with recorded(work, on_progress) as reported:
            trained = pretraining.pretrain(
                images,
                train.labels,
                train.classes,
                preprocessing,
                arch=arch,
                width=width,
                kind=kind,
                optimisation=optimisation,
                seed=seed,
                device=on_device,
                checkpoint=None if work is None else work / "pretrain.safetensors",
                on_progress=reported,
            )
        event = _event(train, seed, optimisation, time.perf_counter() - start)
        model = Model(SavedModel(trained.cpu(), (), (event,)), None, on_device)
        _validate(model, test, on_progress)
        return model if out is None else model.save(out, half=half)


def _event(train: Samples, seed: int, optimisation: Optimisation, seconds: float) -> dict[str, object]:
    """What the model's history keeps of its training."""
    return {"what": "pretrain", "when": now(), "images": len(train), "seed": seed, **settings_dict(optimisation),
            "seconds": round(seconds, 1), "version": __version__}  # fmt: skip


def _validate(model: Model, test: Samples | None, on_progress: OnProgress) -> None:
    """Measure a base model on validation images, if there are any, and keep the accuracy in its history."""
    test = None if test is None else test.of_classes(model.classes)
    if not test:
        return
    model.validation = model.evaluate(test, on_progress=on_progress)
    (event,) = model.saved.history
    accuracy = round(model.validation.after.all, 4)
    model.saved = replace(model.saved, history=({**event, "accuracy": accuracy},))


def _base_images(
    data: Source, val: Source | None, scenario: str | Path | None, warn: Callable[[str], None], classes_from: str | None
) -> tuple[Samples, Samples | None, str]:
    """Images to train with, images to validate with, and their kind."""
    if scenario is not None and isinstance(data, Samples):
        raise BranchoutError(
            "A scenario divides a dataset: give its folder or name instead of samples, or select the base classes "
            "yourself with samples.of_classes(names)"
        )
    if scenario is not None and val is not None:
        raise BranchoutError("A scenario has validation images of its own. Leave out val, or the scenario")
    problems: list[str] = []
    dataset = None if isinstance(data, Samples) else resolve(str(data), problems=problems, classes_from=classes_from)
    test = None if val is None else samples_in(val, problems, classes_from=classes_from)
    for line in problems:
        warn(line)
    if isinstance(data, Samples):
        return data, test, "photo"
    assert dataset is not None
    if scenario is None:
        return dataset.train, dataset.val if test is None else test, dataset.kind
    plan = Scenario.load(Path(scenario))
    placed = plan.train(dataset)
    return placed.select(placed.origin == 0), plan.test(dataset, step=0), dataset.kind
