"""The commands about models, as a user types them: pretrain → check → extend → tune → predict → evaluate → again."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pytest
from helpers import Answer, refused, run, start, typed, well
from PIL import Image
from rich.console import Console
from safetensors import safe_open

from branchout import api
from branchout.cli.display import percent, progress
from branchout.data.glyphs import glyphs
from branchout.method.frontier import Frontier
from branchout.model.catalogue import listed_bases
from branchout.training.loop import Event

OLD = ("ampersand", "black heart suit", "digit eight", "digit three", "digit two", "greek capital letter omega",
       "latin capital letter m", "latin capital letter q", "latin capital letter r", "latin small letter a",
       "latin small letter k", "percent sign")  # fmt: skip
KNOWN = "digit two"
NEW = (KNOWN, "infinity", "number sign", "upwards arrow")
LATER = ("commercial at", "question mark")


class Place(NamedTuple):
    """Folders of pictures and two models, made once for all tests."""

    root: Path
    told: dict[str, str]

    def __truediv__(self, name: str) -> Path:
        return self.root / name

    def extend(self, out: str, *words: str | Path, new: str = "new", base: str = "base") -> Answer:
        return run("extend", self / new, "--base", self / base, "--out", self / out, *words)

    @property
    def kept(self) -> list[str | Path]:
        return ["--memory", self / "memory", "--val", self / "val"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("place")
    drawn = glyphs(30, 6, classes=[*OLD, *NEW[1:], *LATER])
    for folder, names, table, first, last in (
        ("old", OLD, drawn.train, 0, 16),
        ("memory", OLD, drawn.train, 16, 20),
        ("new", NEW, drawn.train, 20, 30),
        ("later", LATER, drawn.train, 20, 30),
        ("val", [*OLD, *NEW], drawn.val, 0, 6),
        ("latest", [*OLD, *NEW, *LATER], drawn.val, 0, 6),
    ):
        for name in dict.fromkeys(names):
            (root / folder / name).mkdir(parents=True)
            for number in np.flatnonzero(table.names == name)[first:last]:
                Image.fromarray(table.read(int(number))[:, :, 0]).save(root / folder / name / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRANCHOUT_CACHE", str(root / "cache"))
        patch.setenv("COLUMNS", "300")
        made = Place(root, {})
        made.told["pretrain"] = well(
            run("pretrain", root / "old", "--width", "8", "--epochs", "40", "--size", "32", "--out", root / "base")
        )
        made.told["extend"] = well(made.extend("v2", *made.kept, "--epochs", "2"))
        yield made


# pretrain


def test_pretrain_says_how_good_it_is_and_what_to_type_next(place: Place) -> None:
    told = place.told["pretrain"]
    assert "12 classes, " in told
    assert "% accuracy on 36 validation images" in told
    assert f"next:\n  branchout extend NEW/ --base {place / 'base'} --memory OLD/ --out v2/" in told
    assert api.load(place / "base").classes == OLD
    assert not (place / ".base.work").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arch", "resnet99"], ["no architecture is called 'resnet99'", "resnet10"]),
        (["--schedule", "slow"], ["no schedule is called 'slow'", "fast"]),
    ],
)
def test_pretrain_answers_a_typo_before_it_leaves_anything_behind(
    place: Place, words: list[str], said: list[str]
) -> None:
    refused(run("pretrain", place / "old", "--out", place / "typo", *words), *said)
    assert not list(place.root.glob(".typo*"))


def test_pretrain_does_not_write_over_a_model(place: Place) -> None:
    refused(run("pretrain", place / "old", "--out", place / "base"), "already exists")


# check


def test_check_says_what_extend_would_do_and_changes_nothing(place: Place) -> None:
    before = sorted(place.root.iterdir())
    told = well(run("check", place / "new", "--base", place / "base", *place.kept, "--branch", "layer3"))
    assert "base: 12 classes" in told
    assert "new: 4 classes, 40 images" in told
    assert f"known to the base too, so their logits will be pooled: {KNOWN}" in told
    assert "memory: 48 images of 12 old classes" in told
    assert "of --val: " in told
    assert "branch layer3: " in told
    assert f"--val {place / 'val'} --branch layer3 --out v2" in told
    with chdir(place.root):  # where v2 exists
        assert "--out v2" not in well(run("check", "new", "--base", "base", *place.kept))
    assert sorted(place.root.iterdir()) == before


def test_check_without_memory_says_what_cannot_be_measured(place: Place) -> None:
    told = well(run("check", place / "new", "--base", place / "base"))
    assert "memory: none" in told
    assert "base accuracy cannot be measured" in told


def test_check_counts_add_up_and_one_image_is_an_image(place: Place, tmp_path: Path) -> None:
    for name in OLD:
        (tmp_path / "memory" / name).mkdir(parents=True)
        file = next((place / "memory" / name).iterdir())
        shutil.copy(file, tmp_path / "memory" / name / file.name)
    (tmp_path / "new").mkdir()
    shutil.copytree(place / "later" / LATER[0], tmp_path / "new" / LATER[0])
    shutil.copy(file, tmp_path / "new" / LATER[0])
    told = well(run("check", tmp_path / "new", "--base", place / "base", "--memory", tmp_path / "memory"))
    total, train, held = map(int, re.findall(r"new: 1 class, (\d+) images: (\d+) to train on, (\d+) held out", told)[0])
    assert total == train + held == 11
    roles = re.findall(r"validation: (\d+) images? held out: (.*)", told)[0]
    assert int(roles[0]) == sum(map(int, re.findall(r"\d+", roles[1])))
    assert "1 image of new classes is in --memory as another class too" in told
    assert f"{LATER[0]}/{file.name} = {OLD[-1]}/{file.name}" in told


def test_check_notices_names_that_are_nearly_old_ones_and_brackets_survive(place: Place, tmp_path: Path) -> None:
    for name in ("Digit_Two", "[red] wheel"):
        (tmp_path / name).mkdir()
        for file in (place / "new" / NEW[1]).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes() + name.encode())
    (tmp_path / "[red] wheel" / "[bold]broken.png").write_bytes(b"no picture")
    told = well(run("check", tmp_path, "--base", place / "base"))
    assert "almost the name of an old class: Digit_Two / digit two" in told
    assert "[red] wheel/[bold]broken.png" in told
    said = well(run("extend", tmp_path, "--base", place / "base", "--epochs", "1", "--out", place / "almost"))
    assert "almost the name of an old class: Digit_Two / digit two" in said


@pytest.mark.parametrize(
    ("new", "base", "words"),
    [
        ("new", "base", ["memory", "val"]),  # a class is shared, so deltas are learned
        ("later", "v2", ["memory", "latest"]),  # earlier steps and their deltas are in the model too
        ("later", "base", ["memory"]),  # nothing is shared: no deltas
        ("later", "base", []),
    ],
)
def test_the_forecast_of_disk_counts_everything(
    place: Place, new: str, base: str, words: list[str], tmp_path: Path
) -> None:
    given = [word for pair in zip(("--memory", "--val"), words, strict=False) for word in (pair[0], place / pair[1])]
    told = well(run("check", place / new, "--base", place / base, *given))
    total, more = re.search(r"disk: about ([\d.]+) kB for the model, ([\d.]+) kB of it new", told).groups()
    well(run("extend", place / new, "--base", place / base, *given, "--epochs", "1", "--out", tmp_path / "out"))
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")}
    before = {file.name for file in (place / base).glob("*.safetensors")}
    assert float(total) * 1e3 == pytest.approx(sum(sizes.values()), rel=0.05)
    assert float(more) * 1e3 == pytest.approx(sum(n for name, n in sizes.items() if name not in before), rel=0.1)


def test_the_forecast_of_time_is_of_the_right_order(place: Place) -> None:
    began = time.monotonic()
    well(place.extend("timed", *place.kept))
    took = time.monotonic() - began

    def forecast() -> float:
        told = well(run("check", place / "new", "--base", place / "base", *place.kept))
        return float(told.split("time: about ")[1].split(" s")[0])

    # A busy machine may delay the short steps that are measured, but hardly twice.
    assert any(took / 10 <= forecast() + 1 <= took * 10 + 1 for _ in range(2))


# extend


def test_extend_ends_in_a_table_and_next_commands(place: Place) -> None:
    told = place.told["extend"]
    for word in ("balanced ◂", "base before → after", "novel", "overlap", "avg", "15 classes, "):
        assert word in told
    (counted,) = [re.findall(r"\d+", line) for line in told.splitlines() if line.startswith("│ images")]
    assert counted == ["45", "33", "9", "3"]  # all, base, novel, overlap
    for command in ("predict", "tune", "evaluate"):
        assert f"\n  branchout {command} {place / 'v2'} " in told
    assert "Training the new branch 2/2  loss " in told  # a line in a file, where a terminal has a bar
    assert "\x1b" not in told
    assert len(told.splitlines()) < 30
    model = api.load(place / "v2")
    assert set(model.classes) == {*OLD, *NEW}
    assert not (place / ".v2.work").exists()


def test_a_model_can_be_extended_again(place: Place) -> None:
    told = well(
        run("extend", place / "later", "--base", place / "v2", "--memory", place / "memory", "--val", place / "latest",
            "--epochs", "2", "--out", place / "v3")
    )  # fmt: skip
    assert "17 classes" in told
    model = api.load(place / "v3")
    alone = model.saved.history[-1]["measured"]["after"]["steps"]
    for number, share in enumerate(alone, 1):
        assert f"step {number} {percent(share)}% of " in told
    assert len(model.classifier.steps) == 2
    told = well(run("evaluate", place / "v3", place / "latest"))
    assert "before step 2" in told
    assert "before: the model before step 2, on the classes it knew" in told
    found = model.evaluate(place / "latest")
    rows = {line.split("│")[1].strip(): line.split("│")[3:5] for line in told.splitlines() if line.count("│") == 5}
    known = [cell.strip() for cell in rows["step 1"]]
    assert known == [percent(found.before.steps[0]), percent(found.after.steps[0])]
    assert [cell.strip() for cell in rows["step 2"]] == ["–", percent(found.after.steps[1])]
    assert rows["novel"][0].strip() == "–"  # before, only some of them were known


def test_images_of_old_classes_may_lie_in_several_folders(place: Place) -> None:
    """Those of the first step, too, without copying them."""
    both = ["--memory", place / "memory", "--memory", place / "new"]
    words = [place / "later", "--base", place / "v2", *both]
    told = well(run("check", *words, "--val", place / "latest"))
    assert f"memory: {48 + 40} images of 15 old classes" in told
    assert " ".join(str(word) for word in both) in told.split("branchout extend")[1]
    told = well(run("extend", *words, "--epochs", "1", "--out", place / "v3-both"))
    assert "added earlier" not in told


def test_each_folder_of_old_images_is_checked_and_named_once(place: Place, tmp_path: Path) -> None:
    words = ["extend", place / "later", "--base", place / "v2", "--out", place / "v3-wrong"]
    refused(run(*words, "--memory", place / "memory", "--memory", tmp_path / "typo"), str(tmp_path / "typo"))
    again = place / "new" / ".." / "memory"
    refused(run(*words, "--memory", place / "memory", "--memory", again), str(again), "the same folder")
    inside = ["--memory", place / "memory", "--memory", place / "new", "--out"]
    for out in ("new/fresh", "new/v2", "new"):
        told = run("extend", place / "later", "--base", place / "v2", *inside, place / out)
        refused(told, "lies in the folder of images", str(place / "fresh" if out == "new/fresh" else place.root))
        suggested = Path(told[2].split()[-1])
        assert suggested.parent == place.root
        assert not suggested.exists()
    assert not (place / "v3-wrong").exists()


def test_extending_again_without_images_of_what_a_step_taught_is_warned_of(place: Place) -> None:
    told = well(run("extend", place / "later", "--base", place / "v2", "--epochs", "1", "--out", place / "bare"))
    taught = len(api.load(place / "v2").classifier.steps[0].names)
    assert f"warning: --memory has no images for {taught} classes added earlier" in told
    assert NEW[1] in told.split("added earlier")[1].splitlines()[0]


def test_without_memory_it_says_that_the_base_could_not_be_measured(place: Place) -> None:
    told = well(place.extend("alone", "--epochs", "2"))
    assert "accuracy on old classes was not measured: 0 of" in told
    assert re.search(r"Accuracy on \d+ held-out images? of new classes: ", told)
    assert f"branchout evaluate {place / 'alone'} FOLDER/" in told
    assert "balanced ◂" not in told
    tuned = well(run("tune", place / "alone", "--goal", "avg"))
    assert "accuracy on old classes not measured; chosen with new images and pseudo-exemplars" in tuned
    assert "base " not in tuned.splitlines()[0]  # that of pseudo-exemplars would be read as one of images


def test_without_val_it_says_that_some_images_were_held_out(place: Place) -> None:
    told = well(place.extend("held", "--memory", place / "memory", "--epochs", "1", "--branch", "fc"))
    assert "A fifth of the images was held out" in told
    assert "--val FOLDER/: they then choose and measure" in told
    assert "branch of this step 0" in told  # nothing is cloned


@pytest.mark.parametrize("words", [["--recipe", "reference"], ["--branch", "layer4.0.conv2", "--pooler", "average"]])
def test_other_recipes_and_branches(place: Place, words: list[str], tmp_path: Path) -> None:
    told = well(run("extend", place / "new", "--base", place / "base", *place.kept, "--epochs", "1", *words,
                    "--out", tmp_path / "a model"))  # fmt: skip
    assert "balanced ◂" in told
    assert f"branchout predict '{tmp_path / 'a model'}' photo.jpg" in told  # can be pasted as it is
    if "average" in words:
        again = ["extend", place / "later", "--base", tmp_path / "a model", "--out", tmp_path / "b", "--epochs", "1"]
        refused(run(*again, "--pooler", "max"), "pools with 'average'", "Omit --pooler")
        assert not (tmp_path / ".b.work").exists()
        assert api.load(tmp_path / "a model").classifier.fused.pooler.kind == "average"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--branch", "nonsense"], ["cannot branch at 'nonsense'", "layer4", "last or fc"]),
        (["--branch", "layer4.7"], ["layer4 has no module 'layer4.7'", "layer4.0.conv2"]),
        (["--goal", "best"], ["no goal is called 'best'", "balanced", "'novel>=0.80'"]),
        (["--goal", "new"], ["'novel'?", "balanced", "'novel>=0.80'"]),
        (["--goal", "novel>=0.8,base>=0.7"], ["several conditions", "can have one", "'novel>=0.80'"]),
        (["--goal", "novel>=300"], ["accuracy cannot be 300%"]),
        (["--recipe", "soup"], ["no recipe is called 'soup'", "reference"]),
        (["--pooler", "min"], ["no pooler is called 'min'", "max, average"]),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_ones(place: Place, words: list[str], said: list[str]) -> None:
    refused(place.extend("wrong", *words), *said)
    assert not list(place.root.glob("*wrong*"))


def test_an_existing_model_is_not_written_over(place: Place) -> None:
    before = (place / "v2" / "branchout.json").read_bytes()
    refused(place.extend("v2", *place.kept), "v2 already exists")
    refused(place.extend("v2", *place.kept, "--goal", "blanced"), "no goal is called 'blanced'")  # the typo comes first
    assert (place / "v2" / "branchout.json").read_bytes() == before


def test_wrong_folders_are_answered_with_what_was_expected(place: Place, tmp_path: Path) -> None:
    (tmp_path / "kiwi").mkdir()
    out = ["--base", place / "base", "--out", tmp_path / "x"]
    refused(run("extend", tmp_path, *out), "no usable image", "kiwi: no files in it")
    refused(run("extend", place / "nowhere", *out), f"There is no folder {place / 'nowhere'}")
    refused(run("extend", place / "news", *out), "Did you mean", str(place / "new"))
    refused(run("extend", place / "new" / KNOWN, *out), "expected one folder per class")
    refused(run("extend", place / "new", *out, "--memory", place / "later"), "--memory has classes", LATER[0])
    refused(run("extend", place / "new", *out, "--val", place / "later"), "neither old nor new")
    refused(run("extend", place / "new", *out, "--val", place / "memory", "--epochs", "1", "--goal", "novel"),
            "'novel' cannot be used", "no validation image")  # fmt: skip
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["tune", "predict", "evaluate", "check", "extend"])
def test_a_model_that_is_not_there_is_answered_with_those_that_are(place: Place, command: str, tmp_path: Path) -> None:
    rest = {"predict": [place / "val"], "evaluate": [place / "val"]}.get(command, [])

    def words(model: Path) -> list[str | Path]:
        if command in ("tune", "predict", "evaluate"):
            return [command, model, *rest]
        return [command, place / "new", "--base", model, *(["--out", tmp_path / "x"] if command == "extend" else [])]

    refused(run(*words(place / "v9")), f"There is no saved model {place / 'v9'}", str(place / "v2"))
    refused(run(*words(place / "val")), "is not a saved model", "branchout.json", "found ampersand")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "branchout.json").write_text("{")
    refused(run(*words(tmp_path / "torn")), "branchout.json is not valid JSON")


def test_misspelt_classes_are_answered_with_those_that_are_like_them(place: Place, tmp_path: Path) -> None:
    shutil.copytree(place / "memory", tmp_path / "memory")
    (tmp_path / "memory" / OLD[2]).rename(tmp_path / "memory" / OLD[2].replace("g", "gg").upper())
    memory = tmp_path / "memory"
    for words in (
        ["extend", place / "new", "--base", place / "base", "--memory", memory, "--out", place / "x"],
        ["evaluate", place / "base", memory],
    ):
        refused(run(*words), f"Did you mean {OLD[2]!r}", "branchout classes")


@pytest.mark.parametrize("command", ["predict", "evaluate", "explain", "report", "serve"])
def test_a_model_and_images_in_the_wrong_order_are_answered_with_the_right_one(place: Place, command: str) -> None:
    refused(run(command, place / "val", place / "base"), "swapped", f"{place / 'base'} {place / 'val'}")


def test_a_base_that_nobody_knows_is_answered_with_near_ones(place: Place) -> None:
    answer = run("extend", place / "new", "--base", "efficientnet_lite", "--out", place / "x")
    refused(answer, "There is no saved model efficientnet_lite", "Did you mean efficientnet_lite")
    suggested = set(re.findall(r"\w*efficientnet_lite\d", answer.err))
    assert suggested <= {base.name for base in listed_bases()}  # all have weights


def test_a_network_that_was_not_extended_cannot_be_tuned() -> None:
    for name in ("efficientnet_lite0", "resnet50.a1_in1k", "glyphs"):
        refused(run("tune", name), f"{name} is a network", f"branchout extend NEW/ --base {name}")


# Stopping and going on.


def test_interrupted_it_says_how_to_go_on_and_does(place: Place) -> None:
    words = ["extend", place / "new", "--base", place / "base", *place.kept, "--out", place / "late", "--epochs", "300"]
    process = start(*words)
    work = place / ".late.work"
    checkpoint = work / "branch.safetensors"
    until = time.monotonic() + 100
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert err == "interrupted; run the same command again to resume\n"
    assert not (place / "late").exists()
    with safe_open(checkpoint, "pt") as file:
        losses = json.loads(file.metadata()["losses"])
    assert 0 < len(losses) < 300

    refused(run(*words[:-1], "200"), "was stopped", "epochs: 300 before, 200 now",
            f"delete {work}")  # fmt: skip
    refused(run(*words, "--seed", "5"), "seed: 0 before, 5 now")
    assert checkpoint.exists()

    told = well(run(*words))
    assert f"{place / 'late'} was stopped, and is resumed" in told
    assert f"resumes after epoch {len(losses)} of 300" in told
    assert not work.exists()
    history = api.load(place / "late").saved.history[-1]
    assert len(history["losses"]) == 300
    assert history["losses"][: len(losses)] == [round(loss, 5) for loss in losses]


def test_other_commands_just_stop(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "load", interrupted)
    assert run("predict", place / "v2", place / "val") == Answer(130, "", "interrupted\n")
    goes_on = "interrupted; run the same command again to resume\n"
    assert place.extend("x") == Answer(130, "", goes_on)


def test_output_that_nobody_reads_any_more_is_no_error(place: Place) -> None:
    for words in (["predict", place / "v2", *[place / "val"] * 40, "--json"], ["data", "glyphs"]):
        process = start(*words, PYTHONUNBUFFERED="1")
        assert process.stdout is not None
        assert process.stderr is not None
        if words[0] == "predict":
            assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


# tune


def test_tune_moves_the_dial_at_once(place: Place) -> None:
    for goal in ("novel", "base", "avg"):
        told = well(run("tune", place / "v2", "--goal", goal))
        assert f"{goal}: all " in told
        assert "on 45 validation images" in told
        assert api.load(place / "v2").saved.step_points[-1].goal == goal


def test_tune_without_a_goal_shows_the_points_and_changes_nothing(place: Place) -> None:
    well(run("tune", place / "v2", "--goal", "novel>=0.01"))
    before = (place / "v2" / "branchout.json").read_bytes()
    told = well(run("tune", place / "v2"))
    assert told.startswith("saved (novel>=0.01): all ")
    assert all(f"\n{goal}: all " in told for goal in ("all", "avg", "balanced", "novel", "base"))
    assert "--goal avg" in told
    assert (place / "v2" / "branchout.json").read_bytes() == before


def test_a_goal_out_of_reach_is_answered_with_one_within(place: Place) -> None:
    before = (place / "v2" / "branchout.json").read_bytes()
    answer = run("tune", place / "v2", "--goal", "base>=99.99%")
    refused(answer, "base ≥ 100.0% cannot be reached", "the highest base accuracy on the validation images is")
    assert (place / "v2" / "branchout.json").read_bytes() == before
    advised = answer.err.split("--goal '")[1].split("'")[0]
    well(run("tune", place / "v2", "--goal", advised))


def test_tune_says_how_it_read_a_number_and_refuses_to_guess(place: Place) -> None:
    told = well(run("tune", place / "v2", "--goal", "base>=10"))
    assert told.startswith("base ≥ 10%: all ")
    before = (place / "v2" / "branchout.json").read_bytes()
    refused(run("tune", place / "v2", "--goal", "base>=2"), "2 is neither", "0.80, or 2%")
    assert (place / "v2" / "branchout.json").read_bytes() == before
    assert "'novel>=0.80' ('novel>=80%')" in well(run("tune", "--help"))


def test_the_help_of_tune_offers_no_name_that_it_refuses() -> None:
    told = well(run("tune", "--help"))
    assert "a folder that extend saved" in " ".join(told.split())
    assert "hf-hub" not in told


def test_a_model_without_a_choice_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    undominated = Frontier.pareto
    monkeypatch.setattr(Frontier, "pareto", lambda frontier: undominated(frontier)[:1])
    monkeypatch.setattr(Frontier, "choose", lambda frontier, goal: int(frontier.pareto()[0]))
    told = well(place.extend("single", *place.kept, "--epochs", "1"))
    assert "only one operating point: on the 45 validation images" in told
    assert "only one operating point" in well(run("tune", place / "single", "--goal", "avg"))
    assert well(run("tune", place / "single")).count(": all ") == 1
    assert "only one operating point" not in place.told["extend"]


def test_a_base_has_nothing_to_tune(place: Place) -> None:
    refused(run("tune", place / "base"), "no operating points. Extend it first", f"--base {place / 'base'} ")


# predict


def test_the_classes_of_a_model_are_listed_in_the_order_of_the_logits(place: Place) -> None:
    model = api.load(place / "v2")
    assert well(run("classes", place / "v2")).splitlines() == list(model.classes)
    lines = [json.loads(line) for line in well(run("classes", place / "v2", "--json")).splitlines()]
    assert [line["class"] for line in lines] == list(model.classes)
    space = model.classifier.space
    assert [line["class"] for line in lines if "step 1" in line["branches"]] == [
        name for name in space.classes if name in space.branches[1]
    ]


def test_predict_a_file_a_folder_and_as_json(place: Place) -> None:
    file = next((place / "val" / "infinity").iterdir())
    told = well(run("predict", place / "v2", file, "--top", "2"))
    assert told.startswith(f"{file}: ")
    assert told.count("%") == 2
    everything = sorted((place / "val").rglob("*.png"))
    assert len(everything) == 90  # more than one batch
    lines = [json.loads(line) for line in well(run("predict", place / "v2", place / "val", "--json")).splitlines()]
    assert [line["file"] for line in lines] == list(map(str, everything))
    model = api.load(place / "v2")
    for line in lines[::30]:
        (name, probability), *_ = model.predict(line["file"], top=3)
        assert line["answers"][0]["class"] == name
        assert line["answers"][0]["probability"] == pytest.approx(probability, abs=1e-4)
        assert len(line["answers"]) == 3


def test_unreadable_pictures_are_named_and_the_others_answered(place: Place, tmp_path: Path) -> None:
    good = sorted((place / "val" / "infinity").iterdir())[:3]
    whole = good[0].read_bytes()
    broken = [tmp_path / "[bold]half.png", tmp_path / "page.jpg"]
    broken[0].write_bytes(whole[: len(whole) // 2])
    broken[1].write_text("<html>")
    answer = run("predict", place / "v2", good[2], broken[0], good[0], broken[1], good[1], "--json")
    assert answer.status == 0
    assert [json.loads(line)["file"] for line in answer.out.splitlines()] == [str(good[n]) for n in (2, 0, 1)]
    lines = answer.err.splitlines()
    assert len(lines) == 2
    for line, file in zip(lines, broken, strict=True):
        assert line.startswith(f"left out: {file}: ")
    refused(run("predict", place / "v2", broken[1]), "page.jpg: not an image")
    both = run("predict", place / "v2", *broken)
    assert both.status == 1
    assert "None of these 2 images can be read" in both.err
    refused(run("predict", place / "v2", tmp_path / "nothing.png"), "there is no image or folder")


def test_a_test_folder_without_old_classes_is_said_to_measure_no_loss(place: Place, tmp_path: Path) -> None:
    (tmp_path / "infinity").symlink_to(place / "val" / "infinity")
    assert "has no images of old classes" in well(run("evaluate", place / "v2", tmp_path))
    assert "has no images of old classes" not in well(run("evaluate", place / "v2", place / "val"))


def test_mirror_images_are_for_photographs(place: Place) -> None:
    well(run("predict", place / "v2", place / "val" / "infinity", "--flip"))
    told = well(run("evaluate", place / "v2", place / "val", "--flip"))
    assert "averaged over every image and its mirror image" in told
    saved = place / "characters"
    model = api.load(place / "v2")
    model.saved.classifier.kind = "glyph"
    model.folder = None
    model.save(saved)
    for words in (["predict", saved, place / "val"], ["evaluate", saved, place / "val"]):
        refused(run(*words, "--flip"), "A mirrored character is another character")


# evaluate


def test_evaluate_shows_before_and_after_and_what_was_forgotten(place: Place) -> None:
    well(run("tune", place / "v2", "--goal", "novel"))  # a dial turned far forgets something
    told = well(run("evaluate", place / "v2", place / "val", "--two-fold"))
    assert "accuracy in % on 90 images" in told
    rows = [re.findall(r"[\w.,–]+", line) for line in told.splitlines()]
    counted = {row[0]: row[1] for row in rows if row and row[0] in ("all", "base", "novel", "overlap")}
    assert counted == {"all": "90", "base": "66", "novel": "18", "overlap": "6"}
    assert "goal novel, b = " in told
    assert "added to all new logits" in told
    assert "classes: all = all images; base = classes that only the base knows; novel = " in told
    for word in ("before", "after", "overlap", "classes that lost accuracy", "two-fold balanced: "):
        assert word in told


def test_evaluating_a_base_shows_one_figure_each(place: Place) -> None:
    told = well(run("evaluate", place / "base", place / "memory", "--two-fold"))
    assert "before" not in told
    assert "operating point novel" not in told
    assert "a base model has none" in told
    refused(run("evaluate", place / "base", place / "later"), "of these classes: commercial at")


# What it looks like.


def test_usage_errors_are_shown_by_typer(place: Place) -> None:
    answer = run("extend", place / "new")
    assert answer.status == 2
    assert "Missing option '--base'" in answer.err
    assert run("extnd").status == 2
    assert "Did you mean 'extend'" in run("extnd").err


def test_help_lists_the_commands_in_the_order_of_use() -> None:
    told = well(run("--help"))
    places = [told.index(f"\n  {name} ") for name in ("demo", "pretrain", "check", "extend", "tune", "predict", "data")]
    assert places == sorted(places)


@pytest.mark.parametrize("width", [40, 60, 100])
def test_bars_fit_the_terminal(width: int) -> None:
    screen = io.StringIO()
    with progress(Console(file=screen, force_terminal=True, width=width, color_system=None)) as on_progress:
        for done in range(4):
            on_progress(Event("Training the new branch", done, 3, {"loss": 1.5}))
    last = screen.getvalue().split("Training the new branch")[-1]
    assert "3/3" in last
    assert len("Training the new branch" + last.split("\n")[0].split("\r")[0]) <= width + 8


def test_a_log_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = io.StringIO()
    with progress(Console(file=log, width=80)) as on_progress:
        for done in range(1, 1001):
            now += 0.1
            on_progress(Event("pretrain", done, 1000, {"loss": 2.0}))
    lines = log.getvalue().splitlines()
    assert lines[-1] == "pretrain 1,000/1,000  loss 2.000"
    assert 3 <= len(lines) <= 6


def test_a_second_process_gives_the_same_answers(place: Place) -> None:
    """The real command, from the console script."""
    file = next((place / "val" / "infinity").iterdir())
    answer = typed("predict", place / "v2", file)
    assert well(answer) == well(run("predict", place / "v2", file))
    answer = typed("tune", place / "nowhere")
    refused(answer, "There is no saved model")


# A base that others trained.


def test_two_classes_of_photographs_join_the_thousand_of_imagenet(place: Place, tmp_path: Path) -> None:
    from sklearn.datasets import load_sample_image

    rng = np.random.default_rng(0)
    for name, photograph in (("temple roofs", "china.jpg"), ("dahlias", "flower.jpg")):
        pixels = load_sample_image(photograph)
        for number in range(36):
            side = int(rng.integers(160, 300))
            top, left = (int(rng.integers(0, room - side)) for room in pixels.shape[:2])
            folder = tmp_path / ("train" if number < 24 else "test") / name
            folder.mkdir(parents=True, exist_ok=True)
            crop = Image.fromarray(pixels[top : top + side, left : left + side]).resize((160, 160))
            crop.save(folder / f"{number}.jpg")
    officer = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    before = json.loads(well(run("predict", "efficientnet_lite0", officer, "--top", "5", "--json")))
    assert "military uniform" in [answer["class"] for answer in before["answers"]]

    out = tmp_path / "v2"
    told = well(run("extend", tmp_path / "train", "--base", "efficientnet_lite0", "--out", out))
    assert "1,002 classes" in told
    lines = [json.loads(line) for line in well(run("predict", out, tmp_path / "test", "--json")).splitlines()]
    right = [line["answers"][0]["class"] == Path(line["file"]).parent.name for line in lines]
    assert len(right) == 24
    assert sum(right) >= 16
    after = json.loads(well(run("predict", out, officer, "--top", "5", "--json")))
    names = [answer["class"] for answer in after["answers"]]
    assert names[0] not in ("temple roofs", "dahlias")
    assert "military uniform" in names
