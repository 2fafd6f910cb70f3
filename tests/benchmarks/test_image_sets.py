"""The image sets of `benchmarks.image_sets`, from small packages made here."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import image_sets
from branchout.data import folders


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """Both packages: three folders of clip art, of which one has too few pictures, and grey images of ten classes."""
    share, rng = tmp_path / "share", np.random.default_rng(0)
    for name, count in (("animals/fish", 22), ("animals/bugs", 22), ("tools", 5), ("unsorted", 30)):
        folder = share / "openclipart" / "png" / name
        folder.mkdir(parents=True)
        for number in range(count):
            Image.fromarray(rng.integers(0, 255, (9, 9, 4), dtype=np.uint8)).save(folder / f"{number}.png")
    twice = share / "openclipart" / "png" / "animals"
    (twice / "bugs" / "0.png").write_bytes((twice / "fish" / "0.png").read_bytes())
    (share / "datasets" / "fashion-mnist").mkdir(parents=True)
    for part, count in (("train", 400), ("t10k", 500)):
        labels = np.arange(count, dtype=np.uint8) % 10
        pixels = np.repeat(labels[:, None], 28 * 28, axis=1)  # the class is the brightness
        for name, values, dimensions in (("labels-idx1", labels, 1), ("images-idx3", pixels, 3)):
            header = bytes([0, 0, 8, dimensions]) + bytes(4 * dimensions)
            path = share / "datasets" / "fashion-mnist" / f"{part}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(header + values.tobytes()))
    return share


def made(name: str, share: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    old, test, out = share.parent / "old", share.parent / "test", share.parent / name
    for folder in (old / "owl", old / "newt", test / "owl", test / "rose"):
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / "1.png")
    words = [name, str(out), "--old", str(old), "--old-test", str(test), "--share", str(share)]
    monkeypatch.setattr(sys, "argv", ["image_sets", *words])
    image_sets.main()
    return out


def test_clip_art_has_no_picture_twice_and_no_small_or_unsorted_folder(
    share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = made("clip-art", share, monkeypatch)
    names = ["clip art, animals bugs", "clip art, animals fish"]
    assert sorted(path.name for path in (out / "new").iterdir()) == names
    assert sorted(path.name for path in (out / "test").iterdir()) == [*names, "owl"]  # a class of OLD/ and of TEST/
    for name in names:
        counts = [len(list((out / part / name).iterdir())) for part in ("new", "test")]
        assert counts == [image_sets.TRAIN, 21 - image_sets.TRAIN]
    assert list(folders.scan(out / "new")[1]) == []


def test_garments_train_and_test_on_images_of_their_parts(share: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = made("garments", share, monkeypatch)
    for label, name in enumerate(image_sets.GARMENTS):
        for part, count in (("new", image_sets.TRAIN), ("test", image_sets.TEST)):
            images = [np.asarray(Image.open(path)) for path in (out / part / name).iterdir()]
            assert len(images) == count
            assert all((image == label).all() for image in images)


def test_a_folder_that_exists_is_not_overwritten(
    share: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made("garments", share, monkeypatch)
    with pytest.raises(SystemExit):
        made("garments", share, monkeypatch)
    assert "already exists" in capsys.readouterr().err
