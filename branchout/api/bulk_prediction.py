"""Predict very many images into one table, on this machine or on a Dask cluster.

Images are predicted in parts. Every finished part is a file in a work folder beside the table: a run that was stopped
resumes, and no image is predicted twice. Rows are in the order of the files, whichever worker predicted them. The
workers of a cluster need the same paths: a shared file system, and Branchout installed.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from branchout.api.loading import load
from branchout.data.decode import UnreadableImage, decode
from branchout.data.samples import digest
from branchout.data.verify import ImageFile
from branchout.errors import BranchoutError, printable
from branchout.files import atomic_write, check_output, checksum, read_json, write_json
from branchout.model.manifest import MANIFEST, is_saved_model
from branchout.progress import Event, OnProgress, silent
from branchout.training.work_folder import working_on

if TYPE_CHECKING:
    from distributed import Client

    from branchout.api.model import Model
    from branchout.api.predictor import Prediction

PART = 256
"""Images of one part: a minute of work on a CPU for a large network, so that little is lost with a worker."""
TOGETHER = 32
"""Images that are decoded before the network runs."""


class Answer(TypedDict):
    """One row of the table: the most probable classes of a file, or why it has none."""

    file: str
    classes: list[str]
    probabilities: list[float]
    problem: str | None


@dataclass(frozen=True)
class Settings:
    """How every part is answered."""

    model: str
    top: int = 3
    flip: bool = False
    device: str | None = None
    version: str = ""
    """A checksum of the model's description: a worker that has opened the model before opens it again if it changed."""


def predict_files(
    settings: Settings,
    files: Sequence[ImageFile],
    out: Path,
    *,
    dask: str | None = None,
    on_progress: OnProgress = silent,
) -> int:
    """Answer every file and write the table `out` (.csv, .jsonl or .parquet); returns how many could not be read.

    `dask` is the address of a Dask scheduler, whose workers answer the parts.
    """
    writer = _writer(out)
    check_output(out, free=True)
    parts = [[file.absolute() for file in files[start : start + PART]] for start in range(0, len(files), PART)]
    folder = Path(settings.model).absolute()
    if is_saved_model(folder):
        settings = replace(settings, model=str(folder), version=checksum(folder / MANIFEST))
    if dask is None:
        _opened(settings.model, settings.device, settings.version)  # a wrong name is no run that could be resumed
    names = digest(*(os.fsencode(name) for part in parts for name in part))
    with working_on(out, {**asdict(settings), "device": None, "files": names}) as work:
        assert work is not None
        places = [work / f"part-{number:06}.json" for number in range(len(parts))]
        missing = [number for number, place in enumerate(places) if not place.exists()]
        done = sum(len(part) for part in parts) - sum(len(parts[number]) for number in missing)
        with closing(_answered(settings, {number: parts[number] for number in missing}, dask)) as answered:
            for number, answers in answered:
                write_json(places[number], answers, indent=None)
                done += len(answers)
                on_progress(Event("Predicting", done, len(files)))
        with atomic_write(out) as partial:
            writer(partial, (read_json(place) for place in places), settings.top)
        return sum(answer["problem"] is not None for place in places for answer in read_json(place))


# Answering.


def _answered(
    settings: Settings, parts: Mapping[int, list[ImageFile]], dask: str | None
) -> Generator[tuple[int, list[Answer]], None, None]:
    """The answers of numbered parts, in any order."""
    if dask is None:
        yield from ((number, answer_part(settings, files)) for number, files in parts.items())
        return
    with dask_client(dask) as client:
        from distributed import KilledWorker, as_completed

        # Not pure: Dask would otherwise take equal parts of two runs for one and keep their answers.
        waiting = {client.submit(answer_part, settings, files, pure=False): n for n, files in parts.items()}
        for future in as_completed(waiting):
            try:
                yield waiting.pop(future), future.result()
            except KilledWorker as error:
                raise BranchoutError(
                    f"A part was tried on several workers, and all of them ended: {error}. The others are kept: "
                    "start workers with more memory, and run the same command again"
                ) from None


@contextmanager
def dask_client(address: str) -> Iterator[Client]:
    try:
        from distributed import Client
    except ImportError:
        raise BranchoutError("--dask needs the extra 'cluster': pip install 'branchout[cluster]'") from None
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise BranchoutError(f"No Dask scheduler answers at {address}: {error}") from None
    with client:
        yield client


def answer_part(settings: Settings, files: Sequence[ImageFile]) -> list[Answer]:
    """The answers of some files, in their order; runs on a worker."""
    model = _opened(settings.model, settings.device, settings.version)
    answers: list[Answer] = []
    for start in range(0, len(files), TOGETHER):
        some = files[start : start + TOGETHER]
        readable, problems = {}, {}
        for file in some:
            try:
                readable[file] = decode(file)
            except UnreadableImage as error:
                problems[file] = printable(str(error))
        predicted = model.predict(list(readable.values()), top=settings.top, flip=settings.flip)
        found = dict(zip(readable, predicted, strict=True))
        answers += [_answer(file, found.get(file, []), problems.get(file)) for file in some]
    return answers


def _answer(file: ImageFile, prediction: Prediction, problem: str | None) -> Answer:
    names, probabilities = [name for name, _ in prediction], [round(p, 6) for _, p in prediction]
    return {"file": printable(file), "classes": names, "probabilities": probabilities, "problem": problem}


@lru_cache(1)
def _opened(model: str, device: str | None, version: str) -> Model:
    """The model of a worker, opened once for all parts; `version` is only part of the key."""
    return load(model, device=device)


# Writing.

Parts = Iterator[list[Answer]]


def _writer(out: Path) -> Callable[[Path, Parts, int], None]:
    writers = {".csv": _write_csv, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
    if out.suffix not in writers:
        raise BranchoutError(f"{out} has no known ending. Name a table that ends in {', '.join(writers)}")
    if out.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise BranchoutError(
                f"{out} needs the extra 'cluster': pip install 'branchout[cluster]'. Or write a .csv or .jsonl file"
            ) from None
    return writers[out.suffix]


def _row(answer: Answer, top: int) -> dict[str, str | float | None]:
    row: dict[str, str | float | None] = {"file": answer["file"]}
    for n in range(top):
        there = n < len(answer["classes"])
        row[f"class_{n + 1}"] = answer["classes"][n] if there else None
        row[f"probability_{n + 1}"] = answer["probabilities"][n] if there else None
    return {**row, "problem": answer["problem"]}


def _columns(top: int) -> list[str]:
    return list(_row({"file": "", "classes": [], "probabilities": [], "problem": None}, top))


def _write_csv(path: Path, parts: Parts, top: int) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _columns(top))
        writer.writeheader()
        for part in parts:
            writer.writerows(_row(answer, top) for answer in part)


def _write_jsonl(path: Path, parts: Parts, _: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for part in parts for answer in part)


def _write_parquet(path: Path, parts: Parts, top: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = _columns(top)
    schema = pa.schema([(name, pa.float64() if name.startswith("probability") else pa.string()) for name in names])
    with pq.ParquetWriter(path, schema) as writer:
        for part in parts:
            writer.write_table(pa.Table.from_pylist([_row(answer, top) for answer in part], schema))
