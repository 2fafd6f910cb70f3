"""Claims hold for the paper's own numbers, fail on a counterexample, and never pass by not being measured."""

from pathlib import Path

import pytest
from measured import data, papers_own, row

from benchmarks.paper import claims
from benchmarks.paper.claims import CLAIMS, FIGURES, Claim, judged, reasons
from benchmarks.paper.paper_numbers import paper_number
from benchmarks.paper.rows import Row
from branchout.bench import tables
from branchout.bench.tables import figures

Rows = dict[Path, Row]
OF_TABLES = [key for key, _, places, _ in CLAIMS if places[0][0] not in FIGURES]
DEPTHS = ("fc", "layer4", "layer3", "layer2", "layer1", "stem")


def claim(rows: Rows, key: str) -> Claim:
    return next(each for each in judged("paper", rows) if each.key == key)


def changed(rows: Rows, path: str, **fields: object) -> Rows:
    """Rows of which one has other figures or fields."""
    place = Path("paper", f"{path}.json")
    old = rows[place].data
    metrics = {name: fields.pop(name) for name in list(fields) if name in old["metrics"]}
    return {**rows, place: Row(place, {**old, **fields, "metrics": {**old["metrics"], **metrics}})}


def test_there_are_fourteen_claims_at_places_that_the_paper_has() -> None:
    assert len({key for key, *_ in CLAIMS}) == len(CLAIMS) == 14
    for _, _, places, _ in CLAIMS:
        for table, arch in places:
            assert table in figures() or paper_number(table, arch)


@pytest.mark.parametrize("key", OF_TABLES)
def test_the_papers_own_numbers_bear_it_out(key: str) -> None:
    found = claim(papers_own(), key)
    assert [case.verdict for case in found.cases] == ["holds"] * len(found.cases)
    assert found.verdict == "holds"


@pytest.mark.parametrize("key", OF_TABLES)
def test_without_a_row_that_decides_it_is_not_said_to_hold(key: str) -> None:
    whole = papers_own()
    for case in claim(whole, key).cases:
        for each in case.comparisons:
            for (absent, _), *_ in (each.ours, each.theirs):
                found = claim({path: row for path, row in whole.items() if path != absent.path}, key)
                assert found.verdict == "not measured"
                assert any(absent.path.stem in other.missing for other in found.cases)


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
    ("deeper-branch", "branch-depth/resnet10/score-fusion-layer3-reference-balanced", {"novel": 80.3}),
    ("max-pooling", "overlap-domain-clustered/resnet10/logitcat-average-plain", {"overlap": 72.1}),
]


@pytest.mark.parametrize(("key", "path", "figures"), COUNTEREXAMPLES)
def test_one_counterexample_is_enough_and_is_the_worst_case(key: str, path: str, figures: dict[str, float]) -> None:
    found = claim(changed(papers_own(), path, **figures), key)
    assert found.verdict == "does not hold"
    assert [case.verdict for case in found.cases].count("does not hold") == 1
    assert found.worst
    case, worst = found.worst
    assert case.verdict == "does not hold"
    named = {row.path.with_suffix("").as_posix() for row, _ in (*worst.ours, *worst.theirs)}
    assert f"paper/{path}" in named


def test_every_claim_about_a_table_has_a_counterexample() -> None:
    assert {key for key, *_ in COUNTEREXAMPLES} == set(OF_TABLES)


def test_few_images_leave_it_open() -> None:
    rows = {path: Row(path, {**each.data, "test_images": 500}) for path, each in papers_own().items()}
    assert claim(rows, "near-joint").verdict == "too close to tell"


def test_what_rests_on_another_base_decides_nothing() -> None:
    rows = papers_own()
    place = Path("paper/multistep/resnet18/bic-plain.json")
    found = claim({**rows, place: Row(place, rows[place].data, other_base=True)}, "many-steps")
    assert found.verdict == "not measured"
    assert "another training of the base model" in found.cases[0].missing


def test_it_decides_where_the_networks_differ_anyway() -> None:
    rows = papers_own()
    place = Path("paper/disjoint-40/resnet18/bic-plain.json")
    marked = {**rows, place: Row(place, rows[place].data, other_base=True)}
    assert claim(marked, "smaller-wins").verdict == claim(rows, "smaller-wins").verdict != "not measured"
    assert claim(marked, "above-everyone").verdict == "not measured"


def test_what_is_to_be_measured_again_decides_nothing() -> None:
    found = claim(changed(papers_own(), "multistep/resnet18/podnet-plain", outdated="it had a fault"), "many-steps")
    assert found.verdict == "not measured"
    assert "measured again" in found.cases[0].missing


def test_alpha_and_beta_are_judged_by_the_whole_grid() -> None:
    def verdict(slope_alpha: float, slope_beta: float, skip: int = -1) -> str:
        curve = [
            {"alpha": a / 5, "beta": b / 5, "novel": 50.0 + slope_alpha * a - slope_beta * b}
            for a in range(6)
            for b in range(6)
            if b != skip
        ]
        name = "disjoint-40/resnet10/score-fusion-reference-all"
        return claim(changed(papers_own(), name, curve=curve), "grid-trades").verdict

    assert verdict(1, 1) == "holds"
    assert verdict(-1, 1) == verdict(1, -1) == "does not hold"
    assert verdict(1, 0) == "too close to tell"  # a setting that changes nothing raises nothing
    assert verdict(1, 1, skip=0) == "not measured"


def test_what_fine_tuning_brings_is_judged_by_the_number_of_base_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "base_class_counts", lambda _: (20, 80, 180))

    def verdicts(few: tuple[float, ...], many: tuple[float, ...]) -> tuple[str, str]:
        rows = {}
        for count, values in ((20, few), (180, many)):
            for where, value in zip(DEPTHS, values, strict=True):
                path = Path(f"paper/base-classes-{count}/resnet10/alone-{where}-alone.json")
                rows[path] = row(str(path), novel=value, novel_alone=value)
        found = {each.key: each.verdict for each in judged("paper", rows)}
        return found["gap-shrinks"], found["depth-stops"]

    as_in_the_paper = (70.0, 82.0, 81.0, 80.0, 79.0, 78.0)
    assert verdicts((50.0, 66, 70, 72, 73, 74), as_in_the_paper) == ("holds", "holds")
    assert verdicts((74.0, 74, 73, 72, 71, 70), as_in_the_paper) == ("does not hold", "does not hold")
    assert verdicts((50.0, 66, 70, 72, 73, 74), (40.0, 66, 70, 72, 73, 75)) == ("does not hold", "does not hold")


def test_a_dataset_is_judged_by_the_networks_that_it_is_run_with() -> None:
    of_characters = {case.arch for each in judged("glyphs", {}) for case in each.cases}
    assert of_characters == {"resnet10"}
    assert tables.networks_of(tables.table_named("sota"), "glyphs") == ("resnet10",)


def test_a_reason_is_given_only_while_its_numbers_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "paper/disjoint-40/resnet10/joint-plain.json"
    texts = {"near-joint": f"few images: [70.1](results:{path}#all)%", "above-joint": "it rained"}
    monkeypatch.setattr(claims, "_reasons", lambda: {"paper": texts})
    rows = changed(papers_own(), "disjoint-40/resnet10/joint-plain", all=70.05)
    found = [(each.key, text) for each, text in reasons("paper", rows, judged("paper", rows))]
    assert found == [("near-joint", texts["near-joint"])]  # the other claim holds
    rows = changed(rows, "disjoint-40/resnet10/joint-plain", all=71.0)
    assert list(reasons("paper", rows, judged("paper", rows))) == []


@pytest.mark.parametrize("dataset", ["tiny-imagenet-200", "glyphs"])
def test_every_claim_that_fails_here_has_a_reason(dataset: str, measured_rows: Rows) -> None:
    found = judged(dataset, measured_rows)
    failed = {each.key for each in found if each.verdict == "does not hold"}
    assert {each.key for each, _ in reasons(dataset, measured_rows, found)} == failed


def test_invented_rows_have_the_fields_of_measured_ones(measured_rows: Rows) -> None:
    real = measured_rows[Path("tiny-imagenet-200/disjoint-40/resnet10/bic-plain.json")].data
    assert set(data("bic", "plain")) <= set(real)
