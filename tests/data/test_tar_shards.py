"""WebDataset shards: the same table as a folder of the same images, and nothing hostile is followed or unpacked."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from branchout.data.datasets import resolve
from branchout.data.decode import Kind, UnreadableImage, decode
from branchout.data.folders import images_in, scan, unlabelled_images
from branchout.errors import BranchoutError
from tests.data.hostile import encoded, jpeg, picture, put


def shard(path: Path, members: dict[str, bytes], extra: tuple[tarfile.TarInfo, ...] = ()) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for info in extra:
            archive.addfile(info)
    return path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    shard(folder / "birds-000.tar", {"a.jpg": jpeg(1), "a.cls": b"robin", "sub/b.c.png": encoded(picture(2), "PNG"),
                                     "sub/b.json": json.dumps({"label": "wren", "x": 1}).encode()})  # fmt: skip
    shard(folder / "birds-001.tar", {"c.txt": b"robin\n", "c.jpg": jpeg(3), "README": b"about"})
    return folder


def test_shards_give_the_table_that_a_folder_gives(shards: Path, tmp_path: Path) -> None:
    put(tmp_path / "plain/robin/1.jpg", jpeg(1))
    put(tmp_path / "plain/robin/3.jpg", jpeg(3))
    put(tmp_path / "plain/wren/2.png", encoded(picture(2), "PNG"))
    (packed, problems), (plain, _) = scan(shards), scan(tmp_path / "plain")
    assert problems.counts == {Kind.COMPANION: 1}
    assert packed.ids.tolist() == ["birds-000.tar/a.jpg", "birds-000.tar/sub/b.c.png", "birds-001.tar/c.jpg"]
    assert packed.names.tolist() == ["robin", "wren", "robin"]
    order = np.array([0, 2, 1])
    assert packed.classes == plain.classes
    for field in ("content", "image_hash"):
        assert (getattr(packed, field)[order] == getattr(plain, field)).all()
    again = pickle.loads(pickle.dumps(packed))
    for one, other in enumerate(order):
        assert (again.read(int(other)) == plain.read(one)).all()
    assert packed.pixels.shape == plain.pixels.shape == (24, 32, 3)
    assert packed.fingerprint() == scan(shards)[0].fingerprint()
    assert packed.fingerprint() != packed.select(np.array([0, 2, 1])).fingerprint()


def test_one_shard_a_range_and_a_folder_of_shards(shards: Path) -> None:
    assert scan(shards / "birds-001.tar")[0].ids.tolist() == ["birds-001.tar/c.jpg"]
    everything = scan(shards)[0].ids.tolist()
    assert scan(shards / "birds-{000..001}.tar")[0].ids.tolist() == everything
    assert scan(shards, verify=False)[0].ids.tolist() == everything
    for name in ("birds.tar", "birds-*.tar"):
        with pytest.raises(BranchoutError, match=r"there is no such file. Expected names such as shards-"):
            scan(shards / name)
    with pytest.raises(BranchoutError, match=r"2 of 4 shards do not exist, such as .*birds-002\.tar"):
        scan(shards / "birds-{000..003}.tar")
    assert len(resolve(str(shards)).train) == 2  # one of the two robins is held out


def test_images_of_shards_can_be_predicted(shards: Path) -> None:
    found = images_in(shards)
    assert [Path(image).name for image in found] == ["a.jpg", "b.c.png", "c.jpg"]
    assert (decode(found[1]) == np.asarray(picture(2))).all()
    unlabelled = shard(shards / "more" / "x.tar", {"only.jpg": jpeg(5)})
    assert len(images_in(unlabelled)) == 1
    with pytest.raises(BranchoutError, match=r"no labelled images(?s:.*)1 image without a class"):
        scan(unlabelled)
    with pytest.raises(BranchoutError, match="contains no images"):
        images_in(shard(shards / "more" / "y.tar", {"only.cls": b"robin"}))


def test_numbers_are_named_by_a_list_beside_the_shards(tmp_path: Path) -> None:
    place = shard(tmp_path / "x.tar", {"a.jpg": jpeg(1), "a.cls": b"1", "b.jpg": jpeg(2), "b.cls": b"0"})
    assert scan(place)[0].names.tolist() == ["1", "0"]
    put(tmp_path / "classes.txt", b"robin\nwren\n")
    assert scan(place)[0].names.tolist() == ["wren", "robin"]
    put(tmp_path / "classes.txt", b"robin\n")
    with pytest.raises(BranchoutError, match=r"class 1, but line 2 of classes\.txt beside it is missing .* 1 lines"):
        scan(place)


def test_a_class_list_comes_before_captions(tmp_path: Path) -> None:
    members = {"a.txt": b"a robin in a tree", "a.jpg": jpeg(1), "a.cls": b"robin", "a.json": b'{"label": 4}'}
    assert scan(shard(tmp_path / "x.tar", members))[0].classes == ("robin",)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_hostile_members_are_refused(tmp_path: Path) -> None:
    secret = put(tmp_path / "secret.jpg", jpeg(9))
    good = {"a.jpg": jpeg(1), "a.cls": b"robin", "../up.jpg": jpeg(2), "../up.cls": b"robin", "/root.jpg": jpeg(3)}
    good |= {"broken.jpg": jpeg(4)[:-200], "broken.cls": b"robin", "deep.json": b"[" * 60_000, "deep.jpg": jpeg(5)}
    good |= {"caption.txt": b"x" * 70_000, "caption.jpg": jpeg(6), "esc.cls": b"\x1b[2J", "esc.jpg": jpeg(7)}
    extra = (
        member("link.jpg", tarfile.SYMTYPE, str(secret)),
        member("hard.jpg", tarfile.LNKTYPE, "/etc/passwd"),
        member("pipe.jpg", tarfile.FIFOTYPE),
        member("device.jpg", tarfile.CHRTYPE),
        member("folder.jpg", tarfile.DIRTYPE),
    )
    place = shard(tmp_path / "in" / "x.tar", good, extra)
    before = sorted(tmp_path.rglob("*"))
    samples, problems = scan(place)
    assert sorted(tmp_path.rglob("*")) == before
    assert samples.ids.tolist() == ["x.tar/a.jpg", "x.tar/esc.jpg"]
    assert samples.classes == ("\\x1b[2J", "robin")
    refused = {problem.path.removeprefix("x.tar/") for problem in problems.of(Kind.NOT_AN_IMAGE)}
    assert refused == {"../up.jpg", "../up.cls", "/root.jpg", "link.jpg", "hard.jpg", "pipe.jpg", "device.jpg"}
    assert [problem.path for problem in problems.of(Kind.TRUNCATED)] == ["x.tar/broken.jpg"]
    assert len(problems.of(Kind.UNLABELLED)) == 2


def test_a_shard_that_ends_early_keeps_what_came_before(tmp_path: Path) -> None:
    members = {f"{n}.{kind}": content for n in range(4) for kind, content in (("jpg", jpeg(n)), ("cls", b"robin"))}
    whole = shard(tmp_path / "x.tar", members).read_bytes()
    put(tmp_path / "x.tar", whole[: whole.index(b"2.jpg") + 700])
    samples, problems = scan(tmp_path / "x.tar")
    assert 1 <= len(samples) < 4
    assert problems.of(Kind.TRUNCATED)
    put(tmp_path / "y.tar", b"\x1f\x8b" + bytes(600))
    with pytest.raises(BranchoutError, match=r"uncompressed tar archive"):
        scan(tmp_path / "y.tar")


def test_an_image_that_changed_in_its_shard_is_named(shards: Path) -> None:
    samples = scan(shards)[0]
    put(shards / "birds-001.tar", bytes(10_000))
    with pytest.raises(UnreadableImage, match=r"birds-001\.tar.*at byte"):
        samples.read(2)


def damaged_header(whole: bytes) -> bytes:
    at = whole.index(b"2.jpg")
    return whole[:at] + b"!" * 512 + whole[at + 512 :]


def negative_size(whole: bytes) -> bytes:
    """The second member's header says that it has -1,024 bytes: the next one would be the first again."""
    at = whole.index(b"0.cls")
    header = bytearray(whole[at : at + 512])
    header[124:136] = b"\xff" + (-1024).to_bytes(11, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return whole[:at] + bytes(header) + whole[at + 512 :]


def many_long_names(whole: bytes) -> bytes:
    at = whole.index(b"2.jpg")
    long = tarfile.TarInfo("././@LongLink")
    long.type = tarfile.GNUTYPE_LONGNAME
    return whole[:at] + long.tobuf(tarfile.GNU_FORMAT) * 5000 + whole[at:]


def number_that_is_none(whole: bytes) -> bytes:
    at = whole.index(b"2.jpg")
    info = tarfile.TarInfo("odd.jpg")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "x"}
    return whole[:at] + info.tobuf(tarfile.PAX_FORMAT) + whole[at:]


@pytest.mark.parametrize("damage", [damaged_header, negative_size, many_long_names, number_that_is_none])
def test_a_damaged_shard_is_reported(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    members = {f"{n}.{kind}": content for n in range(4) for kind, content in (("cls", b"robin"), ("jpg", jpeg(n)))}
    place = shard(tmp_path / "x.tar", {"a.jpg": jpeg(7), "a.cls": b"robin", **members})
    assert not scan(place)[1].counts
    put(place, damage(place.read_bytes()))
    samples, problems = scan(place)
    assert 1 <= len(samples) < 5
    assert [problem.path for problem in problems.of(Kind.TRUNCATED)] == ["x.tar"]
    with pytest.raises(BranchoutError, match=r"1 archive of .*x\.tar cannot be read"):
        images_in(place)


def test_an_archive_among_photos_is_not_taken_for_all_of_them(tmp_path: Path) -> None:
    put(tmp_path / "1.jpg", jpeg(1))
    shard(tmp_path / "backup.tar", {"a.jpg": jpeg(2), "a.cls": b"robin"})
    assert images_in(tmp_path) == [tmp_path / "1.jpg"]
    with pytest.raises(BranchoutError, match="images directly in it: 1"):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (b"crane\ncrane\n", "more than once: crane"),
        (b"robin\n\n", r"line 2 of classes\.txt"),
        (b"\xff\xfe", r"classes\.txt cannot be read"),
    ],
)
def test_a_class_list_that_names_too_little_is_refused(names: bytes, said: str, tmp_path: Path) -> None:
    place = shard(tmp_path / "x.tar", {"a.jpg": jpeg(1), "a.cls": b"1", "b.jpg": jpeg(2), "b.cls": b"0"})
    put(tmp_path / "classes.txt", names)
    with pytest.raises(BranchoutError, match=said):
        scan(place)
    put(tmp_path / "classes.txt", "\ufeffwren\nrobin\n".encode())
    assert scan(place)[0].names.tolist() == ["robin", "wren"]


def test_unlabelled_images_to_compact_with_may_be_in_shards(shards: Path) -> None:
    samples, problems = unlabelled_images(shards)
    assert samples.ids.tolist() == ["birds-000.tar/a.jpg", "birds-000.tar/sub/b.c.png", "birds-001.tar/c.jpg"]
    assert not problems
    assert (samples.read(1) == np.asarray(picture(2))).all()
    assert len(unlabelled_images(shards / "birds-001.tar")[0]) == 1
