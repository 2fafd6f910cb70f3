"""Claims hold for the paper's own numbers, fail on a counterexample, and never pass by not being measured."""

from pathlib import Path
from typing import Any

import pytest
from measured import PLACE, alone, papers_own, row, write

from benchmarks.paper import claims, measurements
from benchmarks.paper.claims import CLAIMS, Case, Check, checks
from benchmarks.paper.paper_numbers import paper_number
from benchmarks.paper.report import FIGURES, read
from branchout.bench.tables import figures, tables

OF_TABLES = [claim.key for claim in CLAIMS if claim.places[0][0] not in FIGURES]


def judged(dataset: str, rows: dict[Path, Any]) -> dict[str, Check]:
    return {check.key: check for check in checks(dataset, rows)}


def test_every_claim_has_a_key_of_its_own_and_places_that_the_paper_has() -> None:
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS) >= 11
    for claim in CLAIMS:
        assert claim.places
        for table, arch in claim.places:
            assert table in figures() or (arch in tables()[table].archs and paper_number(table, arch))


@pytest.mark.parametrize("key", OF_TABLES)
def test_the_papers_own_numbers_bear_it_out(key: str) -> None:
    check = judged("paper", papers_own())[key]
    assert [case.verdict for case in check.cases] == ["holds"] * len(check.cases)
    assert check.verdict == "holds"
    assert check.reason is None


class Watched(dict[Path, Any]):
    """Rows that remember who was asked for."""

    def __init__(self, rows: dict[Path, Any]) -> None:
        super().__init__(rows)
        self.asked: set[Path] = set()

    def __contains__(self, path: object) -> bool:
        assert isinstance(path, Path)
        self.asked.add(path)
        return super().__contains__(path)


@pytest.mark.parametrize("key", OF_TABLES)
def test_without_any_row_that_decides_it_is_not_said_to_hold(key: str) -> None:
    claim = next(claim for claim in CLAIMS if claim.key == key)
    whole = papers_own()
    for table, arch in claim.places:
        rows = Watched(whole)
        claim.check(measurements.Measurements("paper", rows), table, arch)
        needed = rows.asked & set(whole)
        assert len(needed) >= 2
        decided = 0
        for absent in needed:
            check = judged("paper", {path: each for path, each in whole.items() if path != absent})[key]
            case = next(case for case in check.cases if (case.table, case.arch) == (table, arch))
            if case.held is None:
                decided += 1
                assert check.verdict in ("not measured", "holds so far")
                assert case.numbers.startswith("no row of ")
            else:
                assert (key, absent.stem) == ("max-pooling", "score-fusion-reference-avg")  # told beside the claim
        assert decided >= 2


COUNTEREXAMPLES = [
    ("near-joint", "disjoint-40/resnet18/joint-plain", {"all": 70.46}),
    ("above-joint", "disjoint-40/resnet18/joint-plain", {"avg": 75.18}),
    ("above-joint", "disjoint-200/resnet10/joint-plain", {"avg": 64.5}),
    ("ten-points", "disjoint-40/resnet10/der-plain", {"all": 53.3}),
    ("above-everyone", "disjoint-40/resnet10/lwf-plain", {"avg": 70.1}),
    ("above-everyone", "disjoint-40/resnet18/wa-plain", {"all": 69.5}),
    ("smaller-wins", "disjoint-40/resnet18/bic-plain", {"avg": 70.1}),
    ("fc-only", "disjoint-40/resnet10/der-plain", {"all": 62.7}),
    ("many-steps", "multistep/resnet18/podnet-plain", {"incremental": 67.5}),
    ("tuned-heads", "disjoint-40/resnet10/featcat-rt-plain", {"avg": 60.0}),
    ("above-table", "disjoint-200/resnet10/learned-routing-plain", {"avg": 64.5}),
    ("above-table", "overlap-full/resnet10/rainbow-plain", {"avg": 63.8}),
    ("above-table", "overlap-full/resnet10/pretrained-plain", {"all": 57.9}),
    ("deeper-branch", "branch-depth/resnet10/score-fusion-layer3-reference-balanced", {"novel": 80.3}),
    ("max-pooling", "overlap-domain-clustered/resnet10/logitcat-average-plain", {"overlap": 72.1}),
]


@pytest.mark.parametrize(("key", "path", "figures"), COUNTEREXAMPLES)
def test_one_counterexample_is_enough(key: str, path: str, figures: dict[str, float]) -> None:
    rows = papers_own()
    place = Path("paper") / f"{path}.json"
    rows[place] = {**rows[place], "metrics": {**rows[place]["metrics"], **figures}}
    check = judged("paper", rows)[key]
    assert check.verdict == "does not hold"
    assert [case.held for case in check.cases].count(False) == 1


def test_every_claim_about_a_table_has_a_counterexample() -> None:
    assert {key for key, *_ in COUNTEREXAMPLES} == set(OF_TABLES)


def test_a_claim_measured_in_some_places_holds_so_far() -> None:
    rows = {path: each for path, each in papers_own().items() if "resnet18" not in path.parts}
    check = judged("paper", rows)["above-joint"]
    assert [case.verdict for case in check.cases[:2]] == ["holds", "not measured"]
    assert check.verdict == "holds so far"
    assert judged("paper", {})["above-joint"].verdict == "not measured"


def test_spread_is_told_where_seeds_are_several_and_differences_within_it_are_marked() -> None:
    rows = papers_own()
    ours, joint = (
        Path(f"paper/disjoint-40/resnet10/{name}.json") for name in ("score-fusion-reference-all", "joint-plain")
    )
    rows[ours] |= {"seeds": [1, 2, 3], "std": {"all": 0.7}}
    rows[joint] |= {"seeds": [1], "std": {"all": 0.0}}  # of one seed it would mean nothing
    case = judged("paper", rows)["near-joint"].cases[0]
    assert case.numbers.startswith("all 63.2 ± 0.7 against 63.8")
    assert (case.held, case.verdict) == (True, "too close to tell")  # 0.44 points are left, and seeds move it by 0.7
    rows[ours]["std"] = {"all": 0.2}
    assert judged("paper", rows)["near-joint"].cases[0].verdict == "holds"


def test_chance_grows_as_test_images_get_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = row("joint", "plain", all=60.0, base=50.0, novel=80.0, avg=65.0)  # 8 base classes and 2 new ones
    monkeypatch.setattr(measurements, "TEST_IMAGES", {"toys": 10})
    of = measurements.Measurements("toys", {})
    assert of.error(measured, "all") == pytest.approx(100 * (0.6 * 0.4 / 100) ** 0.5)
    parts = [100 * (0.5 * 0.5 / 80) ** 0.5, 100 * (0.8 * 0.2 / 20) ** 0.5]
    assert [of.error(measured, name) for name in ("base", "novel")] == pytest.approx(parts)
    assert of.error(measured, "avg") == pytest.approx((parts[0] ** 2 + parts[1] ** 2) ** 0.5 / 2)
    assert of.error_alone({**measured, "novel_alone": 80.0}) == pytest.approx(100 * (0.8 * 0.2 / 40) ** 0.5)
    told = {**measured, "test_images": 1000}  # what a row tells is better than what datasets usually have
    assert of.error(told, "all") == pytest.approx(100 * (0.6 * 0.4 / 1000) ** 0.5)


@pytest.mark.parametrize(
    ("margins", "held", "close"),
    [
        ([(2.0, 1.0), (3.0, 1.0)], True, False),
        ([(2.0, 1.0), (0.5, 1.0)], True, True),  # won, and one of them by chance perhaps
        ([(2.0, 1.0), (-0.5, 1.0)], False, True),
        ([(0.5, 1.0), (-2.0, 1.0)], False, False),  # one clear loss decides
        ([(0.0, 0.0)], False, False),  # as good is not better
    ],
)
def test_what_chance_could_have_decided_is_neither_won_nor_lost(
    margins: list[tuple[float, float]], held: bool, close: bool
) -> None:
    found = measurements.decided(margins, "")
    assert (found.held, found.close) == (held, close)


def test_a_clear_loss_anywhere_outweighs_what_is_too_close_elsewhere() -> None:
    def verdict(*cases: tuple[bool | None, bool]) -> str:
        return Check(
            "key", "claim", tuple(Case("sota", "resnet10", held, "", close) for held, close in cases), None
        ).verdict

    assert verdict((True, False), (False, True)) == "too close to tell"
    assert verdict((False, False), (False, True), (None, False)) == "does not hold"
    assert verdict((True, False), (True, True), (None, False)) == "too close to tell"
    assert verdict((True, False), (None, False)) == "holds so far"


def test_what_others_reach_with_the_same_dial_is_told() -> None:
    rows = papers_own()
    rows[Path("paper/disjoint-40/resnet10/bic-dial-avg.json")] = row("bic", "dial-avg", avg=71.3)
    check = judged("paper", rows)["above-everyone"]
    assert check.verdict == "holds"  # the paper compares them without it
    assert "with the same dial the best others reach avg 71.3 (BiC)" in check.cases[0].numbers


def test_alpha_and_beta_are_judged_by_the_whole_grid(tmp_path: Path) -> None:
    def verdict(slope_alpha: float, slope_beta: float, skip: int = -1) -> str:
        curve = [
            {"alpha": a / 5, "beta": b / 5, "base": 60.0, "novel": 50.0 + slope_alpha * a - slope_beta * b}
            for a in range(6)
            for b in range(6)
            if b != skip
        ]
        content = {**row("score-fusion-reference", "all", novel=50.0), "curve": curve}
        write(tmp_path, [("score-fusion-reference", "all", content)])
        return judged("toys", read(tmp_path))["grid-trades"].verdict

    assert verdict(1, 1) == "holds"
    assert verdict(-1, 1) == verdict(1, -1) == "does not hold"
    assert verdict(1, 0) == "too close to tell"  # a setting that changes nothing raises nothing
    assert verdict(1, 1, skip=0) == "not measured"  # no end to compare with


DEPTHS = ("fc", "layer4", "layer3", "layer2", "layer1", "stem")


def test_what_fine_tuning_brings_is_judged_by_the_number_of_base_classes(tmp_path: Path) -> None:
    def verdicts(few: tuple[float, ...], many: tuple[float, ...]) -> tuple[str, str]:
        alone(tmp_path, {n: dict(zip(DEPTHS, told, strict=True)) for n, told in ((20, few), (80, few), (180, many))})
        found = judged("toys", read(tmp_path))
        return found["gap-shrinks"].verdict, found["depth-stops"].verdict

    as_in_the_paper = (70.0, 82.0, 81.0, 80.0, 79.0, 78.0)
    assert verdicts((50.0, 66, 70, 72, 73, 74), as_in_the_paper) == ("holds", "holds")
    # More never helped, so it did not stop helping; and there was no gap that could have shrunk.
    assert verdicts((74.0, 74, 73, 72, 71, 70), as_in_the_paper) == ("does not hold", "does not hold")
    assert verdicts((50.0, 66, 70, 72, 73, 74), (40.0, 66, 70, 72, 73, 74)) == ("does not hold", "does not hold")
    (tmp_path / "toys/base-classes-180/resnet10/alone-stem-alone.json").unlink()
    found = judged("toys", read(tmp_path))
    assert (found["gap-shrinks"].verdict, found["depth-stops"].verdict) == ("not measured", "not measured")
    assert "stem with 180 base classes" in found["depth-stops"].cases[0].numbers


def test_rows_of_another_split_or_network_are_not_drawn_into_the_figures(tmp_path: Path) -> None:
    alone(tmp_path, {20: dict.fromkeys(DEPTHS, 70.0), 180: dict.fromkeys(DEPTHS, 80.0)})
    for place in ("base-classes-180-split2/resnet10", "base-classes-180/resnet18"):
        content = {**row("alone", "alone", novel=1.0), "base_classes": 180, "novel_alone": 1.0}
        write(tmp_path, [("alone-fc", "alone", content)], Path("toys") / place)
    assert measurements.alone(read(tmp_path), "toys")[180]["fc"] == 80.0


def test_one_number_of_base_classes_shows_no_trend(tmp_path: Path) -> None:
    alone(tmp_path, {180: dict.fromkeys(DEPTHS, 70.0)})
    assert judged("toys", read(tmp_path))["gap-shrinks"].verdict == "not measured"


def test_the_ends_of_a_trend_are_those_of_the_dataset(tmp_path: Path) -> None:
    told = {n: dict.fromkeys(DEPTHS, 70.0) | {"fc": 70.0 - gap} for n, gap in ((20, 30), (80, 20), (180, 5))}
    alone(tmp_path, told)
    rows = {Path("tiny-imagenet-200", *path.parts[1:]): row for path, row in read(tmp_path).items()}
    assert judged("tiny-imagenet-200", rows)["gap-shrinks"].verdict == "holds"
    fewer = {path: row for path, row in rows.items() if row["base_classes"] != 20}
    case = judged("tiny-imagenet-200", fewer)["gap-shrinks"].cases[0]
    assert (case.verdict, case.numbers) == ("not measured", "no row of fc with 20 base classes")
    another = {}  # of another scale, with other depths
    for path, content in rows.items():
        if content["base_classes"] == 20 and "layer3" not in path.stem:
            another[Path("tiny-imagenet-200/base-classes-9", *path.parts[2:])] = {**content, "base_classes": 9}
    before, after = (judged("tiny-imagenet-200", found) for found in (rows, {**rows, **another}))
    for key in ("gap-shrinks", "depth-stops"):
        assert after[key] == before[key]


def test_what_rests_on_another_base_decides_nothing(tmp_path: Path) -> None:
    rows = papers_own()
    rows[Path("paper/multistep/resnet18/bic-plain.json")]["base_model"] = 50.0
    check = judged("paper", rows)["many-steps"]
    assert check.verdict == "not measured"
    assert "BiC only with another training of the base model" in check.cases[0].numbers
    alone(tmp_path, {20: dict.fromkeys(DEPTHS, 70.0), 180: dict.fromkeys(DEPTHS, 80.0)})
    found = read(tmp_path)
    found[Path("toys/base-classes-20/resnet10/alone-fc-alone.json")]["base_model"] = 50.0
    assert judged("toys", found)["gap-shrinks"].verdict == "not measured"


def test_an_outdated_number_is_marked_where_it_decides() -> None:
    rows = papers_own()
    before = judged("paper", rows)["many-steps"].cases[0].numbers
    rows[Path("paper/multistep/resnet18/podnet-plain.json")]["outdated"] = "its rate"
    after = judged("paper", rows)["many-steps"].cases[0].numbers
    assert after.replace(" †", "") == before
    assert after.count("†") == 1


def test_numbers_of_claims_are_rounded_as_those_of_tables(tmp_path: Path) -> None:
    values = (50.0, 66.25, 70, 72, 73, 74)
    alone(tmp_path, {n: dict(zip(DEPTHS, values, strict=True)) for n in (20, 180)})
    assert "last block 66.3" in judged("toys", read(tmp_path))["depth-stops"].cases[0].numbers
    assert "fine-tuned 16.3, 16.3" in judged("toys", read(tmp_path))["gap-shrinks"].cases[0].numbers


def test_the_spread_of_an_accuracy_over_steps_is_that_over_seeds() -> None:
    told = row("bic", "plain", incremental=60.0)
    told |= {"seeds": [1, 2], "per_step": [[{"all": 60.0}, {"all": 54.0}], [{"all": 63.0}, {"all": 57.0}]]}
    of = measurements.Measurements("toys", {PLACE / "bic-plain.json": told})
    value = of.value("incremental", "disjoint-40", "bic", "plain", "resnet10")
    # With a base of 66: (66 + 60 + 54) / 3 = 60 and (66 + 63 + 57) / 3 = 62.
    assert value.std == pytest.approx(1.0)


def test_a_reason_is_given_only_for_what_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    rests_on = {"disjoint-40/resnet10/joint-plain": {"all": "70.1", "base_model": "60.0"}}
    known = {
        "near-joint": {"reason": "the moon was full", "rests_on": rests_on},
        "above-joint": {"reason": "it rained", "rests_on": {}},
    }
    monkeypatch.setattr(claims, "_reasons", lambda: {"paper": known})
    rows = papers_own()
    joint = rows[Path("paper/disjoint-40/resnet10/joint-plain.json")]
    joint["metrics"]["all"] = 70.05
    found = judged("paper", rows)
    assert found["near-joint"].reason == "the moon was full"
    assert found["above-joint"].reason is None
    joint["metrics"]["all"] = 70.2  # somebody else's measurement, which it does not explain
    found = judged("paper", rows)
    assert (found["near-joint"].verdict, found["near-joint"].reason) == ("does not hold", None)


def test_reasons_on_file_are_for_claims_that_there_are() -> None:
    for dataset, known in claims._reasons().items():
        assert dataset
        assert set(known) <= {claim.key for claim in CLAIMS}
        assert all(entry["reason"].endswith(".") for entry in known.values())


def test_rows_are_looked_for_where_the_bench_writes_them() -> None:
    assert PLACE.name == "resnet10"
    check = judged("toys", {PLACE / "joint-plain.json": row("joint", "plain", all=62.0)})["near-joint"]
    assert check.cases[0].numbers == "no row of score fusion, recipe reference, all"


def test_networks_that_a_dataset_is_not_run_with_are_not_waited_for() -> None:
    known = {check.key: check for check in checks("glyphs", {})}
    assert "smaller-wins" not in known, "it is about ResNet18 alone"
    assert {case.arch for case in known["near-joint"].cases} == {"resnet10"}
    assert "smaller-wins" in {check.key for check in checks("tiny-imagenet-200", {})}
