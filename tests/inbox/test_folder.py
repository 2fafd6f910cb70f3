"""The inbox on disk: photos stay as they are, and every decision is one small file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from inbox_case import write

from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.inbox import folder
from branchout.inbox.folder import Decision, Inbox, class_name, similar
from branchout.inbox.runs import last_decision


@pytest.fixture
def photos(train: Samples, tmp_path: Path) -> Path:
    write(train, "infinity", 3, tmp_path / "photos", "a")
    return tmp_path / "photos"


def test_only_images_count_and_copies_once(photos: Path) -> None:
    (photos / "notes.txt").write_text("not an image")
    (photos / ".hidden.png").write_bytes((photos / "a0.png").read_bytes())
    (photos / "camera").mkdir()
    shutil.copy(photos / "a0.png", photos / "camera" / "copy.png")
    shutil.copy(photos / "a1.png", photos / "camera" / "other.png")
    (photos / "a1.png").unlink()
    assert [photo.file for photo in Inbox(photos).photos()] == ["a0.png", "a2.png", "camera/other.png"]


def test_every_broken_file_is_named_with_what_is_wrong(photos: Path) -> None:
    (photos / "empty.jpg").touch()
    (photos / "also-empty.PNG").touch()
    (photos / "words.jpeg").write_text("not an image")
    (photos / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic" + b"\0" * 40)
    (photos / "notes.txt").write_text("not meant as an image")
    (photos / "gone.png").symlink_to(photos / "nowhere.png")
    inbox = Inbox(photos)
    assert len(inbox.photos()) == 3
    assert sorted(inbox.broken) == ["also-empty.PNG", "empty.jpg", "gone.png", "phone.heic", "words.jpeg"]
    assert "empty" in inbox.broken["empty.jpg"]
    assert "HEIC" in inbox.broken["phone.heic"]
    (photos / "empty.jpg").write_bytes((photos / "a0.png").read_bytes() + b"x")
    assert len(inbox.photos()) == 4
    assert "empty.jpg" not in inbox.broken


@pytest.mark.parametrize(("name", "meant"), [("Robin", "robin"), ("black bird", "Black-bird"), ("robins", None)])
def test_a_name_that_differs_in_case_or_spaces_is_similar(name: str, meant: str | None) -> None:
    assert similar(name, ["robin", "Black-bird", "wren"]) == meant
    assert similar("robin", ["robin"]) is None


def test_photos_that_were_decided_about_together_can_be_undone_together(photos: Path) -> None:
    inbox = Inbox(photos)
    first, *others = inbox.photos()
    inbox.decide([first], None)
    inbox.decide(others, "robin")
    assert [each.photo for each in last_decision(Inbox(photos))] == [photo.id for photo in others]
    inbox.undo(others)
    assert [each.photo for each in last_decision(inbox)] == [first.id]
    inbox.undo([first])
    assert last_decision(inbox) == []


def test_a_decision_about_photos_that_left_the_folder_is_not_the_last(photos: Path) -> None:
    inbox = Inbox(photos)
    first, second, *_ = inbox.photos()
    inbox.decide([first], "robin")
    inbox.decide([second], "wren")
    inbox.path(second).unlink()
    assert [each.photo for each in last_decision(inbox)] == [first.id]


def test_a_decision_is_a_file_and_follows_the_content(photos: Path) -> None:
    inbox = Inbox(photos)
    first, second, third = inbox.photos()
    inbox.decide([first, second], " robin ")
    inbox.decide([third], None)
    kept = json.loads((photos / ".inbox" / "decisions" / f"{first.id}.json").read_text())
    assert (kept["file"], kept["name"]) == ("a0.png", "robin")
    (photos / "a0.png").rename(photos / "z.png")
    again = Inbox(photos)  # another process
    assert {each.name for each in again.decisions().values()} == {"robin", None}
    assert [each.photo for each in again.decisions().values() if each.name == "robin"] == [first.id, second.id]
    again.decide([first], "wren")
    again.undo([second, third])
    assert {k: d.name for k, d in Inbox(photos).decisions().items()} == {first.id: "wren"}
    assert sorted(path.name for path in photos.iterdir()) == [".inbox", "a1.png", "a2.png", "z.png"]


def test_a_photo_that_is_still_being_written_is_seen_when_it_is_complete(photos: Path, train: Samples) -> None:
    inbox = Inbox(photos)
    data = (photos / "a0.png").read_bytes()
    (photos / "new.png").write_bytes(data[:60])
    half = {photo.file: photo.id for photo in inbox.photos()}["new.png"]
    (photos / "new.png").write_bytes(data + b"x")
    assert {photo.file: photo.id for photo in inbox.photos()}["new.png"] != half


def test_a_photo_is_found_by_its_id(photos: Path) -> None:
    [first, *_] = Inbox(photos).photos()
    inbox = Inbox(photos)
    assert inbox.find(first.id) == first
    assert inbox.find("0" * 16) is None


@pytest.mark.parametrize("name", ["", "  ", "../up", "a/b", "a\\b", ".hidden", "bell\x07", "x" * 121])
def test_a_class_name_must_be_the_name_of_a_folder(name: str) -> None:
    with pytest.raises(BranchoutError, match="name of a folder"):
        class_name(name)


def test_a_damaged_decision_is_named(photos: Path) -> None:
    inbox = Inbox(photos)
    inbox.decide(inbox.photos()[:1], "robin")
    [file] = (photos / ".inbox" / "decisions").iterdir()
    file.write_text('{"photo": 3}')
    with pytest.raises(BranchoutError, match=file.name):
        inbox.decisions()


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BranchoutError, match="nowhere"):
        Inbox(tmp_path / "nowhere")


def test_a_decision_that_is_undone_while_all_are_read_is_no_error(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox(photos)
    first, *others = inbox.photos()
    inbox.decide([first, *others], "robin")
    read = folder.read_as

    def undone_first(kind: type[Decision], file: Path) -> Decision:
        inbox.undo([first])
        return read(kind, file)

    monkeypatch.setattr(folder, "read_as", undone_first)
    assert set(inbox.decisions()) == {photo.id for photo in others}
    inbox._file(others[0].id).write_text("{}")
    with pytest.raises(BranchoutError, match=others[0].id):
        inbox.decisions()
