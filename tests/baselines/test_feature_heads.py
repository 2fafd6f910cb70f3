"""Heads on cached features: what they see, and how a linear one is trained."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from branchout.baselines import feature_heads
from branchout.baselines.feature_heads import Cached
from branchout.baselines.task import Task
from branchout.data.images import in_order
from branchout.model.heads import CosineHead
from branchout.training.optimisation import Optimisation


def test_the_balanced_split_holds_as_many_new_images_as_exemplars(overlapping_task: Task) -> None:
    kept = feature_heads.balanced(overlapping_task)
    counts = Counter(zip(kept.names.tolist(), kept.origin.tolist(), strict=True))
    assert set(counts.values()) == {5}
    assert len(counts) == overlapping_task.space.columns


def test_every_class_is_seen_equally_often(overlapping_task: Task) -> None:
    """Also those that came twice and so have twice as many images."""
    labels = torch.from_numpy(overlapping_task.labels(feature_heads.balanced(overlapping_task)))
    numbered = torch.arange(float(len(labels))).view(1, -1, 1, 1)  # the feature of each image is its number
    head = nn.Linear(1, 1)
    seen: list[torch.Tensor] = []

    def scores(features: torch.Tensor) -> torch.Tensor:
        seen.append(features.flatten().long())
        return head(features.flatten(1))

    twice = replace(overlapping_task, heads=Optimisation(epochs=2, batch=len(labels)))
    feature_heads.train(head, twice, Cached(numbered, labels, labels), scores, lambda z, target: z.sum())
    first, second = seen
    assert set(labels[first].bincount().tolist()) == {overlapping_task.per_class}
    assert not torch.equal(first, second)


def test_each_epoch_sees_another_view(task: Task) -> None:
    features = torch.arange(3.0)[:, None, None, None].expand(3, 8, 1, 1)
    data = Cached(features, torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.long))
    head = nn.Linear(1, 1)
    seen: list[float] = []

    def scores(features: torch.Tensor) -> torch.Tensor:
        seen.append(features.mean().item())
        return head(features.flatten(1))

    short = replace(task, heads=Optimisation(epochs=5, batch=8))
    feature_heads.train(head, short, data, scores, lambda z, target: z.sum(), lambda epoch: in_order(8, 8))
    assert seen == [0, 1, 2, 0, 1]
    assert not any(parameter.requires_grad for parameter in head.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_a_scaled_head_computes_what_the_head_did(bias: bool) -> None:
    torch.manual_seed(0)
    head, features = nn.Linear(6, 4, bias=bias), torch.randn(20, 6) * 30
    scaled = feature_heads.trainable(head, features)
    assert torch.allclose(scaled(features), head(features), atol=1e-4)
    assert float((features * scaled.scale).norm(dim=1).mean()) == pytest.approx(4)
    assert torch.allclose(feature_heads.plain_head(scaled)(features), head(features), atol=1e-4)


def test_a_cosine_head_is_copied() -> None:
    head, features = CosineHead(6, 4), torch.randn(20, 6)
    copy = feature_heads.trainable(head, features)
    assert torch.equal(copy(features), head(features))
    assert copy.weight.data_ptr() != head.weight.data_ptr()
    assert feature_heads.plain_head(copy) is copy


def test_features_side_by_side_weigh_the_same() -> None:
    features = torch.randn(5, 2, 6)
    joined = feature_heads.concatenated(features)
    assert torch.allclose(joined.view(5, 2, 6).norm(dim=2), torch.full((5, 2), 4.0))
    louder = features * torch.tensor([1.0, 50.0])[:, None]
    assert torch.allclose(feature_heads.concatenated(louder), joined, atol=1e-5)
