"""Class means decide among new classes, and about nothing else."""

from __future__ import annotations

import hypothesis.extra.numpy as arrays
import numpy as np
import torch
from helpers import BASE, LATER, NEW
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from branchout.labels import LabelSpace
from branchout.model.class_means import ClassMeans
from branchout.model.heads import FusedHead

K = 6
numbers = st.floats(-20, 20, width=32)


def tensors(*shape: int) -> st.SearchStrategy[Tensor]:
    return arrays.arrays(np.float32, shape, elements=numbers).map(torch.from_numpy)


@given(tensors(3, 4), tensors(3, K), tensors(4, K), tensors(4), tensors(4))
def test_the_largest_new_logit_stays(z: Tensor, h: Tensor, weight: Tensor, bias: Tensor, level: Tensor) -> None:
    means = ClassMeans.of(weight, bias, level, 0.25)
    found = means(z, [h])
    torch.testing.assert_close((found + level).amax(1), (z + level).amax(1), atol=1e-3, rtol=1e-5)
    moved = found + level - 0.25 * (z + level) - means.scores([h])
    torch.testing.assert_close(moved, moved[:, :1].expand_as(moved), atol=1e-3, rtol=1e-5)  # one number for all


@given(st.integers(0, 2**31 - 1), st.floats(-5, 5))
def test_images_of_the_base_keep_their_answer(seed: int, b: float) -> None:
    torch.manual_seed(seed)
    space = LabelSpace.of(BASE, NEW, LATER)
    heads = [torch.nn.Linear(K, len(names)) for names in space.branches]
    offsets = torch.randn(2)
    level = torch.cat([offsets[n].expand(len(names)) for n, names in enumerate((NEW, LATER))])
    means = ClassMeans.of(torch.randn(len(level), K), torch.randn(len(level)), level, 0.3)
    bare, full = (FusedHead(space, heads, [0, 0, 0], class_means=each) for each in (None, means))
    features = [torch.randn(50, K)]
    for head in (bare, full):
        head.set_bias((offsets + b).tolist())
    before, after = (head(features).argmax(1) for head in (bare, full))
    old = len(BASE)
    assert torch.equal(before < old, after < old)
    assert torch.equal(before[before < old], after[before < old])


def test_scores_depend_on_the_direction_of_the_features_alone() -> None:
    means = ClassMeans.of(torch.randn(3, K), torch.randn(3), torch.zeros(3), 0.5)
    h = torch.randn(5, K)
    torch.testing.assert_close(means.scores([7 * h]), means.scores([h]))
