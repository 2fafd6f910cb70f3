"""Models on disk: they come back as they were, in another process too, and whatever is wrong with them is said."""

import builtins
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import BASE, LATER, NEW, exemplars, fixed_batch, logits, same, snapshot, untrained
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from branchout import api
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.model import checkpoint
from branchout.model.checkpoint import MANIFEST, Fusion, SavedModel, load, save
from branchout.model.classifier import Classifier

DIAL = {
    "kind": "dial",
    "settings": [[-1.5], [0.25], [2.0]],
    "figures": {name: [0.5, 0.6, 0.7] for name in ("all", "base", "novel", "overlap", "avg")},
    "images": 10,
    "balanced_by": "mean",
    "measured": "dev",
}
GRID = {**DIAL, "kind": "grid", "settings": [[0.2, 0.4], [0.0, 1.0], [1.0, 0.0]]}
NOTE = {"what": "made", "losses": [0.1, 0.2]}


def random_deltas(model: Classifier, step: int, seed: int) -> list[Tensor]:
    """One set of deltas for the model as it is after `step` steps."""
    generator = torch.Generator().manual_seed(seed)
    fused = model.rebuilt(model.steps[:step]).fused
    shapes = [(32 * len(read), len(names)) for read, names in zip(fused.sources, fused.space.branches, strict=True)]
    return [torch.randn(*shape, generator=generator) * 0.3 for shape in shapes]


def plain(*branches: tuple[str, ...], where: tuple[str, ...] = (), pooler: str = "max") -> SavedModel:
    model = untrained(*branches, where=where)
    fusions = tuple(Fusion(DIAL, [], point=n % 3, goal="all") for n in range(1, len(branches)))
    return SavedModel(model.rebuilt(model.steps, pooler), fusions, (NOTE,) * len(branches))


def with_deltas(kept: SavedModel, kind: str) -> SavedModel:
    fusions = []
    for number, fusion in enumerate(kept.fusions, 1):
        sets = [random_deltas(kept.classifier, number, 10 * number + point) for point in range(3)]
        fusions.append(
            replace(fusion, frontier=GRID if kind == "grid" else DIAL, deltas=sets if kind == "grid" else sets[:1])
        )
    return replace(kept, fusions=tuple(fusions))


def linear(bias: bool) -> SavedModel:
    model = untrained(BASE)
    torch.manual_seed(1)
    head = nn.Linear(32, len(BASE), bias=bias)
    return SavedModel(Classifier(model.arch, model.backbone, head, BASE, model.preprocessing, "photo"), (), (NOTE,))


KINDS: dict[str, Callable[[], SavedModel]] = {
    "base": lambda: plain(BASE),
    "linear head": lambda: linear(True),
    "linear head without bias": lambda: linear(False),
    "disjoint": lambda: plain(BASE, NEW),
    "overlapping": lambda: with_deltas(plain(BASE, (*NEW, BASE[3])), "dial"),
    "overlapping, averaged": lambda: with_deltas(plain(BASE, (*NEW, BASE[3]), pooler="average"), "dial"),
    "fc": lambda: plain(BASE, NEW, where=("fc",)),
    "conv2": lambda: plain(BASE, NEW, where=("layer4.0.conv2",)),
    "layer3": lambda: plain(BASE, NEW, where=("layer3",)),
    "two steps": lambda: with_deltas(plain(BASE, NEW, (*LATER, BASE[0]), where=("last", "layer4.0.conv2")), "dial"),
    "grid": lambda: with_deltas(plain(BASE, NEW), "grid"),
    "grid, two steps": lambda: with_deltas(plain(BASE, NEW, (*LATER, NEW[0]), where=("fc", "last")), "grid"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    kept = KINDS[kind]()
    save(kept, tmp_path / "m")
    back = load(tmp_path / "m")
    pictures = fixed_batch()
    for step in range(len(kept.classifier.steps) + 1):
        assert torch.equal(logits(back.model(step), pictures), logits(kept.model(step), pictures))
    assert back.classifier.space == kept.classifier.space
    assert back.classifier.kind == kept.classifier.kind
    assert back.classifier.preprocessing == kept.classifier.preprocessing
    assert back.history == kept.history
    assert [s.where for s in back.classifier.steps] == [s.where for s in kept.classifier.steps]
    for one, other in zip(back.fusions, kept.fusions, strict=True):
        assert (one.frontier, one.point, one.goal) == (other.frontier, other.point, other.goal)


def test_deltas_and_dial_matter_to_these_tests() -> None:
    pictures = fixed_batch()
    kept = KINDS["grid"]()
    answers = [logits(replace(kept, fusions=(replace(kept.fusions[0], point=p),)).model(), pictures) for p in range(3)]
    assert not torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[1], answers[2])
    bare = logits(kept.classifier.rebuilt(kept.classifier.steps), pictures)
    assert not torch.equal(bare, answers[0])


def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path: Path) -> None:
    save(KINDS["two steps"](), tmp_path / "a")
    save(load(tmp_path / "a"), tmp_path / "b")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    numbered = {f"{part}-{n}.safetensors" for part in ("step", "fusion") for n in (1, 2)}
    assert set(names) == {"README.md", MANIFEST, "base.safetensors"} | numbered
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


def test_half_precision_halves_the_files_and_rounds_the_weights(tmp_path: Path) -> None:
    kept = KINDS["two steps"]()
    save(kept, tmp_path / "whole")
    save(kept, tmp_path / "half", half=True)
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).glob("*.safetensors")) for n in ("whole", "half")]
    assert sizes[1] < 0.7 * sizes[0]
    found, wanted = logits(load(tmp_path / "half").model(), fixed_batch()), logits(kept.model(), fixed_batch())
    assert torch.allclose(found, wanted, atol=0.2)
    assert not torch.equal(found, wanted)


# Nothing is unpickled.


def test_no_pickle_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(KINDS["two steps"](), tmp_path / "m")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read")

    for module, names in ((pickle, ("load", "loads", "Unpickler", "_Unpickler")), (torch, ("load",)), (np, ("load",))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    model = api.load(tmp_path / "m")
    assert len(model.predict(np.zeros((32, 32, 1), np.uint8))) == 5


# What can be wrong.


def corrupted(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize("name", ["base.safetensors", "step-1.safetensors", "fusion-1.safetensors"])
@pytest.mark.parametrize(
    ("change", "words"),
    [(flipped, "changed or cut short"), (lambda data: data[:-100], "changed or cut short"), (None, "lacks")],
    ids=["tampered", "truncated", "missing"],
)
def test_files_that_are_not_what_was_written(
    name: str, change: Callable[[bytes], bytes] | None, words: str, tmp_path: Path
) -> None:
    save(KINDS["overlapping"](), tmp_path / "m")
    load(tmp_path / "m")
    if change is None:
        (tmp_path / "m" / name).unlink()
    else:
        corrupted(tmp_path / "m", name, change)
    with pytest.raises(BranchoutError, match=words) as caught:
        load(tmp_path / "m")
    assert name in str(caught.value)


def rewritten(folder: Path, **changes: object) -> None:
    about = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(about | changes))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: rewritten(f, format="branchout-9"), "format 'branchout-9', and this version reads 'branchout-1'"),
        (lambda f: corrupted(f, MANIFEST, lambda data: data[: len(data) // 2]), "cannot be read"),
        (lambda f: (f / MANIFEST).write_text("[1, 2]"), "cannot be read"),
        (lambda f: (f / MANIFEST).write_text("{}"), "cannot be read.*format"),
        (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe\x00"), "cannot be read"),
        (
            lambda f: (f / MANIFEST).unlink(),
            "is not a saved model: expected branchout.json in it, found README.md, base",
        ),
        (shutil.rmtree, "there is no model"),
        (lambda f: rewritten(f, steps=[]), "cannot be put together"),
        (lambda f: rewritten(f, classes=[list(BASE[:-1]), [*NEW, BASE[3]]]), "8 rows for 7 classes"),
        (lambda f: rewritten(f, steps=[{"where": "layer4.0.conv2"}]), "not those of a branch"),
        (lambda f: rewritten(f, arch={"family": "resnet", "name": "resnet18", "in_channels": 1}), "put together"),
        (lambda f: rewritten(f, preprocessing={"size": 32}), "cannot be put together"),
        (lambda f: rewritten(f, files=None), "cannot be read.*files"),
        (lambda f: (rewritten(f, files={}), (f / "base.safetensors").unlink()), "cannot be put together"),
    ],
)
def test_descriptions_that_are_wrong(spoil: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    save(KINDS["overlapping"](), tmp_path / "m")
    spoil(tmp_path / "m")
    with pytest.raises(BranchoutError, match=words):
        load(tmp_path / "m")


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("x")
    with pytest.raises(BranchoutError, match=r"a saved model is a folder that holds branchout\.json"):
        load(tmp_path / "m")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BranchoutError, match="found nothing"):
        load(tmp_path / "empty")


# Writing in one move.


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(BranchoutError, match="is there already"):
        save(KINDS["base"](), tmp_path / "m")
    assert list((tmp_path / "m").iterdir()) == []


@pytest.mark.parametrize("place", ["save_file", "model_card", "_write", "_flush", "_checksum"])
@pytest.mark.parametrize("blow", [KeyboardInterrupt, OSError(28, "No space left on device")], ids=["kill", "full"])
def test_a_kill_while_saving_leaves_nothing_under_the_name(
    place: str, blow: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = getattr(checkpoint, place), []

    def second_call_fails(*given: object) -> object:
        calls.append(given)
        if len(calls) == 2 or place == "model_card":
            raise blow
        return whole(*given)

    monkeypatch.setattr(checkpoint, place, second_call_fails)
    expected = BranchoutError if isinstance(blow, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save(KINDS["overlapping"](), tmp_path / "m")
    assert not (tmp_path / "m").exists()
    if expected is BranchoutError:
        assert list(tmp_path.iterdir()) == []  # an error is cleaned up after; a kill cannot be
    monkeypatch.undo()
    save(KINDS["overlapping"](), tmp_path / "m")
    load(tmp_path / "m")


@pytest.mark.parametrize("place", ["model_card", "_write", "_flush"])
def test_a_kill_while_tuning_leaves_a_model_that_loads(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(KINDS["disjoint"](), tmp_path / "m")
    model = api.load(tmp_path / "m")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, place, fail)
    with pytest.raises(KeyboardInterrupt):
        model.tune("novel")
    monkeypatch.undo()
    assert load(tmp_path / "m").fusions[0].point == 1


# What extending and tuning leave on disk.


def test_files_that_stay_the_same_are_shared(extended: api.Model, extended_twice: api.Model, base: api.Model) -> None:
    def inode(model: api.Model, name: str) -> int:
        assert model.folder is not None
        return (model.folder / name).stat().st_ino

    assert inode(extended, "base.safetensors") == inode(base, "base.safetensors")
    assert inode(extended_twice, "base.safetensors") == inode(base, "base.safetensors")
    assert inode(extended_twice, "step-1.safetensors") == inode(extended, "step-1.safetensors")


def test_where_links_cannot_be_made_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(KINDS["disjoint"](), tmp_path / "a")
    monkeypatch.setattr(checkpoint.os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    save(load(tmp_path / "a"), tmp_path / "b", source=tmp_path / "a")
    files = [tmp_path / folder / "base.safetensors" for folder in "ab"]
    assert files[0].stat().st_ino != files[1].stat().st_ino
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_model_after_each_step_is_the_model_there_was(
    base: api.Model, extended: api.Model, extended_twice: api.Model
) -> None:
    pictures = fixed_batch()
    loaded = load(extended_twice.folder)
    for kept in (extended_twice.saved, loaded):
        for step, earlier in enumerate((base, extended, extended_twice)):
            assert torch.equal(logits(kept.model(step), pictures), logits(earlier.saved.model(), pictures))
    assert torch.equal(logits(loaded.model(), pictures), logits(extended_twice.classifier, pictures))


ASK = """
import sys
import numpy as np
import torch
torch.set_num_threads(1)
from branchout import api
model = api.load(sys.argv[1])
for answer in model.predict(list(np.load(sys.argv[2])), top=99):
    print(repr(answer))
"""


def test_another_process_answers_alike(extended_twice: api.Model, val: Samples, tmp_path: Path) -> None:
    pictures = np.stack([val.read(n) for n in range(0, len(val), 3)])
    np.save(tmp_path / "p.npy", pictures)
    answers = "".join(f"{answer!r}\n" for answer in extended_twice.predict(list(pictures), top=99))
    command = [sys.executable, "-c", ASK, str(extended_twice.folder), str(tmp_path / "p.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    assert done.stdout == answers


def test_tuning_rewrites_the_description_alone(
    extended: api.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two points far apart: which points training reaches depends on how a processor rounds.
    accuracies = {
        "all": [0.5, 0.5],
        "base": [1.0, 0.0],
        "novel": [0.0, 1.0],
        "overlap": [None, None],
        "avg": [0.5, 0.5],
    }
    points = {**DIAL, "settings": [[-8.0], [8.0]], "figures": accuracies}
    fusion = replace(extended.saved.fusions[0], frontier=points, point=0, goal="base")
    folder = tmp_path / "m"
    checkpoint.save(replace(extended.saved, fusions=(fusion,)), folder)
    weights = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.safetensors")}
    model = api.load(folder)
    pictures = fixed_batch()
    before = logits(model.saved.model(), pictures)

    def unneeded(*_: object, **__: object) -> None:
        raise AssertionError("tuning needs no images")

    monkeypatch.setattr(api, "open_images", unneeded)
    monkeypatch.setattr(api, "decode", unneeded)
    for goal in ("base", "novel"):
        figures = model.tune(goal)
        assert figures[goal] == max(model.frontier.figures[goal])
        loaded = api.load(folder)
        fusion = loaded.saved.fusions[0]
        assert (fusion.goal, loaded.frontier.at(fusion.point)) == (goal, figures)
        assert torch.equal(logits(loaded.classifier, pictures), logits(model.classifier, pictures))
        assert f"`{goal}`" in (folder / "README.md").read_text(encoding="utf-8")
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.glob("*.safetensors")} == weights
    assert not torch.equal(logits(model.classifier, pictures), before)
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in extended.folder.iterdir())


def test_tuning_a_shared_model_leaves_its_parent_alone(
    base: api.Model, train: Samples, val: Samples, tmp_path: Path
) -> None:
    base_files = {path.name: path.read_bytes() for path in base.folder.iterdir()}
    grown = base.extend(train.of_classes(NEW), memory=exemplars(train), val=val.of_classes([*BASE, *NEW]), epochs=1)
    grown.save(tmp_path / "v2")
    grown.tune("base")
    assert {path.name: path.read_bytes() for path in base.folder.iterdir()} == base_files


def test_the_card_tells_what_the_model_is(extended_twice: api.Model) -> None:
    card = (extended_twice.folder / "README.md").read_text(encoding="utf-8")
    assert f"A classifier of {len(BASE) + len(NEW) + len(LATER)} classes" in card
    assert f"| base | {len(BASE)} | {len(BASE)} |" in card
    assert f"| step 2 | {len(LATER) + 2} | {len(LATER)} |" in card
    assert "## Operating point after step 2" in card


def test_nothing_executable_is_needed_to_look_inside(extended: api.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description is plain JSON, without NaN, which many readers refuse."""
    text = (extended.folder / MANIFEST).read_text(encoding="utf-8")
    monkeypatch.setattr(builtins, "eval", None)
    about = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert about["format"] == "branchout-1"
    assert about["classes"] == [list(BASE), list(NEW)]


def test_a_base_that_was_replaced_meanwhile_is_not_shared(base: api.Model, tmp_path: Path) -> None:
    """During a long extension somebody may save another model where the base was."""
    place = tmp_path / "base"
    checkpoint.save(base.saved, place)
    other = load_file(place / "base.safetensors")
    save_file({key: value + 1 for key, value in other.items()}, place / "base.safetensors")
    checkpoint.save(base.saved, tmp_path / "out", source=place)
    kept = checkpoint.load(tmp_path / "out")
    assert same(snapshot(kept.classifier), snapshot(base.saved.classifier))
    assert (tmp_path / "out/base.safetensors").stat().st_ino != (place / "base.safetensors").stat().st_ino


def test_what_a_killed_save_left_is_swept_away_but_not_what_others_are_writing(base: api.Model, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, living, other, far = (
        tmp_path / f".{name}.{process}@{host}.partial"
        for name, process, host in (
            ("out", ended.pid, checkpoint._host()),
            ("out", os.getppid(), checkpoint._host()),
            ("about", ended.pid, checkpoint._host()),
            ("out", ended.pid, "elsewhere"),
        )
    )
    for folder in (left, living, other, far):
        folder.mkdir()
    checkpoint.save(base.saved, tmp_path / "out")
    assert not left.exists()
    assert living.exists()
    assert other.exists()
    assert far.exists()
