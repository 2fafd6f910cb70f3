"""How unknown classes are measured, and that the page and the default score are those of the measured rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.unknown import Case, Unknown, detection, grouping, photo_case, summary
from benchmarks.unknown_scores import SCORES, KnownImages
from branchout.evaluate.unknown import FALSE_ALARMS, Outputs

ROOT = Path(__file__).parents[2]
ROWS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "results" / "unknown").glob("*.json")}


def around(directions: np.ndarray, seed: int) -> tuple[Outputs, np.ndarray]:
    """Ten images around each of some directions; the logits know the first four."""
    labels = np.repeat(np.arange(len(directions)), 10)
    features = directions[labels] + 0.05 * np.random.default_rng(seed).normal(size=(len(labels), 8))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return Outputs(10 * features[:, :4], features), labels


def test_images_that_are_far_from_all_classes_are_found_and_grouped() -> None:
    known, unknown = np.eye(8)[:4], np.eye(8)[4:]
    case = Case(
        KnownImages(*around(known, 0)),
        {"dev": around(known, 1)[0], "report": around(known, 2)[0]},
        {"dev": Unknown(*around(unknown, 3))},
        1.0,
    )
    for figures in detection(case, "dev").values():
        assert figures["auroc"] == pytest.approx(100)
        assert figures["found_memory"] == figures["found_held_out"] == 100
        assert figures["false_alarms_memory"] < 50
    assert grouping(case, "dev", 2) == {"groups": 2, "rand_index": 100, "purity": 100}
    assert summary([{"a": 1.0}, {"a": 3.0}]) == {"a": 2.0, "a_std": 1.0}


def test_a_case_of_photos_keeps_its_images_apart() -> None:
    directions = np.eye(8)
    (train, labels), (held, held_labels) = around(directions, 0), around(directions, 1)
    case = photo_case(
        (train.features, held.features), (labels, held_labels), (np.arange(4), np.array([4, 5]), np.array([6, 7])), 0
    )
    assert case.accuracy == 1
    assert sorted(set(case.unknown["dev"].labels.tolist())) == [4, 5]
    assert sorted(set(case.unknown["report"].labels.tolist())) == [6, 7]
    assert len(case.known["dev"].logits) + len(case.known["report"].logits) == 40
    assert case.memory.outputs.logits.shape == (20, 4)


def test_the_default_score_is_the_best_on_the_development_classes() -> None:
    chosen_on = [row["dev"]["scores"] for row in ROWS.values() if "dev" in row]
    assert len(chosen_on) == 2
    means = {kind: np.mean([scores[kind]["auroc"] for scores in chosen_on]) for kind in SCORES}
    assert max(means, key=means.__getitem__) == "energy"


def test_the_page_shows_the_measured_numbers() -> None:
    lines = (ROOT / "docs" / "inbox.md").read_text(encoding="utf-8").splitlines()
    for name, row in ROWS.items():
        assert row["false_alarms"] == FALSE_ALARMS
        scores = row["report"]["scores"]
        energy = scores["energy"]
        figures = [*(scores[kind]["auroc"] for kind in SCORES), *(energy[f"found_{s}"] for s in ("held_out", "memory"))]
        figures.append(energy["false_alarms_memory"])
        [line] = [each for each in lines if f"results/unknown/{name}.json" in each]
        assert [cell.strip() for cell in line.strip("|").split("|")][1:-1] == [f"{value:.1f}" for value in figures]
    text = " ".join(lines)
    for classes in (2, 20):
        ordered = ("glyphs", "tiny-imagenet-200", "imagenet-flowers")
        shares = [f"{ROWS[name]['report']['groups'][f'{classes} classes']['purity']:.1f}" for name in ordered]
        assert "{}, {} and {}%".format(*shares) in text
