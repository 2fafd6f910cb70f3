"""The shipped base model, and the demo from beginning to end."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from branchout import api, demo
from branchout.data.draw_scenario import draw_scenario
from branchout.data.glyphs import glyphs
from branchout.errors import BranchoutError
from branchout.progress import silent

ASSET = Path(demo.__file__).parent / "assets" / "glyphs-base"
MADE = json.loads((ASSET / "branchout.json").read_text())["history"][0]


def test_the_shipped_base_is_small_and_made_by_pretrain() -> None:
    assert sum(path.stat().st_size for path in ASSET.iterdir()) <= 1_500_000
    assert MADE["what"] == "pretrain"


def test_the_shipped_base_knows_what_its_history_says() -> None:
    data = glyphs()
    plan = draw_scenario("overlap-style", data, base=demo.BASE, novel=demo.NOVEL, overlap=demo.OVERLAP)
    base = api.load("glyphs")
    assert base.classes == plan.branches[0]
    accuracy = base.evaluate(plan.test(data, step=0)).after.all
    assert accuracy == pytest.approx(MADE["accuracy"], abs=0.005)


def test_the_demo_from_beginning_to_end(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "branchout"), "demo", "--out", str(tmp_path / "demo")]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    print(f"the demo took {time.perf_counter() - start:.0f} s")
    assert done.returncode == 0, done.stderr
    assert "balanced" in done.stdout
    *_, served = (line.split() for line in done.stdout.splitlines() if "branchout serve" in line)
    assert all(Path(each).is_dir() for each in served if each.startswith(str(tmp_path)))
    assert {"--inbox", "--memory"} < set(served)
    assert (tmp_path / "demo" / "predictions.png").stat().st_size > 10_000
    assert "Accuracy on 8,350 labelled images" in (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4_000_000  # kilobytes

    grown = api.load(tmp_path / "demo" / "v2")
    assert len(grown.classes) == demo.BASE + demo.NOVEL - demo.OVERLAP
    measured = grown.saved.history[-1]["measured"]
    assert measured["after"]["novel"] > 0.8
    assert measured["after"]["base"] > measured["before"]["base"] - 0.05
    assert measured["after"]["overlap"] > measured["before"]["overlap"]
    folder = tmp_path / "demo"
    assert sorted(path.name for path in (folder / "test").iterdir()) == sorted(grown.classes)
    assert sorted(path.name for path in (folder / "old").iterdir()) == sorted(api.load("glyphs").classes)
    assert len(list((folder / "photos").glob("*.png"))) == 10
    assert not set(demo.UNKNOWN) & set(grown.classes)


@pytest.mark.parametrize("name", demo.FOLDERS)
def test_folders_of_others_are_not_replaced(name: str, tmp_path: Path) -> None:
    photo = tmp_path / name / "robin.jpg"
    photo.parent.mkdir()
    photo.write_bytes(b"somebody's photo")
    with pytest.raises(BranchoutError, match=name):
        demo.run(tmp_path, lambda _: None, silent)
    assert photo.read_bytes() == b"somebody's photo"
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
