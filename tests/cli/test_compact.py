"""`branchout compact`, as a user types it."""

from pathlib import Path

import pytest
from helpers import BASE, LATER, NEW, exemplars, refused, run, well
from PIL import Image

from branchout import api
from branchout.data.samples import Samples


@pytest.fixture(scope="module")
def kept(train: Samples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five images of every class, in folders."""
    folder = tmp_path_factory.mktemp("kept")
    samples = exemplars(train, [*BASE, *NEW, *LATER])
    for n, name in enumerate(samples.names):
        (folder / name).mkdir(exist_ok=True)
        Image.fromarray(samples.read(n)[..., 0]).save(folder / name / f"{n}.png")
    return folder


def test_it_prints_size_speed_and_accuracy_and_the_model_can_be_used(
    extended_twice: api.Model, kept: Path, tmp_path: Path
) -> None:
    assert extended_twice.folder is not None
    small = tmp_path / "small"
    told = well(run("compact", extended_twice.folder, "--memory", kept, "--out", small, "--epochs", "2"))
    lines = {line.split("│")[1].strip(): line.split("│")[2:4] for line in told.splitlines() if line.count("│") == 4}
    assert [cell.strip() for cell in lines["step branches"]] == ["2", "1"]
    assert {"parameters", "weights on disk", "images a second", "all accuracy in %"} <= lines.keys()
    assert "14 classes" in told
    assert str(small) in told
    assert f"branchout tune {small}" in told
    assert "avg" in well(run("tune", small, "--goal", "avg"))
    picture = next(kept.rglob("*.png"))
    assert well(run("predict", small, picture))
    page = tmp_path / "page.html"
    well(run("report", small, "--out", page))
    assert page.exists()
    again = run("compact", extended_twice.folder, "--memory", kept, "--out", small)
    refused(again, "small", "exists")


def test_refusals(extended: api.Model, kept: Path, tmp_path: Path) -> None:
    assert extended.folder is not None
    refused(run("compact", extended.folder, "--memory", kept, "--out", tmp_path / "small"), "1 step", "extend")
    missing = run("compact", extended.folder, "--out", tmp_path / "small")
    assert missing.status == 2
    assert "--memory" in missing.err


def test_kept_images_may_lie_in_nested_folders(extended: api.Model, kept: Path, tmp_path: Path) -> None:
    """As the folders that the model was extended with: the reading is chosen by the same option."""
    assert extended.folder is not None
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "signs").symlink_to(kept)
    words = ("compact", extended.folder, "--memory", tmp_path / "nested", "--out", tmp_path / "small")
    refused(run(*words), "--classes-from leaves")
    refused(run(*words, "--classes-from", "leaves"), "1 step", "extend")
