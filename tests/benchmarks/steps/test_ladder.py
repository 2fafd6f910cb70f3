"""The ladder: rows that are measured once, tables that say what is not measured, oracles that cannot lose."""

import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.steps import __main__ as command
from benchmarks.steps import candidates, ladder, table
from benchmarks.steps.candidates import Candidate, WeightMeans
from benchmarks.steps.ladder import CANDIDATES, LADDER, RUNGS, Run
from branchout.errors import BranchoutError
from branchout.labels import LabelSpace
from branchout.method.running.effort import VIEWS
from branchout.model.classifier import Classifier
from branchout.training.loop import best_device

SMALL = ["--data", "glyphs", "--base-classes", "6", "--novel-classes", "2", "--steps", "2", "--width", "8"]
SHORT = ["--base-epochs", "1", "--epochs", "1", "--exemplars", "2"]
MEASURED = [*LADDER, "compact", "joint-head", "deeper", "mixed", "averaged", "by-difficulty", "fused", "no-exemplars"]
"""All but the candidates that only have other settings."""
EVERY = ["--one-branch-epochs", "2", "--rungs", *MEASURED]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rungs on a few characters, and a page with their table."""
    folder = tmp_path_factory.mktemp("ladder")
    page = folder / "page.md"
    page.write_text(f"# Title\n\n{table.START}\nold\n{table.END}\n\nAfter.\n")
    out = ["--out", str(folder / "results"), "--page", str(page)]
    command.main([*SMALL, *SHORT, *EVERY, *out])
    models: list[Classifier] = []
    halves = Run.halves
    with patch.object(Run, "halves", lambda run, model: models.append(model) or halves(run, model)):
        for words in ([], ["--no-corrections"]):
            command.main([*SMALL, *SHORT, "--rungs", "ours" if words else "short", *words, *out])
    assert [[step.correction is not None for step in model.steps] for model in models] == [[False, True], [False] * 2]
    return folder


def rows(folder: Path) -> dict[str, dict[str, object]]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "results/steps/glyphs-resnet10").glob("*")}


def test_every_rung_has_a_row_and_a_line(measured: Path) -> None:
    found = rows(measured)
    assert set(found) == {*MEASURED, "short", "ours-no-corrections"}
    for row in found.values():
        assert row["per_seed"] == [row["metrics"]]  # of one seed
        assert row["two_fold_per_seed"] == [row["two_fold"]]
    text = (measured / "page.md").read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\n\nAfter.\n")
    assert "old\n" not in text
    of_glyphs = text.split("### glyphs-resnet10")[1].split("###")[0]
    assert of_glyphs.count("\n| ") == 1 + len(found)  # the heading; there is no joint training
    assert "Not measured" not in of_glyphs
    for name, row in found.items():
        assert set(row["two_fold"]) == {"all", "balanced", "avg"}, name  # type: ignore[arg-type]
        assert row["steps"] == 2
        assert f"| [{row['label']}](../results/steps/glyphs-resnet10/{name}.json) |" in of_glyphs
    assert found["ours-no-corrections"]["label"] != found["ours"]["label"]
    assert "--no-corrections" in str(found["ours-no-corrections"]["command"])
    assert "--no-corrections" not in str(found["ours"]["command"])


def test_oracles_on_the_same_logits_are_no_worse(measured: Path) -> None:
    found = rows(measured)
    for goal in ("all", "balanced", "avg"):
        ours = found["ours"]["two_fold"][goal]  # type: ignore[index]
        assert found["perfect-dial"]["two_fold"][goal] >= ours  # type: ignore[index]
        assert found["perfect-routing"]["two_fold"][goal] >= ours  # type: ignore[index]


def test_existing_rows_are_kept_and_others_refused(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(measured / "results"), "--page", str(measured / "page.md")]
    before = (measured / "page.md").read_text()
    command.main([*SMALL, *SHORT, *out])
    assert "rows exist" in capsys.readouterr().out
    assert (measured / "page.md").read_text() == before
    with pytest.raises(BranchoutError, match="other settings"):
        command.main([*SMALL, *SHORT, "--seeds", "1", "2", *out])


def test_rungs_without_corrections_are_not_measured_twice(measured: Path) -> None:
    out = ["--out", str(measured / "results"), "--page", str(measured / "page.md")]
    with pytest.raises(BranchoutError, match="none of these rungs: one-branch, corrections"):
        command.main([*SMALL, *SHORT, "--rungs", "one-branch", "corrections", "--no-corrections", *out])


def test_a_candidate_sets_the_number_of_views(tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stopped(extension: ladder.Extension) -> None:
        seen.append(extension.plan.effort.views)
        raise StoppedError

    seen: list[int] = []
    (tmp_path / "page.md").write_text(f"{table.START}\n{table.END}\n")
    out = ["--out", str(tmp_path), "--page", str(tmp_path / "page.md")]
    for views in (None, 7):
        rung = ladder.Rung("views", ladder.candidate(Candidate(views=views)))
        with (
            patch.dict(RUNGS, {"four-views": rung}),
            patch.object(ladder.Extension, "train_branch", stopped),
            pytest.raises(StoppedError),
        ):
            command.main([*SMALL, *SHORT, "--rungs", "four-views", *out])
    assert seen == [VIEWS[best_device().type], 7]
    assert candidates.CANDIDATES["four-views"][1].views == VIEWS["cpu"] == 4


def test_without_rows_nothing_is_claimed(tmp_path: Path) -> None:
    (tmp_path / "steps" / "glyphs-resnet10").mkdir(parents=True)
    assert table.tables(tmp_path) == ""


def test_rungs_without_a_row_are_named_and_candidates_are_left_out(measured: Path, tmp_path: Path) -> None:
    folder = tmp_path / "steps" / "glyphs-resnet10"
    folder.mkdir(parents=True)
    (folder / "ours.json").write_bytes((measured / "results/steps/glyphs-resnet10/ours.json").read_bytes())
    text = table.tables(tmp_path)
    missing = " ".join(text.split("Not measured:")[1].split())
    assert all(rung.label in missing for name, rung in LADDER.items() if name != "ours")
    assert not any(rung.label in text for rung in CANDIDATES.values())


def test_outdated_rows_are_marked_with_the_reason(measured: Path, tmp_path: Path) -> None:
    folder = tmp_path / "steps" / "glyphs-resnet10"
    folder.mkdir(parents=True)
    for name in ("ours", "compact"):
        row = json.loads((measured / f"results/steps/glyphs-resnet10/{name}.json").read_text())
        if name == "compact":
            row["outdated"] = "it learned too little"
        (folder / f"{name}.json").write_text(json.dumps(row))
    text = table.tables(tmp_path)
    assert f"| [{RUNGS['compact'].label}](../results/steps/glyphs-resnet10/compact.json) † |" in text
    assert f"| [{RUNGS['ours'].label}](../results/steps/glyphs-resnet10/ours.json) |" in text
    assert "it learned too little" in text


def test_an_outdated_row_of_joint_training_is_marked_with_the_reason(measured: Path, tmp_path: Path) -> None:
    folder, beside = tmp_path / "steps" / "glyphs-resnet10", tmp_path / "glyphs" / "multistep" / "resnet10"
    row = json.loads((measured / "results/steps/glyphs-resnet10/ours.json").read_text())
    for place, told in ((folder / "ours.json", {}), (beside / "joint-dial-balanced.json", {"outdated": "its rate"})):
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps({**row, **told}))
    text = table.tables(tmp_path)
    assert "(../results/glyphs/multistep/resnet10/joint-dial-balanced.json) † |" in text
    assert "† To be measured again: its rate." in text


def test_where_ours_is_measured_without_corrections_only_that_is_compared_with(measured: Path, tmp_path: Path) -> None:
    folder = tmp_path / "steps" / "glyphs-resnet10"
    folder.mkdir(parents=True)
    found = rows(measured)
    for name in ("ours-no-corrections", "one-branch"):
        (folder / f"{name}.json").write_text(json.dumps(found[name]))
    text = table.tables(tmp_path)
    apart = [found["one-branch"]["two_fold"][goal] - found["ours-no-corrections"]["two_fold"][goal]  # type: ignore[index]
             for goal in ("all", "balanced", "avg")]  # fmt: skip
    assert f"| {' / '.join(f'{value:+.1f}' for value in apart).replace('-', '−')} |" in text
    assert RUNGS["ours"].label not in " ".join(text.split("Not measured:")[1].split()).split("; ")


def test_a_page_without_the_marks_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("nothing")
    for page in ("page.md", "missing.md"):
        with pytest.raises(BranchoutError, match="no place"):
            command.main([*SMALL, *SHORT, "--out", str(tmp_path / "results"), "--page", str(tmp_path / page)])
    assert not (tmp_path / "results").exists()


def test_confusion_is_the_share_of_images_nearer_to_another_mean() -> None:
    angles = torch.tensor([0.0, 0.1, 1.4, 1.5, 1.6, 1.7])  # the third belongs to the first class and lies in the second
    found = ladder.confusion(torch.stack([angles.cos(), angles.sin()], dim=1), np.array([0, 0, 0, 1, 1, 1]))
    assert found.tolist() == pytest.approx([1 / 3, 0])


def test_running_means_of_weights_replace_them() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    means = WeightMeans([layer])
    torch.nn.init.ones_(layer.weight)
    for _ in range(2):
        means.update()
    means.use()
    assert layer.weight.item() == pytest.approx(1 - (1 - WeightMeans.SHARE) ** 2)


def test_one_offset_moves_all_new_classes_alike() -> None:
    space = LabelSpace.of("ab", "c", "d")

    class Fixed:
        steps = 2

        @staticmethod
        def space(step: int) -> LabelSpace:
            return space

    rng = np.random.default_rng(0)
    halves = [(rng.normal(size=(40, 4)), rng.integers(4, size=40)) for _ in range(2)]
    scores = ladder.one_offset(Run(Fixed()), (halves[0], halves[1]))  # type: ignore[arg-type]
    for goal, scored in scores.items():
        (b,) = scored.setting
        said = (halves[1][0] + np.array([0, 0, b, b])).argmax(1)
        assert scored.test.all == pytest.approx((said == halves[1][1]).mean()), goal
