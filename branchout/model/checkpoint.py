"""A model on disk: a folder of safetensors and JSON that can be moved, shared and checked.

    branchout.json        labels, architecture, preprocessing, history, frontiers, operating points, checksums
    base.safetensors      the base network and its head, never changed by any step
    step-1.safetensors    what step 1 added: its branch and its head
    fusion-1.safetensors  the deltas between all branches after step 1, if any were learned
    README.md             the model card

A folder gets its name only when it is complete. Extending adds files; those that stay the same are shared with the
model they came from where the file system allows. Nothing is ever unpickled.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError
from branchout.model.bases import rebuild
from branchout.model.card import model_card
from branchout.model.classifier import Classifier, Step
from branchout.model.heads import CosineHead, Head
from branchout.model.staged import Branch, branch_point

FORMAT = "branchout-1"
MANIFEST = "branchout.json"
Deltas = list[Tensor | None]


@dataclass(frozen=True)
class Fusion:
    """How the branches speak together after one step: what can be reached, and what was picked."""

    frontier: Mapping[str, Any]
    """A train.frontier.Frontier as plain data."""
    deltas: Sequence[Deltas]
    """For a dial one set of deltas, or none; for a grid one set for every point of the frontier."""
    point: int
    goal: str
    shifts: tuple[float, ...] = ()
    """What each step's branch is moved by whatever the dial says; empty for a dial that is all there is."""

    def offsets(self, steps: int) -> list[float]:
        """What is added to each step's logits: the dial's b at the chosen point, and the step's own shift."""
        b = float(self.frontier["settings"][self.point][0]) if self.frontier["kind"] == "dial" else 0.0
        return [b + shift for shift in self.shifts or (0.0,) * steps]

    def chosen_deltas(self) -> Deltas | None:
        if not self.deltas:
            return None
        return self.deltas[0 if self.frontier["kind"] == "dial" else self.point]


@dataclass(frozen=True)
class SavedModel:
    """All that a saved model holds."""

    classifier: Classifier
    fusions: tuple[Fusion, ...] = ()
    """One for each step."""
    history: tuple[Mapping[str, Any], ...] = ()
    """What made the base, then what made each step."""

    def model(self, step: int | None = None) -> Classifier:
        """The classifier as it was after `step` steps (by default the last), at its operating point."""
        step = len(self.classifier.steps) if step is None else step
        model = self.classifier.rebuilt(self.classifier.steps[:step])
        if step:
            fusion = self.fusions[step - 1]
            deltas = fusion.chosen_deltas()
            if deltas is not None:
                model.fused.deltas = list(deltas)
            model.fused.set_bias(fusion.offsets(step))
        return model


def save(saved: SavedModel, out: Path, *, source: Path | None = None, half: bool = False) -> None:
    """Write the folder in one move. `source` is the model it was extended from, whose files are shared.

    `half` stores weights in half precision, for models that should be small.
    """
    if out.exists():
        raise BranchoutError(f"{out} is there already; choose another --out, or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    partial = out.with_name(f".{out.name}.{os.getpid()}@{_host()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        for name, tensors in _files(saved):
            old = source / name if source else None
            if old is not None and not half and _holds(old, tensors):
                _share(old, partial / name)
            else:
                save_file({key: _storable(value, half) for key, value in tensors.items()}, partial / name)
                (partial / name).chmod(0o644)  # safetensors keeps files to their owner; models are for sharing
                _flush(partial / name)
        _describe(saved, partial)
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise BranchoutError(f"the model could not be written to {out}: {error}") from None


def _sweep(out: Path) -> None:
    """Remove what saves that were killed left beside `out`; what living processes or other machines write stays."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.*@{_host()}.partial"):
        owner = left.name.removesuffix(f"@{_host()}.partial").split(".")[-1]
        if owner.isdigit() and not _lives(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _host() -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in platform.node()) or "here"


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's, and lives
        return True
    return True


def _holds(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a file still holds these weights: during a long extension somebody may have put another in its place."""
    try:
        with safe_open(path, "pt") as file:
            if set(file.keys()) != set(tensors):
                return False
            return all(torch.equal(file.get_tensor(key).to(value), value) for key, value in tensors.items())
    except (OSError, SafetensorError):
        return False


def rewrite(saved: SavedModel, folder: Path) -> None:
    """Replace the description of a model whose weights stay as they are: a new operating point."""
    _describe(saved, folder)


def load(folder: Path) -> SavedModel:
    """Read a model back, after checking that every file is what was written."""
    manifest = _manifest(folder)
    for name, checksum in manifest["files"].items():
        if not (folder / name).exists():
            raise BranchoutError(f"{folder} lacks {name}, which {MANIFEST} lists; copy the whole folder again")
        if _checksum(folder / name) != checksum:
            raise BranchoutError(f"{folder / name} is not the file that was written: it was changed or cut short")
    try:
        return _assemble(folder, manifest)
    except (OSError, KeyError, IndexError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise BranchoutError(
            f"{folder} cannot be put together ({error!r}); its {MANIFEST} and weights disagree"
        ) from error


def weight_bytes(saved: SavedModel) -> int:
    """What the weights of a model take on disk, in full precision."""
    return sum(each.numel() * each.element_size() for _, tensors in _files(saved) for each in tensors.values())


def is_saved_model(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise BranchoutError(f"there is no model {folder}; a saved model is a folder that holds {MANIFEST}")
    if not is_saved_model(folder):
        inside = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise BranchoutError(f"{folder} is not a saved model: expected {MANIFEST} in it, found {inside}")
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        written = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise BranchoutError(f"{folder / MANIFEST} cannot be read: {error!r}") from None
    if written != FORMAT:
        raise BranchoutError(f"{folder} is of format {written!r}, and this version reads {FORMAT!r}; update Branchout")
    if not isinstance(manifest.get("files"), dict):
        raise BranchoutError(f"{folder / MANIFEST} cannot be read: it does not list the model's files")
    return manifest


# Writing.


def _files(saved: SavedModel) -> list[tuple[str, dict[str, Tensor]]]:
    model = saved.classifier
    base = {f"backbone/{key}": value for key, value in model.backbone.state_dict().items()}
    base |= {f"head/{key}": value for key, value in model.base_head.state_dict().items()}
    files = [("base.safetensors", base)]
    for number, (step, fusion) in enumerate(zip(model.steps, saved.fusions, strict=True), 1):
        tensors = {f"branch/{key}": value for key, value in step.branch.own_state_dict().items()}
        tensors |= {f"head/{key}": value for key, value in step.head.state_dict().items()}
        files.append((f"step-{number}.safetensors", tensors))
        deltas = {
            f"{point}/{branch}": delta
            for point, each in enumerate(fusion.deltas)
            for branch, delta in enumerate(each)
            if delta is not None
        }
        if deltas:
            files.append((f"fusion-{number}.safetensors", deltas))
    return files


def _describe(saved: SavedModel, folder: Path) -> None:
    """The manifest and the model card; the manifest last, since it vouches for the rest."""
    model = saved.classifier
    manifest = {
        "format": FORMAT,
        "arch": model.arch,
        "head": "cosine" if isinstance(model.base_head, CosineHead) else "linear",
        "kind": model.kind,
        "preprocessing": model.preprocessing.to_dict(),
        "pooler": model.fused.pooler.kind,
        "classes": [list(names) for names in model.space.branches],
        "steps": [{"where": step.where} for step in model.steps],
        "fusions": [
            {
                "frontier": fusion.frontier,
                "point": fusion.point,
                "goal": fusion.goal,
                "deltas": len(fusion.deltas),
                "shifts": list(fusion.shifts),
            }
            for fusion in saved.fusions
        ],
        "history": list(saved.history),
        "files": {name: _checksum(folder / name) for name, _ in _files(saved)},
    }
    _write(folder / "README.md", model_card(manifest, saved.model().parameter_counts()))
    _write(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    _flush(partial)
    partial.replace(path)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _share(old: Path, new: Path) -> None:
    try:
        os.link(old.resolve(), new)  # the file itself, not a link to it
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(old, new)


def _storable(tensor: Tensor, half: bool) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.half() if half and tensor.is_floating_point() else tensor


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Reading.


def _assemble(folder: Path, manifest: Mapping[str, Any]) -> SavedModel:
    backbone, _ = rebuild(manifest["arch"])
    base = _read(folder / "base.safetensors")
    backbone.load_state_dict(_part(base, "backbone"))
    steps: list[Step] = []
    fusions: list[Fusion] = []
    described = zip(manifest["steps"], manifest["fusions"], manifest["classes"][1:], strict=True)
    for number, (about, fused, names) in enumerate(described, 1):
        tensors = _read(folder / f"step-{number}.safetensors")
        point = branch_point(backbone, about["where"])
        branch = Branch.clone(backbone, point)
        branch.load_own(_part(tensors, "branch"))
        steps.append(
            Step(tuple(names), about["where"], point.start, branch, _head(manifest["head"], _part(tensors, "head")))
        )
        deltas: list[Deltas] = []
        if fused["deltas"]:
            stored = _read(folder / f"fusion-{number}.safetensors")
            deltas = [[stored.get(f"{p}/{d}") for d in range(number + 1)] for p in range(fused["deltas"])]
        fusions.append(Fusion(fused["frontier"], deltas, fused["point"], fused["goal"], tuple(fused["shifts"])))
    classifier = Classifier(
        manifest["arch"],
        backbone,
        _head(manifest["head"], _part(base, "head")),
        manifest["classes"][0],
        Preprocessing.from_dict(manifest["preprocessing"]),
        manifest["kind"],
        steps,
        manifest["pooler"],
    )
    return SavedModel(classifier, tuple(fusions), tuple(manifest["history"]))


def _read(path: Path) -> dict[str, Tensor]:
    return {key: value.float() if value.is_floating_point() else value for key, value in load_file(path).items()}


def _part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{part}/"): value for key, value in tensors.items() if key.startswith(f"{part}/")}


def _head(kind: str, tensors: Mapping[str, Tensor]) -> Head:
    classes, features = tensors["weight"].shape
    head: Head = CosineHead(features, classes) if kind == "cosine" else nn.Linear(features, classes, "bias" in tensors)
    with torch.no_grad():
        head.load_state_dict(dict(tensors))
    return head
