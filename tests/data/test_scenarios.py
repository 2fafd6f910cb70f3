"""Every scenario on glyphs, at the paper's sizes and in the small; the file; bad requests."""

import copy
import json
import random
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchout.data import scenarios
from branchout.data.datasets import Dataset
from branchout.data.draw_scenario import TrainedBase, draw_scenario
from branchout.data.glyphs import glyphs
from branchout.data.samples import ArrayPixels, Samples
from branchout.data.scenarios import FROM_GIVEN, NAMES, Scenario
from branchout.errors import BranchoutError


@pytest.fixture(scope="module")
def data() -> Dataset:
    return glyphs(train_per_class=12, val_per_class=4)


@pytest.fixture(scope="module")
def features(data: Dataset) -> np.ndarray:
    """Two clear clusters in every class, so that K-Means has something to find."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(len(data.train), 3)) + 20 * rng.integers(0, 2, (len(data.train), 1))


PAPER_SIZES = [
    # scenario, base, novel, overlap, steps → classes of base, of a step, shared, in all
    ("disjoint", 800, 40, 0, 1, 840),
    ("disjoint", 800, 200, 0, 1, 1000),
    ("disjoint-domain", 800, 40, 0, 1, 840),
    ("steps", 500, 50, 0, 10, 1000),
    ("overlap-random-shuffled", 800, 40, 5, 1, 835),
    ("overlap-random-clustered", 800, 40, 5, 1, 835),
    ("overlap-domain-shuffled", 800, 40, 5, 1, 835),
    ("overlap-domain-clustered", 800, 40, 5, 1, 835),
    ("overlap-style", 800, 40, 5, 1, 835),
    ("overlap-full", 800, 40, 40, 1, 800),
]


@pytest.mark.parametrize(("name", "base", "novel", "overlap", "steps", "classes"), PAPER_SIZES)
def test_counts_are_the_papers(
    data: Dataset, features: np.ndarray, name: str, base: int, novel: int, overlap: int, steps: int, classes: int
) -> None:
    plan = draw_scenario(name, data, base=base, novel=novel, overlap=overlap or 5, steps=steps, features=features)
    assert [len(names) for names in plan.branches] == [base] + [novel] * steps
    assert len(plan.space.overlap) == overlap
    assert len(plan.space.classes) == classes
    train = plan.train(data)
    assert set(train.classes) == set(plan.space.classes)
    for number, names in enumerate(plan.branches):
        assert set(train.select(train.origin == number).classes) == set(names)
    dev, test = plan.dev(data), plan.test(data)
    assert set(dev.classes) == set(test.classes) == set(plan.space.classes)
    assert not set(dev.ids) & set(test.ids)
    assert set(dev.counts().values()) == set(test.counts().values()) == {2}


def test_every_scenario_is_covered_above() -> None:
    assert {row[0] for row in PAPER_SIZES} == set(NAMES)


def test_disjoint_scenarios_use_every_training_sample_of_their_classes(data: Dataset) -> None:
    plan = draw_scenario("steps", data, base=20, novel=5, steps=3)
    train = plan.train(data)
    assert len(train) == (20 + 3 * 5) * 12
    assert len(set(train.ids)) == len(train)
    after_first = plan.dev(data, step=1)
    assert set(after_first.classes) == set(plan.branches[0]) | set(plan.branches[1])


def test_a_domain_change_draws_each_side_from_its_domain(data: Dataset, features: np.ndarray) -> None:
    for name in ("disjoint-domain", "overlap-domain-shuffled", "overlap-domain-clustered"):
        plan = draw_scenario(name, data, base=60, novel=20, overlap=5, features=features)
        assert {data.domains[c] for c in plan.branches[0]} == {data.base_domain}
        new = set(plan.branches[1]) - set(plan.branches[0])
        assert data.base_domain not in {data.domains[c] for c in new}
        assert len(new) == (15 if "overlap" in name else 20)


@pytest.mark.parametrize("name", ["overlap-random-shuffled", "overlap-random-clustered", "overlap-full"])
def test_every_class_is_halved_and_the_sides_never_share_a_sample(
    data: Dataset, features: np.ndarray, name: str
) -> None:
    plan = draw_scenario(name, data, base=30, novel=10, overlap=4, features=features)
    train = plan.train(data)
    assert len(set(train.ids)) == len(train)
    for origin in (0, 1):
        counts = train.select(train.origin == origin).counts()
        assert all(0 < n < 12 for n in counts.values())
        if "shuffled" in name:
            assert set(counts.values()) == {6}
    shared = train.of_classes(plan.space.overlap)
    assert set(shared.counts().values()) == {12}  # both halves together are the class


def test_clusters_are_what_k_means_finds(data: Dataset, features: np.ndarray) -> None:
    plan = draw_scenario("overlap-full", data, base=30, novel=10, features=features)
    high = dict(zip(data.train.ids.tolist(), features.mean(1) > 10, strict=True))
    train = plan.train(data).of_classes(plan.space.overlap)
    for name in plan.space.overlap:
        of_class = train.of_classes([name])
        for origin in (0, 1):
            assert len({high[i] for i in of_class.select(of_class.origin == origin).ids.tolist()}) == 1


def test_a_style_change_gives_each_side_its_own_typefaces(data: Dataset) -> None:
    plan = draw_scenario("overlap-style", data, base=30, novel=10, overlap=4)
    train = plan.train(data)
    assert data.style_sides is not None
    for origin in (0, 1):
        styles = train.select(train.origin == origin).of_classes(plan.space.overlap).attributes["style"]
        assert set(styles.tolist()) <= data.style_sides[origin]
    others = train.of_classes(sorted(set(plan.branches[0]) - set(plan.space.overlap)))
    assert set(others.counts().values()) == {12}


def siblings_dataset() -> Dataset:
    names = [f"class {n}" for n in range(12)]

    def table(split: str, count: int) -> Samples:
        every = [name for name in names for _ in range(count)]
        pixels = ArrayPixels(np.zeros((len(every), 2, 2, 3), dtype=np.uint8))
        return Samples.build(pixels, every, [f"{split}/{name}/{i}" for i, name in enumerate(every)])

    pairs = (("zero-one", "class 0", "class 1"), ("two-three", "class 2", "class 3"))
    return Dataset("siblings", table("train", 6), table("val", 4), siblings=pairs)


def test_siblings_are_merged_with_one_on_each_side() -> None:
    data = siblings_dataset()
    plan = draw_scenario("overlap-style", data, base=6, novel=4, overlap=2)
    assert set(plan.space.overlap) == {"zero-one", "two-three"}
    train = plan.train(data).of_classes(["zero-one"])
    sides = {origin: {i.split("/")[1] for i in train.select(train.origin == origin).ids} for origin in (0, 1)}
    assert sides == {0: {"class 0"}, 1: {"class 1"}}
    seen = {i.split("/")[1] for i in plan.test(data).of_classes(["zero-one"]).ids}
    assert seen == {"class 0", "class 1"}  # the merged class is tested on both looks
    assert len(plan.space.classes) == 6 + 4 - 2


@given(st.sampled_from([n for n in NAMES if n not in scenarios.CLUSTERED]), st.integers(0, 99))
def test_a_seed_repeats_its_scenario_and_another_does_not(name: str, seed: int) -> None:
    data = few_glyphs()
    plan = draw_scenario(name, data, base=12, novel=6, overlap=3, seed=seed)
    assert plan == draw_scenario(name, data, base=12, novel=6, overlap=3, seed=seed)
    assert plan != draw_scenario(name, data, base=12, novel=6, overlap=3, seed=seed + 1)


def test_the_class_order_of_published_experiments() -> None:
    data = few_glyphs()
    plan = draw_scenario("steps", data, base=10, novel=5, steps=2, seed=1993, published_order=True)
    order = np.arange(len(data.train.classes))
    state = np.random.get_state()
    np.random.seed(1993)  # as published code does it
    np.random.shuffle(order)
    np.random.set_state(state)
    taken = [{data.train.classes[n] for n in order[first:last]} for first, last in ((0, 10), (10, 15), (15, 20))]
    assert [set(names) for names in plan.branches] == taken


@cache
def few_glyphs() -> Dataset:
    return glyphs(train_per_class=8, val_per_class=4)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_gives_the_very_same_split(name: str, data: Dataset, features: np.ndarray, tmp_path: Path) -> None:
    plan = draw_scenario(name, data, base=20, novel=8, overlap=3, features=features, seed=3)
    plan.save(tmp_path / "split.json")
    again = Scenario.load(tmp_path / "split.json")
    assert again == plan
    a, b = plan.train(data), again.train(data)
    assert a.ids.tolist() == b.ids.tolist()
    assert a.origin.tolist() == b.origin.tolist()
    assert a.names.tolist() == b.names.tolist()


def test_the_order_in_which_samples_are_listed_does_not_matter(data: Dataset) -> None:
    plan = draw_scenario("overlap-random-shuffled", data, base=20, novel=8, overlap=3)
    mixed = Dataset(
        **{**data.__dict__, "train": data.train.select(np.random.default_rng(1).permutation(len(data.train)))}
    )
    a, b = plan.train(data), plan.train(mixed)
    assert sorted(zip(a.ids, a.origin, strict=True)) == sorted(zip(b.ids, b.origin, strict=True))


def test_other_samples_are_refused(data: Dataset) -> None:
    plan = draw_scenario("disjoint", data, base=20, novel=8)
    with pytest.raises(BranchoutError, match="made from other samples"):
        plan.train(glyphs(train_per_class=6, val_per_class=4))


# A base that is there already.


@pytest.mark.parametrize(("name", "steps"), [("disjoint", 1), ("steps", 3)])
def test_new_classes_are_drawn_beside_a_base_that_is_given(data: Dataset, name: str, steps: int) -> None:
    known = tuple(data.train.classes[n] for n in np.random.default_rng(4).permutation(len(data.train.classes))[:30])
    half = "01" * 6
    plans = [
        draw_scenario(name, data, novel=5, steps=steps, seed=seed, given=TrainedBase(known, {known[7]: half}))
        for seed in (1, 1, 2)
    ]
    assert plans[0] == plans[1]
    assert plans[0].branches[1:] != plans[2].branches[1:]
    for plan in plans:
        base, *later = plan.branches
        assert base == known  # in the order of the model's answers, whatever the alphabet says
        assert [len(names) for names in later] == [5] * steps
        assert len({each for names in later for each in names} - set(known)) == 5 * steps
    train = plans[0].train(data)
    seen = train.select(train.origin == 0)
    assert seen.counts() == {each: 6 if each == known[7] else 12 for each in sorted(known)}
    of_class = data.train.of_classes([known[7]])
    assert sorted(seen.of_classes([known[7]]).ids) == sorted(of_class.ids.tolist())[::2]
    assert set(train.select(train.origin > 0).counts().values()) == {12}


def test_a_base_that_is_given_must_go_with_the_data_and_the_scenario(data: Dataset) -> None:
    known = data.train.classes[:20]
    for name in set(NAMES) - set(FROM_GIVEN):
        with pytest.raises(BranchoutError, match=rf"'{name}' decides .*start from any base: disjoint, steps"):
            draw_scenario(name, data, novel=5, given=TrainedBase(known))
    for options, words in (
        (
            {"novel": 5, "given": TrainedBase((*known, "robin", "wren"))},
            "2 of the base's 22 classes .* 'glyphs': robin, wren",
        ),
        (
            {"novel": 5, "base": 19, "given": TrainedBase(known)},
            "19 base classes were asked for, but the base given has 20",
        ),
        (
            {"novel": 5000, "given": TrainedBase(known)},
            r"5000 new classes were asked for, but 'glyphs' has \d+ that the base",
        ),
    ):
        with pytest.raises(BranchoutError, match=words):
            draw_scenario("disjoint", data, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("disjoined", {"novel": 5}, "did you mean disjoint"),
        ("disjoint", {"base": 5000, "novel": 5}, r"5005 base and novel classes were asked for.* has \d+"),
        ("disjoint-domain", {"base": 10, "novel": 5000}, "5000 novel classes"),
        ("disjoint", {"novel": 5000}, "5001 base and novel classes were asked for"),
        ("steps", {"novel": 500, "steps": 8}, "4001 base and novel classes were asked for"),
        ("overlap-style", {"novel": 5000}, "base and novel classes were asked for"),
        ("disjoint", {"base": 5, "novel": 0}, "--novel must be at least 1"),
        ("disjoint", {"base": 5, "novel": 5, "steps": 3}, "'steps'"),
        ("overlap-random-shuffled", {"base": 20, "novel": 4, "overlap": 9}, "between 1 and the 4 novel"),
        ("overlap-full", {"base": 5, "novel": 9}, "cannot be shared"),
        ("overlap-random-clustered", {"base": 20, "novel": 9}, "none were given"),
        ("overlap-style", {"base": 2, "novel": 9}, "cannot be shared"),
    ],
)
def test_impossible_requests_say_what_is_there(data: Dataset, name: str, options: dict[str, int], words: str) -> None:
    with pytest.raises(BranchoutError, match=words):
        draw_scenario(name, data, **options)  # type: ignore[arg-type]


def test_a_dataset_without_domains_or_styles_says_how_to_give_them() -> None:
    data = Dataset(**{**siblings_dataset().__dict__, "siblings": ()})
    with pytest.raises(BranchoutError, match="base_domain"):
        draw_scenario("disjoint-domain", data, base=3, novel=2)
    with pytest.raises(BranchoutError, match="siblings"):
        draw_scenario("overlap-style", data, base=3, novel=2, overlap=1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "branchout-scenario-1", "name": "x"}'])
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(BranchoutError, match=r"bad\.json"):
        Scenario.load(tmp_path / "bad.json")
    with pytest.raises(BranchoutError, match="branchout scenario"):
        Scenario.load(tmp_path / "none.json")


def test_a_place_that_cannot_be_written_is_named(data: Dataset, tmp_path: Path) -> None:
    plan = draw_scenario("disjoint", data, base=20, novel=8)
    (tmp_path / "file").write_text("")
    with pytest.raises(BranchoutError, match=r"split\.json could not be written"):
        plan.save(tmp_path / "file" / "split.json")


def damaged(plan: dict[str, Any], random: random.Random) -> Any:
    """The plan with one thing changed, anywhere in it."""
    plan = copy.deepcopy(plan)
    parents: list[tuple[Any, Any]] = []
    waiting: list[Any] = [plan]
    while waiting:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(min(len(each), 3))
        parents += [(each, key) for key in keys]
        waiting += [each[key] for key in keys if isinstance(each[key], dict | list)]
    parent, key = random.choice(parents)
    change = random.choice(["delete", "rename", "replace"])
    if change == "delete":
        del parent[key]
    elif change == "rename" and isinstance(parent, dict):
        parent[f"{key}\x1b[2J"] = parent.pop(key)
    else:
        parent[key] = random.choice(
            [None, -1, 1.5, True, "", "9", "\x1b[31m", [], {}, [[]], [["a", "a"]], {"a": 1}, "01"]
        )
    return plan


def test_a_damaged_file_gives_a_sentence_that_names_it(data: Dataset, tmp_path: Path) -> None:
    plan = draw_scenario("overlap-style", data, base=8, novel=4, overlap=2)
    path = tmp_path / "split.json"
    plan.save(path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    messages = []
    for seed in range(300):
        path.write_text(json.dumps(damaged(whole, random.Random(seed))), encoding="utf-8")
        try:
            found = Scenario.load(path)
        except BranchoutError as error:
            messages.append(str(error))
            continue
        for apply in (found.train, found.dev, found.test):
            with suppress(BranchoutError):  # made from other samples
                apply(data)
    assert len(messages) > 200
    assert all(str(path) in message and message.isprintable() for message in messages)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("seed", "3", "seed"),
        ("name", "disjunct", "disjunct"),
        ("branches", [["a"], 5], r"branches\.1"),
        ("dev_or_test", {"a": "0x"}, "'a'"),
        ("surprise", 1, "surprise"),
        ("merged", {"nobody": "a"}, "nobody"),
    ],
)
def test_the_wrong_field_of_a_file_is_named(
    data: Dataset, tmp_path: Path, field: str, value: object, words: str
) -> None:
    path = tmp_path / "split.json"
    draw_scenario("disjoint", data, base=8, novel=4).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), field: value}), encoding="utf-8")
    with pytest.raises(BranchoutError, match=rf"split\.json is not a valid scenario: .*{words}"):
        Scenario.load(path)
