"""Every published layout in miniature, what each is called, and what is said when it is not there."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from branchout.data.datasets import folder, resolve
from branchout.data.decode import Kind
from branchout.data.published_datasets import download_cifar100
from branchout.errors import BranchoutError

GOLDFISH, PEMBROKE, CARDIGAN_DOG, CARDIGAN = "n01443537", "n02113023", "n02113186", "n02963159"
CRANE_BIRD, CRANE_MACHINE, ACOUSTIC, ELECTRIC = "n02012849", "n03126707", "n02676566", "n03272010"


def put_image(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(buffer, "PNG")
    path.write_bytes(buffer.getvalue())


def put_synsets(root: Path, synsets: list[str], *, train: int = 3, val: int = 2) -> None:
    for synset in synsets:
        for split, count in (("train", train), ("val", val)):
            for number in range(count):
                put_image(root / split / synset / f"{synset}_{number}.JPEG", number)


# CIFAR-100, pickled as Python 2 did it.


def old_pickle(value: object) -> bytes:
    """The opcodes that Python 2's cPickle wrote, protocol 2: texts are byte strings, arrays hold their bytes as one."""
    if isinstance(value, dict):
        return b"}(" + b"".join(old_pickle(key) + old_pickle(item) for key, item in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(old_pickle(item) for item in value) + b"e"
    if isinstance(value, int):
        return b"J" + value.to_bytes(4, "little", signed=True)
    if isinstance(value, str):
        return b"T" + len(value).to_bytes(4, "little") + value.encode()
    assert isinstance(value, np.ndarray)
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"(" + b"".join(old_pickle(length) for length in value.shape) + b"t"
    return empty + b"(K\x01" + shape + kind + b"\x89T" + value.size.to_bytes(4, "little") + value.tobytes() + b"tb"


def put_cifar(folder: Path) -> np.ndarray:
    folder.mkdir(parents=True)
    fine, coarse = ["apple", "baby", "boy", "bus", "pear"], ["fruit_and_vegetables", "people", "vehicles_1"]
    images = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
    flat = images.transpose(0, 3, 1, 2).reshape(10, 3072)
    labels, groups = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0], [0, 1, 1, 2, 0, 0, 2, 1, 1, 0]
    meta = {"fine_label_names": fine, "coarse_label_names": coarse}
    split = {"data": flat, "fine_labels": labels, "coarse_labels": groups}
    for name, content in {"meta": meta, "train": split, "test": split}.items():
        (folder / name).write_bytes(b"\x80\x02" + old_pickle(content) + b".")
    return images


@pytest.mark.parametrize("given", ["", "cifar-100-python"])
def test_cifar_is_read_as_published(tmp_path: Path, given: str) -> None:
    images = put_cifar(tmp_path / "cifar-100-python")
    data = resolve(str(tmp_path / given))
    assert data.name == "cifar-100"
    assert data.train.classes == ("apple", "baby", "boy", "bus", "pear")
    assert data.train.names.tolist()[:5] == ["apple", "baby", "boy", "bus", "pear"]
    assert (data.train.read(3) == images[3]).all()
    assert data.train.attributes["coarse"].tolist()[:2] == ["fruit_and_vegetables", "people"]
    assert data.domains == dict.fromkeys(["baby", "boy"], "animate") | dict.fromkeys(
        ["apple", "bus", "pear"], "inanimate"
    )
    assert data.siblings == (("fruit_and_vegetables", "apple", "pear"), ("people", "baby", "boy"))
    assert set(data.train.ids).isdisjoint(data.val.ids)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    put_cifar(tmp_path / "cifar-100-python")
    witness = tmp_path / "witness"

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {witness}",)

    (tmp_path / "cifar-100-python/meta").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(BranchoutError, match=r"meta is damaged or not .*: it asks for (posix|nt)\.system"):
        resolve(str(tmp_path))
    assert not witness.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02}.", b"garbage", pickle.dumps([1, 2])])
def test_a_damaged_cifar_is_named(tmp_path: Path, content: bytes) -> None:
    put_cifar(tmp_path / "cifar-100-python")
    (tmp_path / "cifar-100-python/train").write_bytes(content)
    with pytest.raises(BranchoutError, match="cifar-100-python/train"):
        resolve(str(tmp_path))


def test_download_is_checked_and_unpacked_by_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets.utils as utils

    def fetch(url: str, root: str, filename: str, md5: str) -> None:
        assert url.endswith("cifar-100-python.tar.gz")
        assert len(md5) == 32
        put_cifar(Path(root) / "cifar-100-python")

    monkeypatch.setattr(utils, "download_and_extract_archive", fetch)
    download_cifar100(str(tmp_path))
    assert len(resolve(str(tmp_path)).train) == 10


# Synsets.


def test_tiny_imagenet_as_published(tmp_path: Path) -> None:
    synsets = [GOLDFISH, ACOUSTIC, ELECTRIC]
    for number, synset in enumerate(synsets):
        put_image(tmp_path / "train" / synset / "images" / f"{synset}_0.JPEG", number)
        (tmp_path / "train" / synset / f"{synset}_boxes.txt").write_text("0 0 1 1")
        put_image(tmp_path / "val/images" / f"val_{number}.JPEG", 10 + number)
    put_image(tmp_path / "test/images/test_0.JPEG", 99)
    lines = [f"val_{number}.JPEG\t{synset}\t0\t0\t9\t9" for number, synset in enumerate(synsets)]
    (tmp_path / "val/val_annotations.txt").write_text("\n".join(reversed(lines)) + "\n")
    (tmp_path / "wnids.txt").write_text("\n".join(synsets))
    words = {GOLDFISH: "goldfish, Carassius auratus", ACOUSTIC: "acoustic guitar", ELECTRIC: "electric guitar"}
    (tmp_path / "words.txt").write_text("".join(f"{synset}\t{name}\n" for synset, name in words.items()))
    data = resolve(str(tmp_path))
    assert data.name == "tiny-imagenet-200"
    assert data.train.classes == data.val.classes == ("acoustic guitar", "electric guitar", "goldfish")
    assert f"train/{GOLDFISH}/images/{GOLDFISH}_0.JPEG" in data.train.ids
    named = dict(zip(data.val.ids.tolist(), data.val.names.tolist(), strict=True))
    assert named["val/images/val_0.JPEG"] == "goldfish"
    assert named["val/images/val_2.JPEG"] == "electric guitar"
    assert data.val.read(0).shape == (8, 8, 3)
    assert data.siblings == (("guitar", "acoustic guitar", "electric guitar"),)
    assert data.domains == {"goldfish": "animate", "acoustic guitar": "inanimate", "electric guitar": "inanimate"}
    assert data.base_domain == "inanimate"
    (tmp_path / "val/images/val_1.JPEG").unlink()
    with pytest.raises(BranchoutError, match=r"1 of 3 images .* such as val_1\.JPEG"):
        resolve(str(tmp_path))


def test_facts_beside_the_data_come_first(tmp_path: Path) -> None:
    put_synsets(tmp_path, [GOLDFISH, ACOUSTIC])
    facts = {
        "classes": [{"wnid": GOLDFISH, "name": "gold fish, shiny", "animate": True}],
        "siblings": [{"parent": "odd pair", "wnids": [ACOUSTIC, GOLDFISH, ELECTRIC]}],
    }
    (tmp_path / "classes.json").write_text(json.dumps(facts))
    (tmp_path / "words.txt").write_text(f"{GOLDFISH}\tnot this\n{ACOUSTIC}\tguitar without a plug\n")
    data = resolve(str(tmp_path))
    assert data.train.classes == ("gold fish", "guitar without a plug")
    assert data.siblings == (("odd pair", "gold fish", "guitar without a plug"),)


def test_a_folder_of_ones_own_may_say_what_its_classes_are(tmp_path: Path) -> None:
    for name in ("corgi", "pug", "sofa"):
        put_image(tmp_path / name / "1.png")
    assert resolve(str(tmp_path)).domains == {}
    for unrelated in ('["corgi"]', "{", '{"corgi": 1}', '{"domains": ["corgi"]}'):
        (tmp_path / "classes.json").write_text(unrelated)
        assert resolve(str(tmp_path)).domains == {}
    facts = {"domains": {"corgi": "dog", "pug": "dog", "sofa": "thing"}, "base_domain": "thing"}
    (tmp_path / "classes.json").write_text(json.dumps(facts | {"siblings": [["dog", "corgi", "pug"]]}))
    found = resolve(str(tmp_path))
    assert (found.domains, found.base_domain) == (facts["domains"], "thing")
    assert found.siblings == (("dog", "corgi", "pug"),)
    shutil.rmtree(tmp_path / "pug")  # what is said of it does no harm
    fewer = resolve(str(tmp_path))
    assert (fewer.domains, fewer.siblings) == ({"corgi": "dog", "sofa": "thing"}, ())


def test_names_that_are_alike_both_carry_their_synset(tmp_path: Path) -> None:
    synsets = [CRANE_BIRD, CRANE_MACHINE, PEMBROKE, CARDIGAN_DOG, CARDIGAN, "n99999999"]
    put_synsets(tmp_path, synsets)
    data = resolve(str(tmp_path))
    assert set(data.train.classes) == {
        f"crane ({CRANE_BIRD})",
        f"crane ({CRANE_MACHINE})",
        "Pembroke",
        f"Cardigan ({CARDIGAN_DOG})",
        f"cardigan ({CARDIGAN})",
        "n99999999",
    }
    assert data.train.counts() == dict.fromkeys(data.train.classes, 3)
    assert data.siblings == (("corgi", "Pembroke", f"Cardigan ({CARDIGAN_DOG})"),)
    assert data.domains[f"crane ({CRANE_BIRD})"] == "animate"
    assert data.domains[f"crane ({CRANE_MACHINE})"] == "inanimate"


def test_a_merged_name_that_is_taken_is_left_out(tmp_path: Path) -> None:
    put_synsets(tmp_path, [GOLDFISH, ACOUSTIC, ELECTRIC])
    (tmp_path / "words.txt").write_text(f"{GOLDFISH}\tGuitar\n{ACOUSTIC}\ta\n{ELECTRIC}\tb\n")
    assert resolve(str(tmp_path)).siblings == ()


def test_more_than_200_synsets_are_imagenet(tmp_path: Path) -> None:
    synsets = [f"n{number:08d}" for number in range(1, 202)]
    for name, some in (("small", synsets[:200]), ("large", synsets)):
        put_synsets(tmp_path / name, some, train=1, val=1)
        (tmp_path / name / "words.txt").write_text("".join(f"{synset}\tthing {synset}\n" for synset in some))
    assert resolve(str(tmp_path / "small")).name == "tiny-imagenet-200"
    assert resolve(str(tmp_path / "large")).name == "imagenet-1k"


def test_synsets_that_are_half_unpacked(tmp_path: Path) -> None:
    put_synsets(tmp_path, [GOLDFISH])
    put_image(tmp_path / "val" / ACOUSTIC / "1.JPEG")
    with pytest.raises(BranchoutError, match=f"No training images .*{ACOUSTIC}"):
        resolve(str(tmp_path))


def test_missing_synsets_say_where_what_and_how(tmp_path: Path) -> None:
    (tmp_path / "wnids.txt").touch()
    with pytest.raises(BranchoutError, match=r"contains wnids\.txt") as caught:
        resolve(str(tmp_path))
    for word in ("tiny-imagenet-200.zip", "CS231n", str(tmp_path), "train/<synset>/"):
        assert word in str(caught.value)


def test_shipped_siblings_are_synsets_of_imagenet() -> None:
    from timm.data import ImageNetInfo

    import branchout.data

    known = set(ImageNetInfo().label_names())
    groups = json.loads((Path(branchout.data.__path__[0]) / "siblings.json").read_text())
    members = [synset for _, synsets in groups for synset in synsets]
    assert len(groups) > 50
    assert len({parent for parent, _ in groups}) == len(groups)
    assert set(members) <= known
    assert len(set(members)) == len(members)
    assert all(len(synsets) >= 2 and synsets == sorted(synsets) for _, synsets in groups)


# Any folder.


def put_classes(root: Path, **counts: int) -> None:
    for seed, (name, count) in enumerate(counts.items()):
        for number in range(count):
            put_image(root / name / f"{number}.png", 1000 * seed + number)


def test_a_part_of_each_class_is_held_out(tmp_path: Path) -> None:
    put_classes(tmp_path, cat=20, dog=2, emu=1)
    data = resolve(str(tmp_path))
    assert data.train.counts() == {"cat": 16, "dog": 1, "emu": 1}
    assert data.val.counts() == {"cat": 4, "dog": 1}
    assert set(data.train.ids).isdisjoint(data.val.ids)
    assert folder(tmp_path).val.ids.tolist() == data.val.ids.tolist()
    put_classes(tmp_path, cat=21)
    moved = set(folder(tmp_path).val.ids) ^ set(data.val.ids)
    assert len(moved) <= 2


@pytest.mark.parametrize(("first", "second"), [("train", "val"), ("train", "test"), ("Training", "validation")])
def test_train_and_val_are_used_where_they_are(tmp_path: Path, first: str, second: str) -> None:
    put_classes(tmp_path / first, cat=3, dog=2)
    put_classes(tmp_path / second, cat=1)
    data = resolve(str(tmp_path))
    assert data.train.counts() == {"cat": 3, "dog": 2}
    assert data.val.ids.tolist() == [f"{second}/cat/0.png"]
    put_classes(tmp_path / second, emu=1)
    with pytest.raises(BranchoutError, match=r"No training images .*emu"):
        folder(tmp_path)


def test_a_folder_reports_what_was_wrong(tmp_path: Path) -> None:
    put_classes(tmp_path, cat=3)
    (tmp_path / "cat/broken.jpg").write_bytes(b"\xff\xd8\xff")
    problems: list[str] = []
    data = folder(tmp_path, problems=problems)
    assert len(data.train) + len(data.val) == 3
    assert problems[0].startswith((f"1 {Kind.TRUNCATED}: cat/broken.jpg", f"1 {Kind.CORRUPT}: cat/broken.jpg"))
    assert len(problems) == 1


# Whatever a text means.


def test_an_unknown_name_is_answered_with_all_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BranchoutError) as caught:
        resolve("cifar")
    for words in ("'cifar'", str(tmp_path / "cifar"), "glyphs", "CIFAR-100", "Tiny-ImageNet", "ImageNet", "your own"):
        assert words in str(caught.value)


def test_glyphs_are_built_in() -> None:
    assert resolve("glyphs").kind == "glyph"


def test_importing_is_light() -> None:
    code = "import sys, branchout.data.datasets; print({'torch', 'torchvision', 'timm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
