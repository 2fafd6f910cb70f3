"""Commands on nested class folders, bursts of photos and tar shards."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from helpers import BASE, LATER, NEW, refused, run, well
from PIL import Image

from branchout import api
from branchout.data.samples import Samples


def png(samples: Samples, index: int, brighter: int = 0) -> bytes:
    buffer = io.BytesIO()
    pixels = np.minimum(samples.read(index)[:, :, 0].astype(int) + brighter, 255).astype(np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write(folder: Path, samples: Samples) -> Path:
    for index, name in enumerate(samples.names):
        path = folder / str(name) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(samples, index))
    return folder


def write_shard(path: Path, samples: Samples) -> Path:
    with tarfile.open(path, "w") as archive:
        for index, name in enumerate(samples.names):
            for ending, content in (("png", png(samples, index)), ("cls", str(name).encode())):
                info = tarfile.TarInfo(f"{index:04}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


def test_nested_folders_stop_a_command_until_one_reading_is_chosen(
    base: api.Model, train: Samples, tmp_path: Path
) -> None:
    new = train.of_classes(LATER)
    for group, name in zip("abcd", LATER, strict=False):
        write(tmp_path / "new" / group, new.of_classes([name]))
    words = ("check", tmp_path / "new", "--base", base.folder)
    refused(run(*words), "--classes-from folders", "--classes-from leaves", *new.classes[:4])
    said = well(run(*words, "--classes-from", "leaves"))
    assert f"new: {len(LATER)} classes" in said
    assert "--classes-from leaves" in said  # the next command needs it too
    refused(run("data", tmp_path / "new"), "--classes-from leaves")
    assert LATER[0] not in well(run("data", tmp_path / "new", "--classes-from", "folders"))


def test_check_says_how_many_near_duplicates_there_are(base: api.Model, train: Samples, tmp_path: Path) -> None:
    new = train.of_classes(NEW[:2])
    write(tmp_path / "new", new)
    for index in range(3):
        (tmp_path / "new" / str(new.names[index]) / f"again{index}.png").write_bytes(png(new, index, brighter=1))
    said = well(run("check", tmp_path / "new", "--base", base.folder))
    assert f"6 of {len(new) + 3} images of new classes are near-duplicates" in said
    assert "3 groups" in said


@pytest.mark.parametrize("source", ["shard", "folder of shards", "range"])
def test_shards_are_evaluated_as_folders_are(source: str, extended: api.Model, val: Samples, tmp_path: Path) -> None:
    samples = val.of_classes([*BASE, *NEW])
    write(tmp_path / "plain", samples)
    (tmp_path / "shards").mkdir()
    half = np.arange(len(samples)) % 2 == 0
    write_shard(tmp_path / "shards/test-0.tar", samples.select(half))
    write_shard(tmp_path / "shards/test-1.tar", samples.select(~half))
    write_shard(tmp_path / "whole.tar", samples)
    place = {"shard": "whole.tar", "folder of shards": "shards", "range": "shards/test-{0..1}.tar"}[source]
    results = [tmp_path / "one.csv", tmp_path / "two.csv"]
    for folder, table in ((tmp_path / place, results[0]), (tmp_path / "plain", results[1])):
        well(run("evaluate", extended.folder, folder, "--csv", table))
    assert results[0].read_text() == results[1].read_text()


def test_shards_are_checked_and_predicted(extended: api.Model, train: Samples, tmp_path: Path) -> None:
    new = train.of_classes(LATER)
    place = write_shard(tmp_path / "new.tar", new)
    said = well(run("check", place, "--base", extended.folder))
    assert f"new: {len(LATER)} classes" in said
    lines = well(run("predict", extended.folder, place)).splitlines()
    assert len(lines) == len(new)
    assert lines[0].startswith(f"{place}/0000.png: ")
    assert lines[0].split(": ", 1)[1].startswith(extended.predict(new.read(0))[0][0])
    out = tmp_path / "answers.csv"
    well(run("predict", extended.folder, place, "--out", out))
    assert len(out.read_text().splitlines()) == len(new) + 1
