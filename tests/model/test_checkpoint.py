"""Models on disk: they are loaded as they were saved, in another process too, and damaged ones are refused."""

import builtins
import json
import math
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

from branchout import api, files
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.model import card, checkpoint
from branchout.model.checkpoint import SavedModel, StepPoints, load, save
from branchout.model.classifier import Classifier
from branchout.model.manifest import MANIFEST

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
    shapes = [
        (model.backbone.features * len(read), len(names))
        for read, names in zip(fused.delta_inputs, fused.space.branches, strict=True)
    ]
    return [torch.randn(*shape, generator=generator) * 0.3 for shape in shapes]


def plain(*branches: tuple[str, ...], where: tuple[str, ...] = (), pooler: str = "max") -> SavedModel:
    model = untrained(*branches, where=where)
    step_points = tuple(StepPoints(DIAL, [], point=n % 3, goal="all") for n in range(1, len(branches)))
    return SavedModel(model.rebuilt(model.steps, pooler), step_points, (NOTE,) * len(branches))


def with_deltas(kept: SavedModel, kind: str) -> SavedModel:
    step_points = []
    for number, points in enumerate(kept.step_points, 1):
        sets = [random_deltas(kept.classifier, number, 10 * number + point) for point in range(3)]
        step_points.append(
            replace(points, frontier=GRID if kind == "grid" else DIAL, deltas=sets if kind == "grid" else sets[:1])
        )
    return replace(kept, step_points=tuple(step_points))


def linear(bias: bool) -> SavedModel:
    model = untrained(BASE)
    torch.manual_seed(1)
    head = nn.Linear(model.backbone.features, len(BASE), bias=bias)
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
    for one, other in zip(back.step_points, kept.step_points, strict=True):
        assert (one.frontier, one.point, one.goal) == (other.frontier, other.point, other.goal)


def test_deltas_and_dial_matter_to_these_tests() -> None:
    pictures = fixed_batch()
    kept = KINDS["grid"]()
    answers = [
        logits(replace(kept, step_points=(replace(kept.step_points[0], point=p),)).model(), pictures) for p in range(3)
    ]
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


def steps_with_deltas(count: int, kind: str) -> list[SavedModel]:
    """A model after each of its steps, made as `extend` makes it: every step has deltas."""
    classes = (*NEW, *LATER)
    whole = with_deltas(plain(BASE, *((name,) for name in classes[:count])), kind)
    model = whole.classifier
    found = [SavedModel(model.rebuilt(()), (), (NOTE,))]
    for step, points in enumerate(whole.step_points, 1):
        found.append(found[-1].extended(model.rebuilt(model.steps[:step]), points, NOTE))
    return found


@pytest.mark.parametrize("kind", ["dial", "grid"])
def test_a_step_keeps_the_deltas_of_the_last_two_steps(kind: str, tmp_path: Path) -> None:
    steps = steps_with_deltas(4, kind)
    save(steps[4], tmp_path / "m")
    assert {path.name for path in (tmp_path / "m").glob("fusion-*")} == {f"fusion-{n}.safetensors" for n in (3, 4)}
    back = load(tmp_path / "m")
    pictures = fixed_batch()
    for step in (0, 3, 4):
        assert torch.equal(logits(back.model(step), pictures), logits(steps[step].model(), pictures))
    for step in (1, 2):
        with pytest.raises(BranchoutError, match=f"after step {step} is not kept"):
            back.model(step)
    for point in range(3):  # every goal can still be chosen
        one, other = (replace(each.step_points[3], point=point) for each in (back, steps[4]))
        assert all(torch.equal(*pair) for pair in zip(one.chosen_deltas(), other.chosen_deltas(), strict=True))
    assert [points.frontier for points in back.step_points] == [points.frontier for points in steps[4].step_points]
    assert "## Operating point after step 1" in (tmp_path / "m" / "README.md").read_text(encoding="utf-8")


def test_models_that_kept_every_fusion_are_read_and_extended(tmp_path: Path) -> None:
    """As earlier versions saved them."""
    whole = with_deltas(plain(BASE, *((name,) for name in (*NEW, *LATER)[:3])), "grid")
    save(whole, tmp_path / "m")
    assert len(list((tmp_path / "m").glob("fusion-*"))) == 3
    back = load(tmp_path / "m")
    assert torch.equal(logits(back.model(1), fixed_batch()), logits(whole.model(1), fixed_batch()))
    grown = back.extended(back.classifier, whole.step_points[2], NOTE)
    assert [len(points.deltas) for points in grown.step_points] == [0, 0, 1, 3]


def test_many_small_steps_take_little_more_than_their_branches_and_heads(tmp_path: Path) -> None:
    model = steps_with_deltas(6, "dial")[-1]
    save(model, tmp_path / "m")
    counts = model.model().parameter_counts()
    needed = 4 * sum(count for part, count in counts.items() if part != "deltas")
    assert sum(path.stat().st_size for path in (tmp_path / "m").iterdir()) < 2 * needed


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


def vouch(folder: Path, name: str) -> None:
    """Make the manifest list a file's checksum as it is now, as a stranger who edits a model would."""
    about = json.loads((folder / MANIFEST).read_text())
    about["files"][name] = files.checksum(folder / name)
    (folder / MANIFEST).write_text(json.dumps(about))


def corrupted(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize("name", ["base.safetensors", "step-1.safetensors", "fusion-1.safetensors"])
@pytest.mark.parametrize(
    ("change", "words"),
    [(flipped, "changed or truncated"), (lambda data: data[:-100], "changed or truncated"), (None, "lacks")],
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
    assert str(tmp_path / "m") in str(caught.value)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "link", "dangling"])
def test_only_regular_files_of_the_folder_are_read(kind: str, tmp_path: Path) -> None:
    save(KINDS["disjoint"](), tmp_path / "m")
    path = tmp_path / "m" / "step-1.safetensors"
    path.rename(tmp_path / "elsewhere")
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
        case "dangling":
            path.symlink_to(tmp_path / "nothing")
    with pytest.raises(BranchoutError, match=r"step-1\.safetensors"):
        load(tmp_path / "m")


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    kept = KINDS["disjoint"]()
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshots" / "1f2e"
    save(kept, folder)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    assert torch.equal(logits(load(folder).model(), fixed_batch()), logits(kept.model(), fixed_batch()))


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("x")
    with pytest.raises(BranchoutError, match=r"a folder that contains branchout\.json"):
        load(tmp_path / "m")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BranchoutError, match="found nothing"):
        load(tmp_path / "empty")


# Numbers that are not finite.


def with_value(saved: SavedModel, value: float, part: str) -> SavedModel:
    """A model with one bad number in its base, in a branch, in a head or in its deltas."""
    model = saved.classifier
    tensor = {
        "base": lambda: model.backbone.get_submodule("layer1")[0].conv1.weight,
        "branch": lambda: next(model.steps[0].branch.own_parameters()),
        "head": lambda: model.steps[0].head.weight,
        "deltas": lambda: saved.step_points[0].deltas[0][1],
    }[part]()
    tensor.data.view(-1)[3] = value
    return saved


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("part", ["base", "branch", "head", "deltas"])
def test_weights_that_are_not_finite_are_not_saved(part: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(BranchoutError, match="finite"):
        save(with_value(KINDS["overlapping"](), value, part), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_weights_whose_features_overflow_are_not_saved(tmp_path: Path) -> None:
    saved = KINDS["base"]()
    for module in saved.classifier.backbone.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data.mul_(1e13)
    with pytest.raises(BranchoutError, match="not finite"):
        save(saved, tmp_path / "m")


def test_weights_too_large_for_half_precision_are_not_saved_in_it(tmp_path: Path) -> None:
    saved = KINDS["base"]()
    saved.classifier.backbone.get_submodule("stem").bn1.running_var[0] = 1e6
    with pytest.raises(BranchoutError, match="half precision"):
        save(saved, tmp_path / "m", half=True)
    save(saved, tmp_path / "m")
    load(tmp_path / "m")


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", ["base.safetensors", "step-1.safetensors", "fusion-1.safetensors"])
def test_weights_that_are_not_finite_are_not_opened(name: str, value: float, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save(KINDS["overlapping"](), folder)
    tensors = load_file(folder / name)
    next(value for value in tensors.values() if value.ndim == 2).view(-1)[0] = value
    save_file(tensors, folder / name)
    vouch(folder, name)
    with pytest.raises(BranchoutError, match=f"in {name} has values .*finite"):
        load(folder)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda saved: replace(saved, history=({"what": "made", "losses": [math.nan]},)),
        lambda saved: replace(saved, step_points=(replace(saved.step_points[0], offsets=(math.inf,)),)),
        lambda saved: replace(
            saved, step_points=(replace(saved.step_points[0], frontier={**DIAL, "settings": [[math.nan]]}),)
        ),
        lambda saved: replace(saved, step_points=(replace(saved.step_points[0], point=3),)),
    ],
    ids=["losses", "shifts", "settings", "point"],
)
def test_a_manifest_that_could_not_be_read_back_is_not_saved(
    spoil: Callable[[SavedModel], SavedModel], tmp_path: Path
) -> None:
    with pytest.raises(BranchoutError):
        save(spoil(KINDS["disjoint"]()), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


# Atomic writing.


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(BranchoutError, match="already exists"):
        save(KINDS["base"](), tmp_path / "m")
    assert list((tmp_path / "m").iterdir()) == []


PLACES = {
    "save_file": checkpoint,
    "model_card": card,
    "write_text": files,
    "flush": files,
    "checksum": files,
    "copy_file": files,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("blow", [KeyboardInterrupt, OSError(28, "No space left on device")], ids=["kill", "full"])
def test_a_kill_while_saving_leaves_nothing_under_the_name(
    place: str, blow: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = getattr(PLACES[place], place), []
    source = None
    if place == "copy_file":
        source = tmp_path / "source"
        save(KINDS["overlapping"](), source)

    def second_call_fails(*given: object) -> object:
        calls.append(given)
        if len(calls) == 2 or place == "model_card":
            raise blow
        return whole(*given)

    monkeypatch.setattr(PLACES[place], place, second_call_fails)
    expected = BranchoutError if isinstance(blow, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save(KINDS["overlapping"](), tmp_path / "m", source=source)
    assert list(tmp_path.iterdir()) == ([] if source is None else [source])
    monkeypatch.undo()
    save(KINDS["overlapping"](), tmp_path / "m")
    load(tmp_path / "m")


@pytest.mark.parametrize("place", ["model_card", "write_text", "flush"])
def test_a_kill_while_tuning_leaves_a_model_that_loads(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(KINDS["disjoint"](), tmp_path / "m")
    model = api.load(tmp_path / "m")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PLACES[place], place, fail)
    with pytest.raises(KeyboardInterrupt):
        model.tune("novel")
    monkeypatch.undo()
    assert load(tmp_path / "m").step_points[0].point == 1


# What extending and tuning leave on disk.


def test_files_that_stay_the_same_are_copied_and_never_linked(
    extended: api.Model, extended_twice: api.Model, base: api.Model
) -> None:
    pairs = [(extended, base, "base"), (extended_twice, base, "base"), (extended_twice, extended, "step-1")]
    for later, earlier, name in pairs:
        one, other = (model.folder / f"{name}.safetensors" for model in (later, earlier))
        assert one.read_bytes() == other.read_bytes()
        assert one.stat().st_nlink == other.stat().st_nlink == 1


def test_a_file_that_is_damaged_is_still_found_after_tuning(tmp_path: Path) -> None:
    """Tuning carries checksums over; computing them again would make the damaged file a valid one."""
    save(KINDS["disjoint"](), tmp_path / "m")
    model = api.load(tmp_path / "m")
    corrupted(tmp_path / "m", "step-1.safetensors", flipped)
    model.tune("novel")
    assert json.loads((tmp_path / "m" / MANIFEST).read_text())["fusions"][0]["goal"] == "novel"
    with pytest.raises(BranchoutError, match=r"step-1\.safetensors was changed"):
        load(tmp_path / "m")


@pytest.mark.parametrize("kind", KINDS)
def test_the_card_counts_parameters_without_torch_as_the_model_does(kind: str, tmp_path: Path) -> None:
    saved = KINDS[kind]()
    save(saved, tmp_path / "m")
    manifest = json.loads((tmp_path / "m" / MANIFEST).read_text())
    assert card.parameter_counts(manifest, tmp_path / "m") == saved.model().parameter_counts()


def test_tuning_does_not_describe_another_model_that_took_the_folder(tmp_path: Path) -> None:
    save(KINDS["disjoint"](), tmp_path / "m")
    model = api.load(tmp_path / "m")
    shutil.rmtree(tmp_path / "m")
    save(KINDS["overlapping"](), tmp_path / "m")
    before = (tmp_path / "m" / MANIFEST).read_bytes()
    with pytest.raises(BranchoutError, match="another model"):
        model.tune("novel")
    assert (tmp_path / "m" / MANIFEST).read_bytes() == before


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
from branchout import api, files
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
    frontier = {**DIAL, "settings": [[-8.0], [8.0]], "figures": accuracies}
    points = replace(extended.saved.step_points[0], frontier=frontier, point=0, goal="base")
    folder = tmp_path / "m"
    *before, event = extended.saved.history
    history = (*before, {**event, "measured": None})  # which names points of the frontier before
    checkpoint.save(replace(extended.saved, step_points=(points,), history=history), folder)
    weights = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.safetensors")}
    model = api.load(folder)
    pictures = fixed_batch()
    before = logits(model.saved.model(), pictures)

    def unneeded(*_: object, **__: object) -> None:
        raise AssertionError("tuning needs no images")

    monkeypatch.setattr(api.predictor, "open_images", unneeded)
    monkeypatch.setattr(api.predictor, "decode_picture", unneeded)
    for goal in ("base", "novel"):
        figures = model.tune(goal)
        assert figures[goal] == max(model.frontier.accuracies[goal])
        loaded = api.load(folder)
        points = loaded.saved.step_points[0]
        assert (points.goal, loaded.frontier.at(points.point)) == (goal, figures)
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
    left = files.partial_path(tmp_path / "out")
    mine = str(os.getpid())
    of_process = {name: left.with_name(left.name.replace(mine, name)) for name in (str(ended.pid), str(os.getppid()))}
    far = left.with_name(f".out.0.{ended.pid}@elsewhere.partial")
    for folder in (*of_process.values(), far):
        folder.mkdir()
    checkpoint.save(base.saved, tmp_path / "out")
    assert not of_process[str(ended.pid)].exists()
    assert of_process[str(os.getppid())].exists()
    assert far.exists()
