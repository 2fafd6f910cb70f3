"""Tables of predictions: every file once and in order, whoever answers, and after every interruption."""

import csv
import json
import os
import signal
from pathlib import Path

import pytest
from dask_cluster import two_workers
from helpers import refused, run, well
from PIL import Image

from branchout import api
from branchout.api import bulk_prediction
from branchout.api.bulk_prediction import Settings, predict_files
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.training.loop import Event


@pytest.fixture(scope="module")
def photos(val: Samples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 images in two folders, one of them damaged."""
    folder = tmp_path_factory.mktemp("photos")
    for n in range(70):
        path = folder / "ab"[n % 2] / f"{n:03}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(val.read(n)[:, :, 0]).save(path)
    damaged = folder / "a" / "010.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    return folder


def expected(model: api.Model, photos: Path) -> list[tuple[str, str | None]]:
    """File and class, each image predicted alone; None for the damaged one."""
    files = sorted(photos.rglob("*.png"))
    return [(str(f), None if f.name == "010.png" else model.predict(f, top=1)[0][0]) for f in files]


def rows(table: Path) -> list[tuple[str, str | None]]:
    with table.open(newline="", encoding="utf-8") as file:
        return [(row["file"], row["class_1"] or None) for row in csv.DictReader(file)]


def files_of(photos: Path) -> list[Path]:
    return sorted(photos.rglob("*.png"))


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_table_of_a_folder(ending: str, extended: api.Model, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / f"answers.{ending}"
    said = well(run("predict", extended.folder, photos, "--out", out, "--top", "2"))
    assert "70 images" in said
    assert "1 of them could not be read" in said
    if ending == "csv":
        found = rows(out)
    elif ending == "jsonl":
        read = [json.loads(line) for line in out.read_text().splitlines()]
        found = [(row["file"], row["classes"][0] if row["classes"] else None) for row in read]
        assert [row["file"] for row in read if row["problem"]] == [str(photos / "a" / "010.png")]
    else:
        import pyarrow.parquet as pq

        table = pq.read_table(out)
        assert table.column_names == ["file", "class_1", "probability_1", "class_2", "probability_2", "problem"]
        found = list(zip(table["file"].to_pylist(), table["class_1"].to_pylist(), strict=True))
    assert found == expected(extended, photos)
    assert list(tmp_path.iterdir()) == [out]


def test_a_stopped_run_resumes_and_answers_nothing_twice(
    extended: api.Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_prediction, "PART", 8)
    answered: list[str] = []
    inner = bulk_prediction.answer_part

    def counted(settings: Settings, files: list[str]) -> list[bulk_prediction.Answer]:
        answered.extend(files)
        return inner(settings, files)

    def stop(event: Event) -> None:
        if event.done >= 24:
            raise KeyboardInterrupt

    monkeypatch.setattr(bulk_prediction, "answer_part", counted)
    out = tmp_path / "answers.csv"
    with pytest.raises(KeyboardInterrupt):
        predict_files(Settings(str(extended.folder)), files_of(photos), out, on_progress=stop)
    assert len(answered) == 24
    assert not out.exists()
    with pytest.raises(BranchoutError, match="top"):  # other settings would mix two tables
        predict_files(Settings(str(extended.folder), top=1), files_of(photos), out)
    predict_files(Settings(str(extended.folder)), files_of(photos), out)
    assert sorted(map(str, answered)) == sorted(map(str, files_of(photos)))
    assert rows(out) == expected(extended, photos)


def test_a_cluster_whose_worker_dies_answers_every_file_once(
    extended: api.Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_prediction, "PART", 2)
    out = tmp_path / "answers.csv"
    with two_workers(tmp_path) as (address, workers):
        os.kill(workers[0].pid, signal.SIGSTOP)  # it is given parts, and will never answer them

        def kill(_: Event) -> None:
            workers[0].kill()

        predict_files(Settings(str(extended.folder)), files_of(photos), out, dask=address, on_progress=kill)
    assert rows(out) == expected(extended, photos)


def test_what_cannot_be_written_is_said_before_any_work(extended: api.Model, photos: Path, tmp_path: Path) -> None:
    refused(run("predict", extended.folder, photos, "--out", tmp_path / "answers.txt"), ".parquet", ".csv")
    refused(run("predict", extended.folder, photos, "--dask", "tcp://127.0.0.1:9"), "--out")
    (tmp_path / "old.csv").write_text("kept")
    refused(run("predict", extended.folder, photos, "--out", tmp_path / "old.csv"), "already exists")
    assert (tmp_path / "old.csv").read_text() == "kept"
