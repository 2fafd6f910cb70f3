import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchout.errors import BranchoutError
from branchout.labels import OVERLAP, LabelSpace

BRANCHES = st.lists(
    st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=6, unique=True), min_size=1, max_size=4
)


def test_a_small_space_by_hand() -> None:
    space = LabelSpace.of(["cat", "dog", "cow"], ["elk", "dog"])
    assert space.classes == ("cat", "dog", "cow", "elk")
    assert space.columns == 5
    assert space.slice_of(1) == slice(3, 5)
    assert space.branch_of_column.tolist() == [0, 0, 0, 1, 1]
    assert space.class_of_column.tolist() == [0, 1, 2, 3, 1]
    assert space.split_of_class.tolist() == [0, OVERLAP, 0, 1]
    assert space.overlap == ("dog",)
    assert space.upto(0).classes == ("cat", "dog", "cow")


@given(BRANCHES)
def test_every_column_names_the_class_its_branch_lists(branches: list[list[str]]) -> None:
    space = LabelSpace.of(*branches)
    listed = [(d, name) for d, names in enumerate(branches) for name in names]
    found = [(d, space.classes[c]) for d, c in zip(space.branch_of_column, space.class_of_column, strict=True)]
    assert found == listed
    assert sorted(space.classes) == sorted({name for names in branches for name in names})
    for d, names in enumerate(branches):
        assert np.arange(space.columns)[space.slice_of(d)].tolist() == [i for i, (b, _) in enumerate(listed) if b == d]
        assert space.index(names).tolist() == [space.classes.index(name) for name in names]


@given(BRANCHES, st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=6, unique=True))
def test_extending_never_moves_an_old_class(branches: list[list[str]], new: list[str]) -> None:
    space = LabelSpace.of(*branches)
    longer = space.extend(new)
    assert longer.classes[: len(space.classes)] == space.classes
    assert longer.class_of_column[: space.columns].tolist() == space.class_of_column.tolist()
    assert longer.upto(len(branches) - 1) == space


@pytest.mark.parametrize(
    ("branches", "words"), [([], "base"), ([["a"], []], "step 1 has no classes"), ([["a", "a"]], "twice: a")]
)
def test_bad_spaces_are_refused(branches: list[list[str]], words: str) -> None:
    with pytest.raises(BranchoutError, match=words):
        LabelSpace.of(*branches)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(BranchoutError, match="did you mean zebra"):
        LabelSpace.of(["zebra", "lion"]).index(["zebras"])
