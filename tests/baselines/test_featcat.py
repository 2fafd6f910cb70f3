"""One head over the features of all branches."""

from collections.abc import Callable

import torch
from torch import Tensor

from branchout.baselines import featcat
from branchout.baselines.task import Task
from branchout.model.classifier import Classifier


def slow_logits(head: featcat.ConcatenatedHead, features: Tensor) -> list[list[float]]:
    """16·cos between each class's row and the branches' directions put end to end."""
    table = []
    for picture in features:
        joined = torch.cat([h / h.norm() for h in picture])
        rows = [float(16 * joined @ row / joined.norm() / row.norm()) for row in head.head.weight.detach()]
        table.append(rows)
    return table


def test_logits_are_cosines_to_all_features_end_to_end() -> None:
    torch.manual_seed(0)
    head, features = featcat.ConcatenatedHead(3 * 5, 4), torch.randn(7, 3, 5)
    assert torch.allclose(head(features), torch.tensor(slow_logits(head, features)), atol=1e-4)


def test_the_head_reads_every_branch(
    branched: Callable[[Task], Classifier], overlapping_task: Task, next_task: Callable[[Task], Task]
) -> None:
    task = next_task(overlapping_task)
    model = branched(task)
    scorer = featcat.learn(model, task)
    assert scorer.head.head.weight.shape == (len(task.space.classes), 3 * model.backbone.features)
    features = torch.randn(4, 3, model.backbone.features)
    for branch in range(3):
        changed = features.clone()
        changed[:, branch] = torch.randn(4, model.backbone.features)
        assert not torch.allclose(scorer.head(changed), scorer.head(features))
