"""Files bear their name only when they are whole."""

import csv
import json
from pathlib import Path

import pytest

from branchout.errors import BranchoutError
from branchout.files import check_place, in_one_move, write_csv, write_json


def test_a_file_gets_its_name_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "table.txt"
    with in_one_move(out) as partial:
        partial.write_text("half")
        assert not out.exists()
        partial.write_text("whole")
    assert out.read_text() == "whole"
    assert [path.name for path in out.parent.iterdir()] == ["table.txt"]


@pytest.mark.parametrize("failure", [RuntimeError("no"), BranchoutError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, failure: BaseException) -> None:
    out = tmp_path / "table.txt"
    out.write_text("old")

    def fail() -> None:
        with in_one_move(out) as partial:
            partial.write_text("half")
            raise failure

    with pytest.raises(type(failure)):
        fail()
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_what_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "deeper" / "x.csv"
    for ask in (lambda: check_place(below), lambda: write_csv(below, [{"a": 1}])):
        with pytest.raises(BranchoutError, match=r"x\.csv (cannot|could not) be written"):
            ask()
    with pytest.raises(BranchoutError, match="is a folder; name a file"):
        check_place(tmp_path)
    with pytest.raises(BranchoutError, match="is there already; choose another name"):
        check_place(tmp_path / "file", free=True)
    check_place(tmp_path / "file")
    check_place(tmp_path / "not" / "yet" / "there.csv")
    assert not (tmp_path / "not").exists()  # asking makes nothing
    monkeypatch.setattr("os.access", lambda *_: False)  # whoever runs the tests may be allowed everything
    with pytest.raises(BranchoutError, match="is not yours to write in"):
        check_place(tmp_path / "x.csv")


def test_tables_and_json_survive_commas_quotes_and_other_scripts(tmp_path: Path) -> None:
    rows = [{"class": 'an "owl", грач', "before": None, "after": 0.5}, {"class": "=1+1\nx", "before": 1.0, "after": 0}]
    write_csv(tmp_path / "t.csv", rows)
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [
            ["class", "before", "after"],
            ['an "owl", грач', "", "0.5"],
            ["=1+1\nx", "1.0", "0"],
        ]
    write_json(tmp_path / "t.json", rows)
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8")) == rows
    assert "грач" in (tmp_path / "t.json").read_text(encoding="utf-8")
