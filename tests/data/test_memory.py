import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from branchout.data import memory
from branchout.data.samples import ArrayPixels, Samples, concatenate
from branchout.errors import BranchoutError


def table(counts: dict[str, int]) -> Samples:
    names = [name for name, count in counts.items() for _ in range(count)]
    pixels = ArrayPixels(np.arange(len(names), dtype=np.uint8).reshape(-1, 1, 1, 1))
    return Samples.build(pixels, names, [f"{name}/{i}" for i, name in enumerate(names)])


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 12), min_size=1), st.integers(1, 8), st.integers(0, 9))
def test_random_keeps_the_number_asked_for_of_every_class(counts: dict[str, int], number: int, seed: int) -> None:
    samples = table(counts)
    kept = memory.keep(samples, per_class=number, seed=seed)
    assert kept.counts() == {name: min(number, count) for name, count in sorted(counts.items())}
    assert len(set(kept.ids)) == len(kept)
    assert set(kept.ids) <= set(samples.ids)
    assert kept.ids.tolist() == memory.keep(samples, per_class=number, seed=seed).ids.tolist()


def test_another_seed_keeps_others() -> None:
    samples = table({"a": 50, "b": 50})
    assert set(memory.keep(samples, per_class=5, seed=0).ids) != set(memory.keep(samples, per_class=5, seed=1).ids)


@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 9), st.just(3)), elements=st.floats(-1, 1)), st.integers(1, 5))
def test_herding_is_the_greedy_sequence(features: np.ndarray, number: int) -> None:
    number = min(number, len(features))
    unit = [f / max(np.linalg.norm(f), 1e-12) for f in features]
    target = sum(unit) / len(unit)
    chosen: list[int] = []
    for _ in range(number):  # the definition, one candidate at a time
        left = [i for i in range(len(unit)) if i not in chosen]
        gaps = [np.linalg.norm(target - sum(unit[j] for j in [*chosen, i]) / (len(chosen) + 1)) for i in left]
        got = int(memory.herd(features, len(chosen) + 1)[-1])
        assert gaps[left.index(got)] == pytest.approx(min(gaps), abs=1e-9)  # ties may fall either way
        chosen.append(got)
    assert len(set(chosen)) == number


def test_uncertainty_spreads_from_certain_to_doubtful() -> None:
    # Sample i is answered alike by all but i of ten perturbations.
    predictions = np.array([[0 if p >= i else p + 1 for i in range(10)] for p in range(10)])
    doubt = memory.uncertainty(predictions.T)
    assert doubt == pytest.approx([0.0] + [i / 10 for i in range(1, 10)], abs=0.11)
    samples = table({"a": 10})
    kept = memory.keep(samples, per_class=5, rule="uncertainty", rows=predictions.T)
    assert sorted(int(name.split("/")[1]) for name in kept.ids) == [0, 2, 4, 6, 8]


def test_a_class_from_two_origins_is_kept_from_each() -> None:
    both = concatenate([table({"a": 9}).with_origin(0), table({"a": 9, "b": 9}).with_origin(1)])
    kept = memory.keep(both, per_class=2)
    assert sorted(zip(kept.names.tolist(), kept.origin.tolist(), strict=True)) == [
        *[("a", 0)] * 2, *[("a", 1)] * 2, *[("b", 1)] * 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"per_class": 0}, "at least one"),
        ({"per_class": 1, "rule": "best"}, "random, herding, uncertainty"),
        ({"per_class": 1, "rule": "herding"}, "'herding' needs one row for each of the 4"),
        ({"per_class": 1, "rule": "uncertainty", "rows": np.zeros((3, 2), dtype=int)}, "one row"),
    ],
)
def test_bad_requests_are_answered(options: dict[str, object], words: str) -> None:
    with pytest.raises(BranchoutError, match=words):
        memory.keep(table({"a": 4}), **options)  # type: ignore[arg-type]
