"""The fused head against its definition written out, column by column."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from branchout.errors import BranchoutError
from branchout.labels import LabelSpace
from branchout.model.heads import Correction, CosineHead, FusedHead, Pooler, delta_inputs, new_head, to_norm

NAMES = [f"c{n}" for n in range(7)]
SPACES = st.lists(st.lists(st.sampled_from(NAMES), min_size=1, unique=True), min_size=1, max_size=4).map(
    lambda branches: LabelSpace.of(*branches)
)


@given(SPACES, st.sampled_from(["max", "average"]), st.integers(0, 99))
def test_pooling_by_hand(space: LabelSpace, kind: str, seed: int) -> None:
    z = torch.randn(3, space.columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pooled = Pooler(space, kind)(z)
    for number, name in enumerate(space.classes):
        columns, start = [], 0
        for names in space.branches:
            columns += [start + names.index(name)] if name in names else []
            start += len(names)
        expected = z[:, columns].max(1).values if kind == "max" else z[:, columns].mean(1)
        torch.testing.assert_close(pooled[:, number], expected)


@pytest.mark.parametrize(
    ("base", "new", "classes"),
    [(["a", "b"], ["c"], 3), (["a", "b", "c"], ["b", "d"], 4), (["a", "b"], ["a", "b"], 2)],
    ids=["none", "some", "all"],
)
def test_pooled_columns_for_no_some_and_all_classes_overlapping(base: list[str], new: list[str], classes: int) -> None:
    space = LabelSpace.of(base, new)
    z = torch.tensor([[float(n) for n in range(space.columns)]])
    pooled = Pooler(space)(z)
    assert pooled.shape == (1, classes)
    last = {name: n for n, name in enumerate([*base, *new])}  # later columns are larger here, so the last one wins
    assert pooled[0].tolist() == [float(last[name]) for name in space.classes]


def random_correction(space: LabelSpace, step: int, k: int) -> Correction | None:
    """Of all columns before the step; every third step has none."""
    if step % 3 == 0:
        return None
    correction = Correction(k, space.slice_of(step).start)
    torch.nn.init.normal_(correction.weight)
    return correction


def random_head(
    space: LabelSpace, feature_of: list[int], seed: int, pooler: str
) -> tuple[FusedHead, list[torch.Tensor], list[Correction | None]]:
    torch.manual_seed(seed)
    k = 5
    corrections = [random_correction(space, step, k) for step in range(1, len(space.branches))]
    heads = [CosineHead(k, len(names)) for names in space.branches]
    head = FusedHead(space, heads, feature_of, pooler, corrections=corrections).double()
    if len(space.branches) > 1:
        inputs = zip(head.delta_inputs, space.branches, strict=True)
        head.deltas = [torch.randn(k * len(read), len(names)).double() for read, names in inputs]
    return head, [torch.randn(4, k).double() for _ in range(max(feature_of) + 1)], corrections


@torch.no_grad()
@settings(max_examples=30)
@given(SPACES, st.sampled_from(["max", "average"]), st.integers(0, 9), st.floats(-3, 3), st.booleans())
def test_fused_logits_written_out(space: LabelSpace, pooler: str, seed: int, b: float, fc: bool) -> None:
    branches = len(space.branches)
    feature_of = [0] * branches if fc else list(range(branches))
    head, features, corrections = random_head(space, feature_of, seed, pooler)
    head.set_bias(b)
    got = head(features)
    for sample in range(4):
        scores: dict[str, list[float]] = {}
        for d, names in enumerate(space.branches):
            for row, name in enumerate(names):
                h, w = features[feature_of[d]][sample], head.heads[d].weight[row]
                z = 16 * torch.dot(h, w) / (h.norm() * w.norm())
                others = sorted({feature_of[e] for e in range(branches) if e != d})
                for place, f in enumerate(others):
                    u = 4 * features[f][sample] / features[f][sample].norm()
                    z = z + u @ head.deltas[d][place * 5 : place * 5 + 5, row]
                for later, correction in enumerate(corrections, 1):
                    if later > d and correction is not None:
                        h = features[feature_of[later]][sample]
                        z = z + 4 * h / h.norm() @ correction.weight[:, space.slice_of(d).start + row].double()
                scores.setdefault(name, []).append(float(z) + (b if d else 0.0))
        expected = [max(scores[n]) if pooler == "max" else float(np.mean(scores[n])) for n in space.classes]
        assert got[sample].tolist() == pytest.approx(expected, abs=1e-9)


def test_zero_deltas_and_no_overlap_are_the_concatenated_logits_exactly() -> None:
    space = LabelSpace.of(["a", "b"], ["c", "d", "e"])
    heads = [CosineHead(8, 2), CosineHead(8, 3)]
    fused = FusedHead(space, heads, [0, 1])
    features = [torch.randn(6, 8), torch.randn(6, 8)]
    concatenated = torch.cat([heads[0](features[0]), heads[1](features[1])], dim=1)
    assert torch.equal(fused(features), concatenated)
    fused.deltas = [torch.zeros(8, 2), torch.zeros(8, 3)]
    assert torch.equal(fused(features), concatenated)


def test_corrections_move_with_the_head_and_reach_earlier_columns_alone() -> None:
    space = LabelSpace.of(["a", "b"], ["c"], ["d"])
    correction = Correction(8, 3)
    torch.nn.init.ones_(correction.weight)
    heads = [CosineHead(8, len(names)) for names in space.branches]
    fused = FusedHead(space, heads, [0, 1, 2], corrections=[None, correction])
    features = [torch.randn(6, 8) for _ in range(3)]
    added = fused(features) - FusedHead(space, heads, [0, 1, 2])(features)
    torch.testing.assert_close(added[:, :3], to_norm(features[2]).sum(1, keepdim=True).expand(6, 3))
    assert not added[:, 3].any()
    assert fused.to(torch.float64)([h.double() for h in features]).dtype == torch.float64


def test_deltas_move_with_the_head() -> None:
    fused = FusedHead(LabelSpace.of(["a", "b"], ["c"]), [CosineHead(8, 2), CosineHead(8, 1)], [0, 1])
    fused.deltas = [torch.ones(8, 2), None]
    assert not fused.state_dict().keys() & {"delta_0", "delta_1"}  # saved for every operating point, not here
    fused.to(torch.float64)
    assert fused.deltas[0] is not None
    assert fused.deltas[0].dtype == torch.float64
    fused.to("meta")
    assert fused.deltas[0].is_meta
    assert fused.deltas[1] is None
    with pytest.raises(BranchoutError, match="1 deltas were given for 2 branches"):
        fused.deltas = [None]


def test_a_cosine_logit_is_sixteen_cosines() -> None:
    head = CosineHead(3, 1)
    h = head.weight.detach() * 0.01
    assert head(h).item() == pytest.approx(16, rel=1e-5)
    assert to_norm(torch.randn(5, 3)).norm(dim=1).tolist() == pytest.approx([4.0] * 5, rel=1e-5)


def test_a_new_head_is_of_the_base_heads_kind_and_scale() -> None:
    base = nn.Linear(64, 100)
    with torch.no_grad():
        base.weight.mul_(30)
    head = new_head(base, 7)
    assert isinstance(head, nn.Linear)
    assert head.weight.norm(dim=1).tolist() == pytest.approx([base.weight.norm(dim=1).mean().item()] * 7, rel=1e-4)
    assert isinstance(new_head(CosineHead(64, 9), 7), CosineHead)


def test_branches_that_share_features_read_them_once() -> None:
    assert delta_inputs([0, 1, 2]) == [[1, 2], [0, 2], [0, 1]]
    assert delta_inputs([0, 0]) == [[0], [0]]
    assert delta_inputs([0, 1, 0]) == [[0, 1], [0], [0, 1]]


def test_an_unknown_pooler_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BranchoutError, match="max, average"):
        Pooler(LabelSpace.of(["a"]), "median")
