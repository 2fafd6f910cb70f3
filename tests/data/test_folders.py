"""Folders as people have them: every flaw is reported, no good image is lost, every format gives the right pixels."""

from __future__ import annotations

import os
import pickle
import shutil
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchout.data.decode import Kind, UnreadableImage
from branchout.data.folders import images_in, scan, unlabelled_images
from branchout.data.problems import Problem, Problems
from branchout.data.samples import concatenate, find_identical
from branchout.data.verify import FilePixels
from branchout.errors import BranchoutError, printable
from branchout.progress import Event
from tests.data.hostile import encoded, jpeg, picture, png_claiming, put, write_folder


def kinds(problems: Problems) -> dict[str, set[Kind]]:
    found: dict[str, set[Kind]] = {}
    for problem in problems:
        found.setdefault(problem.path, set()).add(problem.kind)
    return found


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """Seven usable images among one of everything that goes wrong."""
    root = tmp_path / "photos"
    put(root / "cat/good.jpg", jpeg(1))
    put(root / "cat/deep/er/good.png", encoded(picture(2), "PNG"))
    put(root / "cat/no extension", encoded(picture(3), "WEBP"))
    put(root / "dog/really a png.jpg", encoded(picture(4), "PNG"))
    put(root / "dog/note.txt.gif", encoded(picture(5), "GIF"))
    put(root / "Dog/good.bmp", encoded(picture(6), "BMP"))
    put(root / "cat/truncated.jpg", jpeg(7)[:-200])
    put(root / "cat/truncated.webp", encoded(picture(7), "WEBP")[:-20])
    put(root / "cat/corrupt.png", encoded(picture(8), "PNG").replace(b"IDAT", b"IDAT" + b"junk" * 4, 1))
    put(root / "cat/zero.jpg", b"")
    put(root / "cat/page.jpg", b"<html>404 not found</html>")
    put(root / "cat/BMW.bin", b"BMW is a maker of cars, not of bitmaps")
    put(root / "cat/phone.heic", b"\0\0\0\x18ftypheic" + bytes(40))
    put(root / "cat/notes.txt", b"remember the milk")
    put(root / "cat/empty.csv", b"")
    put(root / "cat/Thumbs.db", b"\xd0\xcf\x11\xe0")
    put(root / "cat/.DS_Store", b"Bud1")
    put(root / "cat/__MACOSX/a.jpg", jpeg(9))
    put(root / ".cache/a.jpg", jpeg(9))
    put(root / "cat/bomb.png", png_claiming(60_000, 60_000))
    put(root / "cat/twin.jpg", jpeg(1))
    put(root / "dog/cat.jpg", jpeg(1))
    put(root / "stray.jpg", jpeg(10))
    put(root / "README.md", b"# photos")
    (root / "cat/gone.jpg").symlink_to(root / "nowhere.jpg")
    (root / "cat/itself.jpg").symlink_to("itself.jpg")
    (root / "cat/around").symlink_to(root / "cat", target_is_directory=True)
    (root / "up").symlink_to(root.parent, target_is_directory=True)
    os.mkfifo(root / "cat/pipe.jpg")
    return root


def test_every_flaw_is_reported_and_no_good_image_is_lost(messy: Path) -> None:
    samples, problems = scan(messy)
    assert {name: set(samples.of_classes([name]).ids) for name in samples.classes} == {
        "cat": {"cat/good.jpg", "cat/deep/er/good.png", "cat/no extension"},
        "dog": {"dog/really a png.jpg", "dog/note.txt.gif", "dog/cat.jpg"},
        "Dog": {"Dog/good.bmp"},
    }
    assert len(samples) == 7
    assert kinds(problems) == {
        "cat/truncated.jpg": {Kind.TRUNCATED},
        "cat/truncated.webp": {Kind.TRUNCATED},
        "cat/corrupt.png": {Kind.CORRUPT},
        "cat/zero.jpg": {Kind.EMPTY},
        "cat/page.jpg": {Kind.NOT_AN_IMAGE},
        "cat/BMW.bin": {Kind.NOT_AN_IMAGE},
        "cat/pipe.jpg": {Kind.NOT_AN_IMAGE},
        "cat/phone.heic": {Kind.UNSUPPORTED},
        "cat/notes.txt": {Kind.COMPANION},
        "cat/empty.csv": {Kind.COMPANION},
        "cat/Thumbs.db": {Kind.COMPANION},
        "README.md": {Kind.COMPANION},
        "cat/.DS_Store": {Kind.HIDDEN},
        "cat/__MACOSX": {Kind.HIDDEN},
        ".cache": {Kind.HIDDEN},
        "cat/bomb.png": {Kind.TOO_LARGE},
        "cat/twin.jpg": {Kind.DUPLICATE},
        "dog/cat.jpg": {Kind.CONFLICT},
        "stray.jpg": {Kind.STRAY},
        "cat/gone.jpg": {Kind.DANGLING},
        "cat/itself.jpg": {Kind.LOOP},
        "cat/around": {Kind.LOOP},
        "up": {Kind.LOOP},
        "Dog": {Kind.CASE},
    }
    assert problems.of(Kind.CONFLICT) == [Problem(Kind.CONFLICT, "dog/cat.jpg", "same as cat/good.jpg")]
    assert problems.of(Kind.DUPLICATE)[0].detail == "same as cat/good.jpg"
    assert problems.of(Kind.CASE)[0].detail == "also dog"
    for index in range(len(samples)):
        assert samples.read(index).shape == (24, 32, 3)


def test_summary_counts_each_kind_and_names_a_few(messy: Path) -> None:
    lines = scan(messy)[1].summary(examples=1)
    assert any(line.startswith("2 truncated: cat/truncated.jpg (") and line.endswith(", …") for line in lines)
    assert "3 hidden" in lines
    assert f"4 {Kind.COMPANION}" in lines
    assert not Problems().summary()


def test_scanning_twice_gives_the_same_table(messy: Path) -> None:
    one, two = scan(messy)[0], scan(messy)[0]
    assert one.ids.tolist() == two.ids.tolist()
    assert one.fingerprint() == two.fingerprint()
    names = one.names.tolist()
    assert names == sorted(names)


def test_listing_goes_by_extension_and_decodes_nothing(messy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchout.data.verify.measure", lambda *_, **__: pytest.fail("decoded"))
    samples, _ = scan(messy, verify=False)
    assert "cat/truncated.jpg" in samples.ids
    assert "cat/no extension" not in samples.ids
    assert samples.pixels.shape is None
    assert samples.pixels.shapes is None  # type: ignore[attr-defined]


# The pixels' source.


def test_file_pixels_know_sizes_survive_pickling_and_notice_change(tmp_path: Path) -> None:
    put(tmp_path / "a/1.png", encoded(picture(1), "PNG"))
    put(tmp_path / "b/2.png", encoded(picture(2), "PNG"))
    samples, problems = scan(tmp_path)
    assert not problems
    pixels = pickle.loads(pickle.dumps(samples.pixels))
    assert isinstance(pixels, FilePixels)
    assert pixels.shape == (24, 32, 3)
    assert pixels.shapes is not None
    assert pixels.shapes.tolist() == [[24, 32, 3], [24, 32, 3]]
    assert (pixels.read(1) == np.asarray(picture(2))).all()
    before = pixels.fingerprint(np.array([0])), pixels.fingerprint(np.array([1]))
    os.utime(tmp_path / "b/2.png", ns=(1, 1))
    assert pixels.fingerprint(np.array([0])) == before[0] != before[1] != pixels.fingerprint(np.array([1]))
    put(tmp_path / "b/3.png", encoded(picture(3, height=25), "PNG"))
    assert scan(tmp_path)[0].pixels.shape is None


def test_a_portable_fingerprint_is_that_of_every_copy(tmp_path: Path) -> None:
    put(tmp_path / "here/a/1.png", encoded(picture(1), "PNG"))
    put(tmp_path / "here/b/2.png", encoded(picture(2), "PNG"))
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copyfile)
    here, there = scan(tmp_path / "here")[0], scan(tmp_path / "there")[0]
    assert here.fingerprint() != there.fingerprint()
    assert here.fingerprint(portable=True) == there.fingerprint(portable=True)
    assert here.fingerprint(portable=True) != here.select(np.array([1, 0])).fingerprint(portable=True)
    joined = [concatenate([samples, samples]).fingerprint(portable=True) for samples in (here, there)]
    assert joined[0] == joined[1]
    put(tmp_path / "there/b/2.png", encoded(picture(2, height=40), "PNG"))
    assert here.fingerprint(portable=True) != there.fingerprint(portable=True)


def test_a_file_that_breaks_after_the_scan_is_named(tmp_path: Path) -> None:
    path = put(tmp_path / "a/1.jpg", jpeg())
    samples, _ = scan(tmp_path)
    path.write_bytes(jpeg()[:300])
    with pytest.raises(UnreadableImage, match=r"a/1\.jpg: truncated"):
        samples.read(0)


def test_progress_counts_files_by_fifties_and_all_at_the_end(tmp_path: Path) -> None:
    for number in range(120):
        put(tmp_path / f"a/{number}.jpg", b"")
    put(tmp_path / "a/good.jpg", jpeg())
    reported: list[Event] = []
    scan(tmp_path, on_progress=reported.append)
    assert reported == [Event(f"Checking images in {tmp_path.name}", done, 121) for done in (50, 100, 121)]


# Links, permissions and names.


def test_a_linked_class_folder_works(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere/1.jpg", jpeg())
    put(tmp_path / "root/dog/2.jpg", jpeg(2))
    (tmp_path / "root/cat").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    samples, problems = scan(tmp_path / "root")
    assert samples.ids.tolist() == ["cat/1.jpg", "dog/2.jpg"]
    assert not problems


def test_two_folders_that_link_to_each_other_end(tmp_path: Path) -> None:
    put(tmp_path / "a/1.jpg", jpeg(1))
    put(tmp_path / "b/2.jpg", jpeg(2))
    (tmp_path / "a/to b").symlink_to(tmp_path / "b", target_is_directory=True)
    (tmp_path / "b/to a").symlink_to(tmp_path / "a", target_is_directory=True)
    samples, problems = scan(tmp_path)
    assert set(samples.ids) == {"a/1.jpg", "a/to b/2.jpg", "b/2.jpg", "b/to a/1.jpg"}
    assert len(problems.of(Kind.LOOP)) == 2
    assert len(problems.of(Kind.CONFLICT)) == 2


def test_what_may_not_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good.jpg", "locked.jpg", "closed/1.jpg"):
        put(tmp_path / "cat" / name, jpeg(len(name)))
    scandir, system_open = os.scandir, os.open

    def guarded_scandir(path: Path) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    def guarded_open(path: Path, *arguments: int) -> int:
        if Path(path).name == "locked.jpg":
            raise PermissionError(13, "Permission denied")
        return system_open(path, *arguments)

    monkeypatch.setattr(os, "scandir", guarded_scandir)
    monkeypatch.setattr(os, "open", guarded_open)
    samples, problems = scan(tmp_path)
    assert samples.ids.tolist() == ["cat/good.jpg"]
    assert kinds(problems) == {"cat/closed": {Kind.UNREADABLE}, "cat/locked.jpg": {Kind.UNREADABLE}}
    assert {problem.detail for problem in problems} == {"Permission denied"}


def test_two_unicode_forms_of_one_name_are_one_class(tmp_path: Path) -> None:
    composed, decomposed = "café", unicodedata.normalize("NFD", "café")
    put(tmp_path / composed / "1.jpg", jpeg(1))
    put(tmp_path / decomposed / "1.jpg", jpeg(2))
    put(tmp_path / decomposed / "2.jpg", jpeg(3))
    samples, problems = scan(tmp_path)
    assert samples.classes == (composed,)
    assert len(set(samples.ids)) == 3
    (merged,) = problems.of(Kind.MERGED)
    assert "'caf\\xe9'" in merged.detail
    assert "'cafe\\u0301'" in merged.detail


def test_a_name_that_is_not_unicode_can_be_saved(tmp_path: Path) -> None:
    put(tmp_path / os.fsdecode(b"caf\xe9") / "1.jpg", jpeg())
    samples, _ = scan(tmp_path)
    assert samples.classes == ("caf\\xe9",)
    assert str(samples.ids[0]).encode() == b"caf\\xe9/1.jpg"
    assert samples.read(0).shape == (24, 32, 3)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("aAéÉåsßSıI\u0301\u030aﬁ", min_size=1, max_size=3), min_size=1, max_size=6, unique=True))
def test_names_merge_by_unicode_form_only(tmp_path_factory: pytest.TempPathFactory, folders: list[str]) -> None:
    root = tmp_path_factory.mktemp("names")
    for number, folder in enumerate(folders):
        put(root / folder / "1.jpg", jpeg(number))
    samples, problems = scan(root)
    composed = [unicodedata.normalize("NFC", folder) for folder in folders]
    assert samples.counts() == {name: composed.count(name) for name in sorted(set(composed))}
    assert {p.path for p in problems.of(Kind.MERGED)} == {name for name in composed if composed.count(name) > 1}
    folded = [unicodedata.normalize("NFC", name.casefold()) for name in sorted(set(composed))]
    assert len(problems.of(Kind.CASE)) == len({name for name in folded if folded.count(name) > 1})
    assert len(set(samples.ids)) == len(folders)


# When nothing can be made of it.


def test_classes_without_an_image_are_named_with_the_reasons(tmp_path: Path) -> None:
    put(tmp_path / "cat/1.jpg", jpeg())
    put(tmp_path / "dog/1.jpg", jpeg()[:-100])
    put(tmp_path / "dog/2.jpg", jpeg(2)[:-100])
    put(tmp_path / "dog/3.jpg", b"")
    (tmp_path / "emu").mkdir()
    with pytest.raises(BranchoutError) as caught:
        scan(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"2 classes have no usable image in {tmp_path}:\n")
    assert "dog: 1 empty file, 2 truncated" in message
    assert "emu: no files in it" in message
    assert "cat:" not in message


def test_an_empty_class_does_not_hide_the_other_problems(tmp_path: Path) -> None:
    put(tmp_path / "cat/1.jpg", jpeg())
    put(tmp_path / "cat/2.jpg", jpeg(2)[:-100])
    put(tmp_path / "dog/1.jpg", b"")
    put(tmp_path / "stray.jpg", jpeg(3))
    (tmp_path / "emu").mkdir()
    with pytest.raises(BranchoutError) as caught:
        scan(tmp_path)
    for words in ("emu: no files", "dog: 1 empty file", "1 truncated: cat/2.jpg", "class folder: stray.jpg"):
        assert words in str(caught.value)


def test_names_that_the_model_has_may_differ_in_case_only(tmp_path: Path) -> None:
    for number, name in enumerate(("Crane", "crane", "Owl", "owl")):
        put(tmp_path / name / "1.jpg", jpeg(number))
    _, problems = scan(tmp_path, known=("crane", "Crane", "owl"))
    assert [problem.path for problem in problems.of(Kind.CASE)] == ["Owl"]


def test_a_hostile_folder_is_read_to_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data" / "cat"
    expected = write_folder(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples, problems = scan(folder.parent)
    wrong = {printable(f"cat/{name}"): {kind} for name, kind in expected.items() if kind}
    assert kinds(problems) == wrong
    assert set(samples.ids) == {printable(f"cat/{name}") for name, kind in expected.items() if not kind}
    assert all(line.isprintable() for line in problems.summary(1000))
    assert set(images_in(folder.parent)) >= {samples.pixels.file(row) for row in range(len(samples))}


def test_identical_files_are_found_in_two_tables(tmp_path: Path) -> None:
    for place in ("new/cat/1.jpg", "val/cat/other.jpg", "val/dog/1.jpg"):
        put(tmp_path / place, jpeg(1))
    put(tmp_path / "new/cat/2.jpg", jpeg(2))
    put(tmp_path / "new/dog/3.jpg", jpeg(3))
    put(tmp_path / "val/dog/3.jpg", jpeg(3))
    new, val = (scan(tmp_path / name)[0] for name in ("new", "val"))
    both = [(new.ids[one], val.ids[other]) for one, other in find_identical(new, val)]
    assert both == [("cat/1.jpg", "cat/other.jpg"), ("dog/3.jpg", "dog/3.jpg")]
    joined = concatenate([val.select(val.labels == 1), new])
    assert len(find_identical(joined, joined)) == len(joined)
    assert find_identical(new, scan(tmp_path / "val", verify=False)[0]) == []


def test_only_ten_of_many_empty_classes_are_named(tmp_path: Path) -> None:
    for number in range(13):
        (tmp_path / f"class{number:02d}").mkdir()
    with pytest.raises(BranchoutError, match=r"(?s)13 classes have no usable image in .*class09.*and 3 more") as caught:
        scan(tmp_path, verify=False)
    assert "class10" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda root: root.mkdir(), "none in it"),
        (lambda root: put(root / "1.jpg", jpeg()), "images directly in it: 1, such as 1.jpg"),
        (lambda root: put(root, b"PK"), "it is a file"),
        (
            lambda root: [put(root / split / "cat/1.jpg", jpeg()) for split in ("test", "train", "val")],
            "did you mean .*photos/train",
        ),
    ],
)
def test_another_layout_is_answered_with_the_one_expected(tmp_path: Path, make: object, expected: str) -> None:
    make(tmp_path / "photos")  # type: ignore[operator]
    with pytest.raises(BranchoutError, match=expected) as caught:
        scan(tmp_path / "photos")
    # Of which folder is not drawn: often the one to give is another.
    assert "FOLDER/\n    robin/\n      one.jpg" in str(caught.value)
    assert "    thrush/\n" in str(caught.value)


def test_a_class_folder_is_answered_with_the_folder_that_contains_it(tmp_path: Path) -> None:
    put(tmp_path / "pool/x1/1.jpg", jpeg())
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/robin").symlink_to(tmp_path / "pool/x1")
    with pytest.raises(BranchoutError) as caught:
        scan(tmp_path / "photos/robin")
    assert f"{tmp_path / 'photos'}\n" in str(caught.value)
    assert "robin/\n    robin/" not in str(caught.value)


def test_a_folder_that_does_not_exist_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(BranchoutError, match=r"There is no folder .*/photos$"):
        scan(tmp_path / "photos")
    put(tmp_path / "photoes/cat/1.jpg", jpeg())
    with pytest.raises(BranchoutError, match=r"There is no folder .*/photos\. Did you mean .*/photoes\?"):
        scan(tmp_path / "photos")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    put(tmp_path / "train/steam/1.jpg", jpeg(1))
    put(tmp_path / "bus/1.jpg", jpeg(2))
    assert scan(tmp_path)[0].classes == ("bus", "train")


# Nested class folders.


def nested(root: Path, *folders: str) -> Path:
    for number, folder in enumerate(folders):
        put(root / folder / "1.jpg", jpeg(number))
    return root


@pytest.mark.parametrize(
    ("folders", "outer", "inner", "offered"),
    [
        (("mammals/robin", "mammals/wren", "birds/fox"), 2, 3, {"birds", "mammals"}),
        (("birds/robin", "mammals/fox"), 2, 2, {"birds", "mammals"}),
        (("photos/robin", "photos/wren"), 1, 2, {"photos"}),
        (("cat", "birds/robin", "birds/wren"), 2, 3, {"birds"}),
        (("birds/songbirds/robin", "birds/songbirds/wren"), 1, 2, {"birds"}),
    ],
)
def test_nested_class_folders_are_asked_about(
    tmp_path: Path, folders: tuple[str, ...], outer: int, inner: int, offered: set[str]
) -> None:
    nested(tmp_path, *folders)
    with pytest.raises(BranchoutError) as caught:
        scan(tmp_path)
    count = {n: f"{n} class" + ("es" if n > 1 else "") for n in (outer, inner)}
    assert f"--classes-from folders: {count[outer]} (" in str(caught.value)
    assert f"--classes-from leaves: {count[inner]} (" in str(caught.value)
    told = str(caught.value).rpartition("instead: ")[2]
    assert set(told.split(", ")) == {str(tmp_path / name) for name in offered}
    assert scan(tmp_path, classes_from="folders")[0].classes == tuple(sorted({f.split("/")[0] for f in folders}))
    leaves = scan(tmp_path, classes_from="leaves")[0]
    assert leaves.classes == tuple(sorted(f.split("/")[-1] for f in folders))
    assert {str(name).rpartition("/")[0]: str(label) for name, label in zip(leaves.ids, leaves.names, strict=True)} == {
        folder: folder.rpartition("/")[2] for folder in folders
    }


@pytest.mark.parametrize(
    "folders",
    [
        ("robin/images", "wren/images"),  # as Tiny-ImageNet has them
        ("robin/day", "robin/night", "wren/day", "wren/night"),
        ("robin/2024-05-01", "robin/2024-05-02", "wren/2023-01-01"),
        ("train/steam", "bus"),
        ("robin", "robin/more", "robin/others", "wren"),  # robin has images of its own
    ],
)
def test_folders_that_cannot_be_classes_need_no_question(tmp_path: Path, folders: tuple[str, ...]) -> None:
    samples, _ = scan(nested(tmp_path, *folders))
    assert set(samples.classes) == {folder.split("/")[0] for folder in folders}
    assert len(samples) == len(folders)


def test_leaves_of_one_name_are_refused_and_files_between_are_reported(tmp_path: Path) -> None:
    nested(tmp_path / "two", "birds/crane", "machines/crane")
    with pytest.raises(BranchoutError, match=r"birds/crane, machines/crane.*--classes-from folders"):
        scan(tmp_path / "two", classes_from="leaves")
    nested(tmp_path / "one", "birds/robin", "birds/wren")
    put(tmp_path / "one/birds/notes.txt", b"birds")
    (tmp_path / "one/birds/empty").mkdir()
    with pytest.raises(BranchoutError, match=r"1 class has no usable image.*\n  empty: no files in it") as caught:
        scan(tmp_path / "one", classes_from="leaves")
    assert f"1 {Kind.COMPANION}" in str(caught.value)
    with pytest.raises(BranchoutError, match="folders, leaves"):
        scan(tmp_path / "one", classes_from="leafs")


def test_leaves_beside_images_are_classes_of_their_own(tmp_path: Path) -> None:
    nested(tmp_path, "birds", "birds/robin", "birds/wren", "cats")
    assert scan(tmp_path, classes_from="leaves")[0].names.tolist() == ["birds", "cats", "robin", "wren"]
    assert scan(tmp_path)[0].names.tolist() == ["birds"] * 3 + ["cats"]


def test_what_is_wrong_with_a_leaf_is_said_of_it(tmp_path: Path) -> None:
    nested(tmp_path, "birds/robin", "birds/wren")
    put(tmp_path / "birds/wren/1.jpg", jpeg(1)[:-200])
    with pytest.raises(BranchoutError, match=f"\n  wren: 1 {Kind.TRUNCATED}\n"):
        scan(tmp_path, classes_from="leaves")


def test_files_that_are_no_images_are_named_among_unlabelled_ones(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1.jpg", jpeg(1))
    put(tmp_path / "2.jpg", jpeg(2)[:-200])
    put(tmp_path / "something.png", b"text")
    put(tmp_path / "notes.txt", b"text")
    put(tmp_path / ".hidden.jpg", jpeg(3))
    samples, problems = unlabelled_images(tmp_path)
    assert samples.ids.tolist() == ["a/1.jpg"]
    assert f"1 {Kind.NOT_AN_IMAGE}: something.png" in problems.summary()
    assert problems.counts == dict.fromkeys((Kind.NOT_AN_IMAGE, Kind.COMPANION, Kind.TRUNCATED, Kind.HIDDEN), 1)
    (tmp_path / "a" / "1.jpg").unlink()
    with pytest.raises(BranchoutError, match=r"files found: 3(?s:.*)something\.png"):
        unlabelled_images(tmp_path)
    with pytest.raises(BranchoutError, match="files found: 0"):
        unlabelled_images(tmp_path / "a")


def test_the_number_of_other_files_is_grammatical(tmp_path: Path) -> None:
    put(tmp_path / "a.txt", b"text")
    with pytest.raises(BranchoutError, match="1 other file was found"):
        images_in(tmp_path)
    put(tmp_path / "b.txt", b"text")
    with pytest.raises(BranchoutError, match="2 other files were found"):
        images_in(tmp_path)
