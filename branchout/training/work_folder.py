"""The work folder of a run that can be resumed: a hidden folder beside its output with checkpoints and a lock."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from branchout.errors import BranchoutError
from branchout.files import check_output, lock, read_json, sweep_partials, write_json
from branchout.model.manifest import is_saved_model
from branchout.training import processes

_log = logging.getLogger(__name__)
LOCK, SETTINGS = "lock", "request.json"


def work_folder(out: Path) -> Path:
    """Where a run into `out` keeps its checkpoints until it is finished."""
    return out.with_name(f".{out.name}.work")


def check_out(given: str | Path | None, images: Sequence[object] = ()) -> Path | None:
    """The folder to save a model in, if one is given. Raises, before any work is done, if that cannot be.

    It must not lie in a folder of `images`, where it would be read as a class; an entry may be a list of folders.
    """
    out = None if given is None else Path(given)
    if out is not None and processes.is_main():
        if not out.name:
            raise BranchoutError(f"{out} is not a name for a new folder. Choose another --out, such as v2")
        named = [one for each in images for one in (each if isinstance(each, list | tuple) else [each])]
        for folder in (Path(each) for each in named if isinstance(each, str | Path)):
            if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
                beside = [folder.resolve().with_name(name) for name in (out.name, *(f"v{n}" for n in range(2, 100)))]
                outside = next((each for each in beside if not each.exists()), beside[0])
                raise BranchoutError(
                    f"--out {out} lies in the folder of images {folder}, where it would be read as a class. Choose a "
                    f"folder outside it, such as {outside}"
                )
        _remove_finished(out.parent)
        check_output(out, folder=True, free=True)
        check_output(work_folder(out), folder=True)
    return out


@contextmanager
def working_on(out: Path | None, settings: Mapping[str, object]) -> Iterator[Path | None]:
    """The work folder of a run, new or left by the same run when it was stopped; None without `out`.

    It is locked while the block runs, and removed when the block ends without an error. Of several processes of one
    run, the first locks and removes it.
    """
    with processes.connected():
        processes.check_same(settings, "run (its settings or images)")
        if out is None:
            yield None
        elif processes.is_main():
            with _locked(out, settings) as work:
                processes.wait()
                yield work
                processes.wait()
            shutil.rmtree(work, ignore_errors=True)
        else:
            processes.wait()
            yield work_folder(out)
            processes.wait()


@contextmanager
def _locked(out: Path, settings: Mapping[str, object]) -> Iterator[Path]:
    work = work_folder(out)
    with lock(work / LOCK, wait=False) as held:
        if not held:
            raise BranchoutError(f"Another process is writing {out}. Wait for it, or choose another --out")
        if out.exists():
            raise BranchoutError(f"{out} already exists. Choose another name or delete it.")
        sweep_partials(work)
        if (work / SETTINGS).exists():
            _check_same_run(out, work, settings)
            _log.info("The run into %s was stopped, and is resumed.", out)
        write_json(work / SETTINGS, settings)
        yield work


def _check_same_run(out: Path, work: Path, settings: Mapping[str, object]) -> None:
    file = work / SETTINGS
    try:
        before = read_json(file)
        if not isinstance(before, dict):
            raise BranchoutError(f"{file} does not hold the settings of a run")
    except BranchoutError as error:
        raise BranchoutError(f"{error}\nTo start this run again from the beginning, delete {work}") from None
    reseeded = before.get("seed") != settings.get("seed")  # then other images are held out, so all checksums differ
    differing = [
        f"{key}: {_shown(before.get(key))} before, {_shown(settings.get(key))} now"
        for key in {**before, **settings}
        if before.get(key) != settings.get(key) and not (reseeded and _is_checksum(settings.get(key)))
    ]
    if differing:
        raise BranchoutError(
            f"A run into {out} was stopped, and its settings differ from these:\n  "
            + "\n  ".join(differing)
            + f"\nUse the same settings to resume it. To start over, delete {work} or choose another --out."
        )


def _shown(value: object) -> str:
    """A setting; the first digits stand for a checksum."""
    if value is None:
        return "not given"
    return f"checksum {str(value)[:8]}" if _is_checksum(value) else str(value)


def _is_checksum(value: object) -> bool:
    return re.fullmatch("[0-9a-f]{32,}", str(value)) is not None


def _remove_finished(folder: Path) -> None:
    """Remove work folders of runs that were killed after their model was saved."""
    for work in folder.glob(".*.work"):
        if (work / SETTINGS).is_file() and is_saved_model(folder / work.name[1 : -len(".work")]):
            with lock(work / LOCK, wait=False) as free:
                if free:
                    shutil.rmtree(work, ignore_errors=True)
