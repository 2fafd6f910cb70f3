"""A model on disk: a folder of safetensors and JSON that can be moved, shared and checked.

    branchout.json        labels, architecture, preprocessing, history, frontiers, operating points, checksums
    base.safetensors      the base network and its head, never changed by any step
    step-1.safetensors    what step 1 added: its branch and head, and where it has them its correction of earlier logits
                          and the means of all new classes
    fusion-1.safetensors  the deltas between all branches after step 1, if any were trained; kept for the last step
                          (all operating points) and the one before it (the chosen point)
    README.md             the model card

A folder gets its name only when it is complete. Opening one runs no code from it, uses no network, and takes no memory
for weights before the manifest and the headers of all files agree.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from branchout import files
from branchout.errors import BranchoutError, explain_os_error
from branchout.model.bases import rebuild
from branchout.model.card import describe, with_point
from branchout.model.class_means import ClassMeans
from branchout.model.classifier import Classifier, Step
from branchout.model.heads import Correction, CosineHead, Head, delta_inputs
from branchout.model.manifest import (
    BASE_FILE,
    FORMAT,
    MANIFEST,
    Manifest,
    check_manifest,
    fusion_file,
    read_manifest,
    step_file,
)
from branchout.model.staged import Branch, branch_point
from branchout.model.weights import check_finite, check_shapes, read_shapes, read_tensors, shapes_only

Deltas = list[Tensor | None]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class StepPoints:
    """The operating points of the model after one step, their deltas, and the chosen point. In JSON: `fusions`."""

    frontier: Mapping[str, Any]
    """A `method.frontier.Frontier` as plain data."""
    deltas: Sequence[Deltas]
    """For a dial one set of deltas, or none; for a grid one set for every point of the frontier."""
    point: int
    goal: str
    offsets: tuple[float, ...] = ()
    """A constant for each step that is added to the dial's b; empty if all are zero."""
    dropped: bool = False
    """Whether it was chosen with deltas or class means that are no longer kept, because later steps have their own."""

    def biases(self, steps: int) -> list[float]:
        """What is added to each step's logits: the dial's b at the chosen point, and the step's own offset."""
        b = float(self.frontier["settings"][self.point][0]) if self.frontier["kind"] == "dial" else 0.0
        return [b + offset for offset in self.offsets or (0.0,) * steps]

    def chosen_deltas(self) -> Deltas | None:
        if not self.deltas:
            return None
        return self.deltas[self.point if len(self.deltas) > 1 else 0]


@dataclass(frozen=True)
class SavedModel:
    """Everything that a model folder holds."""

    classifier: Classifier
    step_points: tuple[StepPoints, ...] = ()
    """One for each step."""
    history: tuple[Mapping[str, Any], ...] = ()
    """How the base was made, then how each step was made."""

    def extended(self, classifier: Classifier, points: StepPoints, event: Mapping[str, Any]) -> SavedModel:
        """This model after one more step. Of earlier steps, deltas are kept for "before → after" only; of class means,
        `Classifier.extended` keeps as many."""
        kept = []
        for step, each in zip(self.classifier.steps[:-1], self.step_points[:-1], strict=True):
            had = bool(each.deltas) or step.class_means is not None
            kept.append(replace(each, deltas=[], dropped=each.dropped or had))
        for last in self.step_points[-1:]:
            chosen = last.chosen_deltas()
            kept.append(last if chosen is None else replace(last, deltas=[chosen]))
        return SavedModel(classifier, (*kept, points), (*self.history, event))

    def model(self, step: int | None = None) -> Classifier:
        """The classifier as it was after `step` steps (by default the last), at its operating point."""
        step = len(self.classifier.steps) if step is None else step
        model = self.classifier.rebuilt(self.classifier.steps[:step])
        if step:
            points = self.step_points[step - 1]
            if points.dropped:
                raise BranchoutError(
                    f"The model as it was after step {step} is not kept: a folder keeps its last two steps. Open the "
                    "folder that this step was saved in"
                )
            deltas = points.chosen_deltas()
            if deltas is not None:
                model.fused.deltas = list(deltas)
            model.fused.set_bias(points.biases(step))
        return model


def weight_bytes(saved: SavedModel) -> int:
    """What the weights of a model take on disk, in full precision."""
    return sum(each.numel() * each.element_size() for tensors in _tensors(saved).values() for each in tensors.values())


# Writing.


def save(saved: SavedModel, out: Path, *, source: Path | None = None, half: bool = False) -> None:
    """Write a model folder, atomically.

    `source` is the folder of the model it was extended from: files that stay the same are copied from there, without
    taking more space where the file system can share blocks. `half` stores weights in half precision.
    """
    if out.exists():
        raise BranchoutError(f"Output folder {out} already exists. Choose another --out or delete it.")
    manifest = _manifest_of(saved, out)  # checked before any work
    _check_output(saved.model())
    partial = files.partial_path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        files.sweep_partials(out.parent)
        partial.mkdir()
        for name, weights in _tensors(saved).items():
            tensors = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
            if half:
                tensors = {key: value.half() if value.is_floating_point() else value for key, value in tensors.items()}
            check_finite(tensors, name + (" (in half precision)" if half else ""))
            if source is not None and _holds(source / name, tensors):
                files.copy_file(source / name, partial / name)
            else:
                save_file(tensors, partial / name)
                (partial / name).chmod(0o644)  # safetensors makes files private to their owner
            files.flush(partial / name)
            manifest["files"][name] = files.checksum(partial / name)
        describe(manifest, partial)
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise BranchoutError(f"The model could not be written to {out}: {explain_os_error(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def rewrite(saved: SavedModel, folder: Path) -> None:
    """Replace the manifest of a model whose weights stay as they are: a new operating point.

    Checksums are carried over, so that a file that was damaged meanwhile is still detected.
    """
    manifest, content = read_manifest(folder)
    model = saved.classifier
    same = content["arch"] == model.arch and content["classes"] == [list(names) for names in model.space.branches]
    if not same or set(manifest.files) != set(_tensors(saved)):
        raise BranchoutError(f"{folder} now holds another model than the one that was opened. Open it again.")
    describe(with_point(content, saved.step_points[-1].point, saved.step_points[-1].goal), folder)


def _manifest_of(saved: SavedModel, folder: Path) -> dict[str, Any]:
    """The manifest as plain data, with checksums of 0. What could not be read back is an error."""
    model = saved.classifier
    manifest = {
        "format": FORMAT,
        "arch": model.arch,
        "head": "cosine" if isinstance(model.base_head, CosineHead) else "linear",
        "kind": model.kind,
        "preprocessing": asdict(model.preprocessing),
        "pooler": model.fused.pooler.kind,
        "classes": [list(names) for names in model.space.branches],
        "steps": [{"where": step.where} for step in model.steps],
        "fusions": [
            {
                "frontier": points.frontier,
                "point": points.point,
                "goal": points.goal,
                "deltas": len(points.deltas),
                "shifts": list(points.offsets),
                **({"dropped": True} if points.dropped else {}),
            }
            for points in saved.step_points
        ],
        "history": list(saved.history),
        "files": dict.fromkeys(_tensors(saved), "0" * 64),
    }
    try:
        plain: dict[str, Any] = json.loads(json.dumps(manifest, allow_nan=False))
    except ValueError as error:
        raise BranchoutError(
            f"The model was not saved: its description has a number that is not finite ({error})"
        ) from None
    check_manifest(plain, folder / MANIFEST)
    return plain


def _tensors(saved: SavedModel) -> dict[str, Tensors]:
    """The content of every weights file."""
    model = saved.classifier
    found = {BASE_FILE: _joined(backbone=model.backbone.state_dict(), head=model.base_head.state_dict())}
    for number, (step, points) in enumerate(zip(model.steps, saved.step_points, strict=True), 1):
        others = {"means": step.class_means, "correction": step.correction}
        found[step_file(number)] = _joined(
            branch=step.branch.own_state_dict(),
            head=step.head.state_dict(),
            **{part: module.state_dict() for part, module in others.items() if module is not None},
        )
        if points.deltas:
            found[fusion_file(number)] = {
                f"{point}/{branch}": delta
                for point, deltas in enumerate(points.deltas)
                for branch, delta in enumerate(deltas)
                if delta is not None
            }
    return found


@torch.no_grad()
def _check_output(model: Classifier) -> None:
    """Finite weights can still overflow: refuse a model whose features or logits of a test image are not finite."""
    sizes = model.preprocessing
    device = model.base_head.weight.device
    model = model.to(device)  # a model that was just assembled has its small buffers on the CPU
    ramp = torch.linspace(-2, 2, sizes.channels * sizes.size**2, device=device)
    features = model.features(model.backbone.arrange(ramp.view(1, sizes.channels, sizes.size, sizes.size)))
    if not all(values.isfinite().all() for values in (*features, model.fused(features))):
        raise BranchoutError(
            "The model was not saved: its logits of a test image are not finite. Its training probably diverged; "
            "train again with a lower learning rate"
        )


def _holds(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a file holds exactly these tensors; it may have been replaced while the model was being extended."""
    try:
        files.open_regular(path).close()
        with safe_open(path, "pt") as file:
            if set(file.keys()) != set(tensors):
                return False
            stored = ((file.get_tensor(key), value) for key, value in tensors.items())
            return all(found.dtype == value.dtype and torch.equal(found, value) for found, value in stored)
    except (OSError, SafetensorError):
        return False


# Reading.


def load(folder: Path) -> SavedModel:
    """Open a model folder, after checking its manifest, the headers and checksums of its files, and its weights."""
    manifest, content = read_manifest(folder)
    try:
        for name in manifest.files:
            _check_regular(folder, name)
        with shapes_only():  # do all tensors fit?
            _assemble(manifest, content, lambda name: read_shapes(folder / name))
        for name, expected in manifest.files.items():
            if files.checksum(folder / name) != expected:
                raise BranchoutError(f"{name} was changed or truncated after it was saved; its checksum differs")
        return _assemble(manifest, content, lambda name: read_tensors(folder / name))
    except Exception as error:  # a network can refuse a strange description in many ways
        reason = f"{MANIFEST} and its weights do not fit together ({error!r})"
        if isinstance(error, BranchoutError | OSError):
            reason = explain_os_error(error)
        raise BranchoutError(f"Cannot open the model in {folder}: {reason}") from error


def _check_regular(folder: Path, name: str) -> None:
    """A weights file is a file of this folder: no pipe or device, and no link to elsewhere on this machine.

    The Hugging Face cache keeps files in `blobs/` beside `snapshots/`, and links to them.
    """
    path = folder / name
    if not path.is_file():
        found = "it is not a regular file" if path.exists() or path.is_symlink() else "the folder lacks it"
        raise BranchoutError(f"{MANIFEST} lists {name}, but {found}. Copy the whole folder again")
    home = folder.resolve()
    allowed = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    if path.resolve().parent not in allowed:
        raise BranchoutError(f"{name} is a link to a file outside the folder. Copy the file itself into the folder")


def _assemble(manifest: Manifest, content: Mapping[str, Any], read: Callable[[str], Tensors]) -> SavedModel:
    """Build the model that the manifest describes, with the tensors that `read` gives for each file."""
    backbone, _ = rebuild(content["arch"])
    tensors = read(BASE_FILE)
    head = _new_head(manifest, 0, backbone.features, tensors)
    _fill(BASE_FILE, tensors, backbone=backbone, head=head)
    steps: list[Step] = []
    vectors = 1  # distinct feature vectors: the base's, and one for every branch that clones something
    for number, about in enumerate(manifest.steps, 1):
        tensors = read(step_file(number))
        point = branch_point(backbone, about.where)
        branch = Branch.clone(backbone, point)
        own_head = _new_head(manifest, number, backbone.features, tensors)
        modules: dict[str, nn.Module] = {"branch": branch, "head": own_head}
        vectors += point.start < len(backbone.names)
        means = None
        if "means/weight" in tensors:
            means = ClassMeans(sum(map(len, manifest.classes[1 : number + 1])), vectors * backbone.features)
            modules["means"] = means
        correction = None
        if "correction/weight" in tensors:
            correction = Correction(backbone.features, sum(map(len, manifest.classes[:number])))
            modules["correction"] = correction
        _fill(step_file(number), tensors, **modules)
        names = tuple(manifest.classes[number])
        steps.append(Step(names, about.where, point.start, branch, own_head, means, correction))
    classifier = Classifier(
        content["arch"],
        backbone,
        head,
        manifest.classes[0],
        manifest.preprocessing,
        manifest.kind,
        steps,
        manifest.pooler,
    )
    step_points: list[StepPoints] = []
    for number, fused in enumerate(manifest.fusions, 1):
        deltas = _read_deltas(classifier, number, fused.deltas, read) if fused.deltas else []
        plain = content["fusions"][number - 1]["frontier"]
        step_points.append(StepPoints(plain, deltas, fused.point, fused.goal, tuple(fused.shifts), fused.dropped))
    return SavedModel(classifier, tuple(step_points), tuple(content["history"]))


def _new_head(manifest: Manifest, branch: int, features: int, tensors: Tensors) -> Head:
    """An untrained head of the expected size; a linear one has a bias if the file holds one."""
    classes = len(manifest.classes[branch])
    if manifest.head == "cosine":
        return CosineHead(features, classes)
    return nn.Linear(features, classes, bias="head/bias" in tensors)


def _read_deltas(model: Classifier, step: int, sets: int, read: Callable[[str], Tensors]) -> list[Deltas]:
    """The deltas of one step: for each set a matrix (features of the other branches × classes) for each branch."""
    features = model.backbone.features
    rows = [features * len(others) for others in delta_inputs(model.fused.feature_of[: step + 1])]
    widths = [len(names) for names in model.space.branches[: step + 1]]
    shapes = {
        f"{point}/{branch}": torch.empty(shape, device="meta")
        for point in range(sets)
        for branch, shape in enumerate(zip(rows, widths, strict=True))
    }
    tensors = read(fusion_file(step))
    check_shapes(shapes, tensors, fusion_file(step))
    return [[tensors[f"{point}/{branch}"] for branch in range(step + 1)] for point in range(sets)]


def _joined(**parts: Mapping[str, Tensor]) -> Tensors:
    """The tensors of several parts in one dictionary: `head/weight`, …"""
    return {f"{part}/{key}": value for part, tensors in parts.items() for key, value in tensors.items()}


def _fill(name: str, tensors: Tensors, **modules: nn.Module) -> None:
    """Load the tensors of a file into the modules it was saved from; of a branch, its own tensors."""
    own = {
        part: module.own_state_dict() if isinstance(module, Branch) else module.state_dict()
        for part, module in modules.items()
    }
    check_shapes(_joined(**own), tensors, name)
    for part, module in modules.items():
        module.load_state_dict({key: tensors[f"{part}/{key}"] for key in own[part]}, strict=False)
