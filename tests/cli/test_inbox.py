"""The inbox on the command line alone: list, name, teach, accept; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from helpers import refused, run, well
from inbox_case import UNKNOWN_GLYPHS, Case, check_taught, make_with_glyphs

from branchout import api
from branchout.cli.serve import _warn_of_other_model
from branchout.data.samples import Samples
from branchout.files import write_json
from branchout.inbox.folder import Inbox
from branchout.inbox.groups import listed
from branchout.inbox.runs import open_run


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Samples]:
    return make_with_glyphs(tmp_path_factory.mktemp("inbox"))


@pytest.fixture
def case(drawn: tuple[Case, Samples], tmp_path: Path) -> Case:
    made = drawn[0]
    return Case(shutil.copytree(made.root, tmp_path / "all"), tmp_path / "all" / "v1", made.truth)


def test_from_ten_photos_to_a_model_that_knows_both_classes(case: Case, drawn: tuple[Case, Samples]) -> None:
    out = case.root / "v2"
    said = well(run("inbox", case.photos, "--model", case.model, "--memory", case.old))
    assert "10 photos" in said
    assert "group 1: " in said
    assert "10% of 100 known images" in said
    assert "--name 1=CLASS" in said
    assert "--teach" not in said  # nothing is named
    found = listed(Inbox(case.photos))
    file_of = {each.photo: each.file for each in found.photos}
    words: list[str] = []
    for number, members in enumerate(found.groups, 1):
        name = Counter(case.truth[file_of[photo]] for photo in members).most_common(1)[0][0]
        words += ["--name", f"{number}={name}"]
    rest = [each.file for each in found.fitting]
    others = [word for file in rest for word in ("--name", f"{file}={case.truth[file]}")]
    said = well(run("inbox", case.photos, *words, *others))
    assert "--teach" in said
    assert "CLASS" not in said  # nothing is undecided
    well(run("inbox", case.photos, *(w for file, name in case.truth.items() for w in ("--name", f"{file}={name}"))))
    assert {each.file: each.name for each in Inbox(case.photos).decisions().values()} == case.truth
    said = well(run("inbox", case.photos, "--model", case.model, "--memory", case.old, "--teach", out))
    assert "of the 10 taught photos are classified correctly" in said
    assert "base classes: " in said
    assert " of 20 images right" in said  # a fifth of five images of each of twenty classes
    assert "worse" in said  # got worse, or did not
    assert "--accept" in said
    refused(run("inbox", case.photos, "--undo", "a-0.png"), "part of a run", "Run 1 into v2 is finished", "--accept")
    said = well(run("inbox", case.photos, "--accept"))
    assert f"--model {out}" in said
    model = api.load(out)
    assert set(UNKNOWN_GLYPHS) < set(model.classes)
    check_taught(model, drawn[1])
    said = well(run("inbox", case.photos, "--memory", case.old))  # the accepted model is used from now on
    assert "0 photos" in said


def test_the_list_for_programs_and_decisions_that_are_undone(case: Case) -> None:
    words = ["--model", case.model, "--threshold", "-100", "--json"]
    first = run("inbox", case.photos, *words)
    assert first.status == 0
    found = json.loads(first.out.splitlines()[-1])
    assert sum(map(len, found["groups"])) == 10
    well(run("inbox", case.photos, "--dismiss", "1", "--name", "a-0.png=telephone=black"))
    decided = {each.file: each.name for each in Inbox(case.photos).decisions().values()}
    assert "telephone=black" in decided.values() or decided["a-0.png"] is None  # if it was in group 1
    assert None in decided.values()
    well(run("inbox", case.photos, *(word for file in decided for word in ("--undo", file))))
    assert Inbox(case.photos).decisions() == {}
    said = well(run("inbox", case.photos, "--name", "a-1.png=telephone"))
    assert "telephone has 1 photo" in said


def test_the_next_command_fits_what_is_decided(case: Case) -> None:
    list_all = ["inbox", case.photos, "--model", case.model, "--memory", case.old, "--threshold"]
    said = well(run(*list_all, "-100"))
    groups = listed(Inbox(case.photos)).groups
    assert len(groups) == 2
    assert "--name 1=CLASS --dismiss 2" in said
    said = well(run("inbox", case.photos, "--name", "1=telephone"))
    assert "--name 2=CLASS\n" in said
    assert "--name 1=" not in said
    assert "--memory OLD/ --teach OUT" in said
    said = well(run(*list_all, "-100"))
    assert "--name 2=CLASS\n" in said
    assert f"--model {case.model} --memory {case.old} --teach OUT" in said
    said = well(run("inbox", case.photos, "--dismiss", "2"))
    assert "--teach OUT" in said
    assert "CLASS" not in said
    well(run("inbox", case.photos, "--undo", "1", "--undo", "2"))
    said = well(run(*list_all, "100"))
    assert "group" not in said
    assert "png=CLASS" in said  # a photo that is there
    assert "--name 1=" not in said


def test_the_share_of_false_alarms_is_kept_and_nested_folders_are_read_as_asked(case: Case) -> None:
    case.old.rename(case.root / "signs")
    case.old.mkdir()
    (case.root / "signs").rename(case.old / "signs")
    words = ["inbox", case.photos, "--model", case.model, "--memory", case.old]
    refused(run(*words), "--classes-from")
    assert "20% of 100 known images" in well(run(*words, "--classes-from", "leaves", "--false-alarms", "0.2"))
    assert "20% of 100 known images" in well(run(*words, "--classes-from", "leaves"))


def test_undoing_a_group_undoes_what_was_decided_of_it(case: Case) -> None:
    well(run("inbox", case.photos, "--model", case.model, "--threshold", "-100"))
    first = listed(Inbox(case.photos)).groups[0]
    assert len(first) > 1
    inbox = Inbox(case.photos)
    inbox.decide([inbox.find(first[0])], "telephone")
    well(run("inbox", case.photos, "--undo", "1"))
    assert inbox.decisions() == {}


def test_a_similar_class_is_asked_about_and_the_last_decision_is_undone(case: Case) -> None:
    known = api.load(case.model).classes[0]
    words = ["inbox", case.photos, "--model", case.model, "--name", f"a-0.png={known.upper()}"]
    refused(run(*words), "Did you mean", known, "--new-class")
    well(run(*words, "--new-class", "--dismiss", "a-1.png"))
    well(run("inbox", case.photos, "--undo", "last"))
    assert [each.file for each in Inbox(case.photos).decisions().values()] == ["a-0.png"]
    well(run("inbox", case.photos, "--undo", "last"))
    refused(run("inbox", case.photos, "--undo", "last"), "no decision")


def test_what_prevents_teaching_is_kept_for_the_page(case: Case) -> None:
    box = Inbox(case.photos)
    box.decide(box.photos(), "telephone")
    teach = ["inbox", case.photos, "--model", case.model, "--teach", case.root / "v2", "--memory", case.root / "gone"]
    refused(run(*teach), "gone")
    open_ = open_run(box)
    assert open_ is not None
    assert open_.state() == "failed"
    assert "gone" in (open_.error or "")


def test_a_served_model_that_is_not_the_one_last_taught_is_pointed_out(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = case.photos / ".inbox" / "runs" / "1"
    settings = {
        "model": "v1",
        "out": str(case.root / "v2"),
        "memory": None,
        "epochs": None,
        "when": "",
        "decision": "live",
    }
    write_json(folder / "run.json", settings)
    _warn_of_other_model(case.photos, str(case.root / "v2"))
    assert capsys.readouterr().out == ""
    _warn_of_other_model(case.photos, str(case.model))
    assert "v2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["--model"]),
        (["--name", "robin"], ["--name 1=robin"]),
        (["--name", "7=robin"], ["branchout inbox"]),
        (["--name", "gone.png=robin"], ["gone.png"]),
        (["--name", "a-0.png=../robin"], ["folder"]),
        (["--dismiss", "gone.png"], ["gone.png"]),
        (["--accept"], ["--teach"]),
        (["--teach", "v2"], ["--model"]),
        (["--teach", "v2", "--model", "glyphs"], ["nothing to teach"]),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_is_decided(
    drawn: tuple[Case, Samples], words: list[str], said: list[str]
) -> None:
    photos = drawn[0].photos
    refused(run("inbox", photos, *words), *said)
    assert Inbox(photos).decisions() == {}


def test_a_list_without_known_images_asks_for_them(drawn: tuple[Case, Samples]) -> None:
    refused(run("inbox", drawn[0].photos, "--model", drawn[0].model), "--memory")
    refused(run("inbox", drawn[0].root / "nowhere", "--model", drawn[0].model), "nowhere")


def test_serving_an_inbox_needs_known_images(drawn: tuple[Case, Samples]) -> None:
    case = drawn[0]
    refused(run("serve", case.model, "--inbox", case.photos), "--memory")
    refused(run("serve", case.model, "--memory", case.old), "--inbox")
