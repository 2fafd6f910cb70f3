"""What `import branchout` offers: load, pretrain, and a model that predicts, extends, tunes and evaluates."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from branchout import __version__
from branchout.data.decode import decode
from branchout.data.folders import images_in, scan
from branchout.data.images import open_images
from branchout.data.preprocess import Preprocessing
from branchout.data.problems import Problems
from branchout.data.samples import ArrayPixels, Samples, digest
from branchout.errors import BranchoutError
from branchout.evaluate.compare import Comparison, compare, logits
from branchout.evaluate.explain import Album, Explanation, explain
from branchout.files import cache_folder, write_json
from branchout.method import frontier as frontiers
from branchout.method.extend import DataSplit, ExtendConfig, Extension, apply_fusion, divide
from branchout.method.features import extract, weights_digest
from branchout.method.frontier import Frontier
from branchout.method.recipes import recipe_named
from branchout.model import architectures, bases, checkpoint, hub
from branchout.model.checkpoint import SavedModel, is_saved_model
from branchout.model.classifier import Classifier
from branchout.model.staged import branch_point
from branchout.report import page as reports
from branchout.report.data import gather
from branchout.report.rows import rows_in
from branchout.training.loop import Report, best_device, silent
from branchout.training.optimisation import Optimisation, settings_dict
from branchout.training.pretrain import pretrain as train_base
from branchout.training.pretrain import schedule_for
from branchout.training.progress_file import recorded

if TYPE_CHECKING:
    from branchout.export import Exported

Pictures = str | Path | np.ndarray
Answer = list[tuple[str, float]]
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin")


def load(base: str | Path, *, arch: str | None = None, classes: Sequence[str] | None = None) -> Model:
    """Open a model: a saved one (a folder), `glyphs` (built in), a timm name, or a checkpoint file with `arch`.

    `hf-hub:owner/name` is a saved one that somebody pushed to the Hugging Face hub.
    """
    if hub.is_hub_name(base):
        return Model(checkpoint.load(hub.fetch(str(base))), None)  # no folder of ours: the hub's cache stays as it is
    path = Path(base)
    if is_saved_model(path):
        return Model(checkpoint.load(path), path)
    if str(base) == "glyphs":
        with as_file(files("branchout") / "assets" / "glyphs-base") as folder:
            return Model(checkpoint.load(folder), folder)
    if path.suffix in WEIGHTS and path.is_file():
        if arch is None:
            raise BranchoutError(f"{path} holds weights, but not of what; name the timm network: --arch resnet18")
        return _opened(bases.open_timm(arch, checkpoint=path, classes=classes), str(base))
    if path.exists() or "/" in str(base):
        checkpoint.load(path)  # says what a saved model is and what was found instead
    return _opened(bases.open_timm(str(base), classes=classes), str(base))


def _opened(base: bases.OpenedBase, name: str) -> Model:
    classifier = Classifier(base.arch, base.backbone, base.head, base.classes, base.preprocessing)
    return Model(SavedModel(classifier, (), ({"what": "opened", "base": name, "version": __version__},)), None)


def pretrain(
    train: Samples,
    *,
    arch: str = "resnet10",
    width: int | None = None,
    size: int = 64,
    kind: str = "photo",
    optimisation: Optimisation | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    device: torch.device | None = None,
    report: Report = silent,
) -> Model:
    """Train a base model from scratch: one of our ResNets, or a small vision transformer, with a cosine head."""
    device = device or best_device()
    architectures.check(arch, size, width)
    optimisation = optimisation or schedule_for(arch)
    channels = 1 if kind == "glyph" else 3
    preprocessing = Preprocessing(size, channels, (0.5,) * channels, (0.25,) * channels)
    start = time.perf_counter()
    model = train_base(
        open_images(train, preprocessing, device, cache=cache_folder()),
        train.labels,
        train.classes,
        preprocessing,
        arch=arch,
        width=width,
        kind=kind,
        optimisation=optimisation,
        seed=seed,
        device=device,
        checkpoint=checkpoint,
        report=report,
    )
    event = {
        "what": "pretrain",
        "when": _now(),
        "images": len(train),
        "seed": seed,
        **settings_dict(optimisation),
        "seconds": round(time.perf_counter() - start, 1),
        "version": __version__,
    }
    return Model(SavedModel(model.cpu(), (), (event,)), None)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def samples_in(source: str | Path | Samples, report: list[str] | None = None, known: Sequence[str] = ()) -> Samples:
    """Samples as they are, or all usable images of a folder of class folders; `known` are the model's classes."""
    if isinstance(source, Samples):
        return source
    found, problems = scan(Path(source), known=known)
    if report is not None and len(problems):
        report += _told(source, problems)
    return found


def some_of(files: Sequence[Path], most: int = 256) -> list[Path]:
    """All files, or of very many some at even distances."""
    return [files[n * len(files) // min(most, len(files))] for n in range(min(most, len(files)))]


def _told(source: str | Path, problems: Problems) -> list[str]:
    return [f"{source}: {line}" for line in problems.summary()]


class Model:
    """A classifier that can be asked, extended and tuned."""

    def __init__(self, kept: SavedModel, folder: Path | None, device: torch.device | None = None) -> None:
        self.saved = kept
        self.folder = folder
        self.device = device or best_device()
        self.classifier = kept.model().placed(self.device)

    @property
    def classes(self) -> tuple[str, ...]:
        names: tuple[str, ...] = self.classifier.space.classes
        return names

    @property
    def frontier(self) -> Frontier:
        """What the dial, or the grid, can reach after the last step."""
        if not self.saved.fusions:
            raise BranchoutError("a base model has no operating points; extend it first")
        return Frontier.from_dict(self.saved.fusions[-1].frontier)

    def save(self, out: str | Path, *, half: bool = False) -> Model:
        checkpoint.save(self.saved, Path(out), source=self.folder, half=half)
        self.folder = Path(out)
        return self

    def note(self, **facts: Any) -> Model:
        """Add facts to the last entry of the model's history."""
        *earlier, last = self.saved.history
        self.saved = replace(self.saved, history=(*earlier, {**last, **facts}))
        return self

    # Asking.

    def predict(self, pictures: Pictures | Iterable[Pictures], *, top: int = 5, flip: bool = False) -> Any:
        """The most probable classes of a picture, as (name, probability); a list of such lists for several.

        A picture is a file, or an array (height × width × channels, uint8).
        """
        if isinstance(pictures, str | Path | np.ndarray):
            return self.predict([pictures], top=top, flip=flip)[0]
        if flip and self.classifier.kind == "glyph":
            raise BranchoutError("a mirrored character is another character: --flip is for photographs")
        prepare = self.classifier.preprocessing.prepare
        answers: list[Answer] = []
        batch: list[torch.Tensor] = []
        everything = list(pictures)
        for number, picture in enumerate(everything, 1):
            pixels = picture if isinstance(picture, np.ndarray) else decode(Path(picture))
            batch.append(prepare(pixels))
            if len(batch) == 64 or number == len(everything):
                answers += self._answer(torch.stack(batch), top, flip)
                batch = []
        return answers

    def _answer(self, pixels: torch.Tensor, top: int, flip: bool) -> list[Answer]:
        images = self.classifier.preprocessing.normalise(pixels.to(self.device))
        probabilities = logits(self.classifier, images, flip).softmax(1)
        best = probabilities.topk(min(top, len(self.classes)), dim=1)
        return [
            [(self.classes[c], p) for p, c in zip(values, indices, strict=True)]
            for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    def explain(
        self,
        pictures: Pictures | Iterable[Pictures],
        *,
        top: int = 3,
        memory: str | Path | Samples | None = None,
        nearest: int = 5,
        report: Report = silent,
    ) -> Any:
        """Why a picture gets its answer, as an `Explanation`; a list of them for several pictures.

        With `memory`, labelled images, it also names those that look most alike to the branch that won.
        """
        if isinstance(pictures, str | Path | np.ndarray):
            return self.explain([pictures], top=top, memory=memory, nearest=nearest, report=report)[0]
        album = None
        if memory is not None:
            samples = samples_in(memory)
            images = open_images(samples, self.classifier.preprocessing, self.device, cache=cache_folder())
            seen = extract(self.classifier, images, device=self.device, work="read the memory", report=report)[0]
            album = Album(seen, samples.ids.tolist(), samples.names.tolist(), nearest)
        steps = len(self.classifier.steps)
        before = self.saved.model(steps - 1).to(self.device) if steps else None
        prepare, normalise = self.classifier.preprocessing.prepare, self.classifier.preprocessing.normalise
        found: list[Explanation] = []
        for picture in pictures:
            pixels = picture if isinstance(picture, np.ndarray) else decode(Path(picture))
            image = normalise(prepare(pixels)[None].to(self.device))
            found.append(explain(self.classifier, before, image, top=top, album=album))
        return found

    def features(self, samples: Samples, *, report: Report = silent) -> np.ndarray:
        """The base's penultimate features of every sample: one row each."""
        images = open_images(samples, self.classifier.preprocessing, self.device, cache=cache_folder())
        found: np.ndarray = extract(self.classifier, images, device=self.device, report=report)[0, :, 0].cpu().numpy()
        return found

    # Choosing an operating point.

    def tune(self, goal: str) -> dict[str, float | None]:
        """Move to the best point for a goal, at once and without images; saved if the model lies in a folder.

        Returns the point's accuracies on the images it was chosen with.
        """
        point = self.frontier.choose(goal)
        *earlier, last = self.saved.fusions
        self.saved = replace(self.saved, fusions=(*earlier, replace(last, point=point, goal=goal)))
        apply_fusion(self.classifier, self.saved.fusions[-1])
        if self.folder is not None:
            checkpoint.rewrite(self.saved, self.folder)
        return self.frontier.at(point)

    # Measuring.

    def evaluate(self, test: str | Path | Samples, *, flip: bool = False, report: Report = silent) -> Comparison:
        """Before → after on labelled images of known classes."""
        samples = samples_in(test)
        strangers = sorted(set(samples.classes) - set(self.classes))
        if strangers:
            raise BranchoutError(
                f"these classes are not the model's: {', '.join(strangers[:5])}; it knows {len(self.classes):,} classes"
            )
        if flip and self.classifier.kind == "glyph":
            raise BranchoutError("a mirrored character is another character: --flip is for photographs")
        images = open_images(samples, self.classifier.preprocessing, self.device, cache=cache_folder())
        labels = self.classifier.space.index(samples.classes)[samples.labels]
        steps = len(self.classifier.steps)
        before = self.saved.model(steps - 1).to(self.device) if steps else None
        return compare(self.classifier, before, images, labels, flip=flip, report=report)

    def two_fold(self, comparison: Comparison, goal: str = "balanced", seed: int = 0) -> frontiers.Scored:
        """Choose b on one half of the images and measure on the other; swap; average."""
        if self.frontier.kind == "grid":
            raise BranchoutError("two-fold scores are for models with a dial; this one chooses among trained points")
        order = np.random.default_rng(seed).permutation(len(comparison.labels))
        order = order[np.argsort(comparison.labels[order], kind="stable")]
        halves = [(comparison.columns[order[s::2]], comparison.labels[order[s::2]]) for s in (0, 1)]
        pooler = self.classifier.fused.pooler.kind
        return frontiers.score_dial(halves[0], halves[1], comparison.space, [goal], pooler)[goal]

    # Sharing.

    def export(
        self, out: str | Path, *, flip: bool = False, verify: str | Path | Iterable[Pictures] | None = None
    ) -> Exported:
        """Write the model as one ONNX file, after checking that it answers as the model does.

        It is checked with pictures that come with the installation, or with those of `verify`: a folder, or pictures.
        """
        from branchout.export import built_in_pictures, export_onnx

        if verify is None:
            pictures: Iterable[np.ndarray] = built_in_pictures(self.classifier.kind)
        else:
            chosen = some_of(images_in(Path(verify))) if isinstance(verify, str | Path) else verify
            pictures = (picture if isinstance(picture, np.ndarray) else decode(Path(picture)) for picture in chosen)
        return export_onnx(self.saved, Path(out), pictures, flip=flip)

    def push(self, name: str, *, private: bool = False) -> str:
        """Push the saved folder to the Hugging Face hub, as it is; `name` is owner/name. Returns the page's address."""
        if self.folder is None:
            raise BranchoutError("only a saved model can be pushed; save it first: model.save('v2/')")
        return hub.push(self.folder, name, private=private)

    # Telling.

    def facts(
        self,
        test: str | Path | Samples | None = None,
        *,
        results: str | Path | None = None,
        gallery: int = 60,
        typed: str | None = None,
        report: Report = silent,
    ) -> dict[str, Any]:
        """All that a report shows, as plain data: see `branchout.report.data`.

        `results` is a folder of rows measured with other methods; `typed` is how commands on the page name the model.
        """
        rows = None if results is None else rows_in(Path(results), self.classifier.space)
        return gather(
            self.saved,
            None if test is None else samples_in(test),
            path=typed or str(self.folder or "MODEL"),
            made=_now()[:10],
            folder=self.folder,
            rows=rows,
            gallery=gallery,
            device=self.device,
            cache=cache_folder(),
            report=report,
        )

    def report(
        self, test: str | Path | Samples | None = None, *, out: str | Path | None = None, **options: Any
    ) -> Path:
        """Write one HTML file that tells what was added, gained and lost; options are those of `facts`.

        By default it lies beside the model's folder: v2/ → v2-report.html.
        """
        if out is None and self.folder is None:
            raise BranchoutError("this model is not saved, so its report needs a name: out='report.html'")
        page = reports.check_report(reports.beside(self.folder) if out is None else Path(out))  # type: ignore[arg-type]
        reports.write(reports.render(self.facts(test, **options)), page)
        return page

    # Growing.

    def material(
        self,
        new: str | Path | Samples,
        memory: str | Path | Samples | None = None,
        val: str | Path | Samples | None = None,
        *,
        seed: int = 0,
        problems: list[str] | None = None,
    ) -> DataSplit:
        """The images of an extension, divided into what trains, what chooses and what reports."""
        return divide(
            self.saved.classifier,
            samples_in(new, problems, self.classes),
            None if memory is None else samples_in(memory, problems, self.classes),
            None if val is None else samples_in(val, problems, self.classes),
            seed,
        )

    def steps_without_memory(self, memory: str | Path | Samples | None) -> int:
        """How many classes that earlier steps taught have no image in `memory`."""
        taught = {name for step in self.classifier.steps for name in step.names}
        return len(taught - set(() if memory is None else samples_in(memory).classes))

    def extend(
        self,
        new: str | Path | Samples,
        *,
        memory: str | Path | Samples | None = None,
        val: str | Path | Samples | None = None,
        out: str | Path | None = None,
        pooler: str | None = None,
        report: Report = silent,
        **options: Any,
    ) -> Model:
        """Learn the classes of `new`; options are those of `ExtendConfig` (recipe, branch, goal, …).

        With `out` the model is saved there, and a run that was stopped goes on when it is called again.
        """
        request = ExtendConfig(**options)
        Frontier.check_goal(request.goal)  # a typo is answered before anything is trained
        recipe_named(request.recipe)
        out = None if out is None else Path(out)
        if out is not None and out.exists():
            raise BranchoutError(f"{out} is there already; choose another --out, or remove it first")
        base = self.classifier
        branch_point(base.backbone, request.branch)
        if pooler not in (None, base.fused.pooler.kind):
            if base.steps:
                raise BranchoutError(f"this model pools with {base.fused.pooler.kind!r}; that is set by its first step")
            base = base.rebuilt((), pooler)
        material = self.material(new, memory, val, seed=request.seed)
        work = None if out is None else claim(out, self._identity(material, request, base.fused.pooler.kind))
        with recorded(work, report) as told:
            extension = Extension(
                base, material, request, device=self.device, work=work, cache=cache_folder(), report=told
            )
            outcome = extension.run()
        event = {
            "what": "extend",
            "when": _now(),
            **asdict(request),
            "images": len(material.new),
            "exemplars kept": 0 if material.memory is None else len(material.memory),
            "chosen on": material.measured,
            "measured": outcome.measured,
            "losses": [round(loss, 5) for loss in outcome.losses],
            "seconds": {key: round(value, 2) for key, value in outcome.seconds.items()},
            "version": __version__,
        }
        grown = SavedModel(
            outcome.model.rebuilt(outcome.model.steps).to(self.device),
            (*self.saved.fusions, outcome.fusion),
            (*self.saved.history, event),
        )
        if out is not None:
            checkpoint.save(grown, out, source=self.folder)
            shutil.rmtree(work_folder(out), ignore_errors=True)
        return Model(grown, out, self.device)

    def _identity(self, material: DataSplit, request: ExtendConfig, pooler: str) -> dict[str, Any]:
        """All that decides what is trained, for telling whether a stopped run may go on; its goal may still change."""
        memory = material.memory
        settings = asdict(request)
        del settings["goal"]
        return {
            **settings,
            "pooler": pooler,
            "base": weights_digest(self.classifier.backbone, self.classifier.branches, self.classifier.fused.heads),
            "new images": material.new.fingerprint(),
            "memory": "none" if memory is None else memory.fingerprint(),
            "validation": digest(material.dev.fingerprint(), material.test.fingerprint()),
        }


def work_folder(out: Path) -> Path:
    """Where a running extension keeps its checkpoints."""
    return out.with_name(f".{out.name}.work")


def claim(out: Path, identity: dict[str, Any]) -> Path:
    """The work folder of a run, new or left by one that was stopped; one of another run is refused."""
    work = work_folder(out)
    note = work / "request.json"
    if note.exists():
        before = json.loads(note.read_text(encoding="utf-8"))
        differing = [
            f"{key}: {before.get(key)} then, {identity.get(key)} now"
            for key in {**before, **identity}
            if before.get(key) != identity.get(key)
        ]
        if differing:
            raise BranchoutError(
                f"a run into {out} was stopped and is not the same as this one:\n  "
                + "\n  ".join(differing)
                + f"\nGo on with the same settings, choose another --out, or remove {work}"
            )
    write_json(note, identity)
    return work


def as_samples(images: np.ndarray, names: Sequence[str]) -> Samples:
    """Samples from arrays: images (number × height × width × channels, uint8) and their class names."""
    if len(images) != len(names):
        raise BranchoutError(f"{len(images)} images were given with {len(names)} names; each needs one")
    return Samples.build(ArrayPixels(images), names, [f"{name}/{n}" for n, name in enumerate(names)])
