"""What a row says of the code and of the base that made it, and how rows come to disk."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from branchout.bench.rows import command, commit, on_another_base, write_together


def git(where: Path, *arguments: str) -> str:
    names = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    return subprocess.run(["git", *names, *arguments], cwd=where, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("BRANCHOUT_COMMIT", raising=False)
    for name in ("branchout/__init__.py", "results/row.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "all")
    return tmp_path


def test_the_commit_is_that_of_the_code(repository: Path) -> None:
    assert commit(repository / "branchout") == git(repository, "rev-parse", "HEAD")[:12]


def test_a_row_made_again_does_not_make_the_code_another(repository: Path) -> None:
    (repository / "results" / "row.json").unlink()
    assert not commit(repository / "branchout").endswith("-dirty")


@pytest.mark.parametrize("name", ["__init__.py", "new.py"])
def test_changed_code_is_marked(repository: Path, name: str) -> None:
    (repository / "branchout" / name).write_text("changed\n")
    assert commit(repository / "branchout") == git(repository, "rev-parse", "HEAD")[:12] + "-dirty"


def test_installed_in_another_repository_it_has_no_commit(repository: Path) -> None:
    installed = repository / ".venv" / "branchout"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    assert commit(installed) == "unknown"


def test_without_git_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BRANCHOUT_COMMIT", "abc")
    assert commit(tmp_path) == "abc"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["/opt/bin/branchout", "bench", "sota", "--data", "my data"], "branchout bench sota --data 'my data'"),
        (["/opt/branchout/__main__.py", "bench", "all"], "branchout bench all"),
        (["/opt/repository/benchmarks/demo.py", "--out", "results"], "python benchmarks/demo.py --out results"),
    ],
)
def test_a_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch, typed: list[str], told: str) -> None:
    monkeypatch.setattr("sys.argv", typed)
    assert command() == told


def test_rows_that_belong_together_come_together_or_not_at_all(tmp_path: Path) -> None:
    rows = {tmp_path / "rows" / f"{name}.json": {"name": name} for name in "abc"}
    assert write_together(rows) == list(rows)
    assert [json.loads(path.read_text()) for path in rows] == list(rows.values())
    endless: dict[str, object] = {}
    endless["itself"] = endless  # which no JSON can hold
    with pytest.raises(ValueError, match="Circular"):
        write_together({tmp_path / "x.json": {}, tmp_path / "y.json": endless})
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize(
    ("bases", "odd"),
    [
        ([("one", 60.0), ("one", 60.02), ("one", 60.0)], ""),  # measured on another machine
        ([("one", 60.0), ("two", 60.0), ("one", 60.0)], "b"),
        ([("one", 60.0), (None, 60.0), ("one", 60.02)], ""),
        ([(None, 60.0), ("two", 60.0), ("one", 60.0), ("one", 60.0)], "b"),
        ([("one", 60.0), (None, 61.0), ("one", 60.02)], "b"),
        ([(None, 60.0), (None, 60.0), (None, 61.0)], "c"),
        ([(None, 60.0), (None, 60.0), ("one", 61.0)], "c"),
    ],
)
def test_a_base_is_known_by_its_digest_and_else_by_its_accuracy(
    bases: list[tuple[str | None, float]], odd: str
) -> None:
    rows = {
        Path("folder") / name: {"base_weights": digest, "base_model": accuracy}
        for name, (digest, accuracy) in zip("abcd", bases, strict=False)
    }
    assert [path.name for path in on_another_base(rows)] == list(odd)


def test_joint_training_starts_from_no_base_and_has_no_other() -> None:
    one, two = {"base_weights": "one", "base_model": 60.0}, {"base_weights": "two", "base_model": 60.0}
    rows = {Path("a"): one, Path("b"): one, Path("c"): {**two, "method": "joint"}, Path("d"): {**two, "method": "wa"}}
    assert on_another_base(rows) == [Path("d")]
    # Nor does it decide which base is the usual one.
    rows = {Path("a"): one, **{Path(name): {**two, "method": "joint"} for name in "bc"}}
    assert on_another_base(rows) == []
