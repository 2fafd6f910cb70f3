"""FeatCat+RT: the features of all branches are put side by side, and one new classifier over all classes is learned on
them. It gives up the heads that were learned from many images for one learned from a few of each class.

Source: the paper's section 5.2 (Wu et al., CVPR 2022); it is also how DER (Yan et al., CVPR 2021) ends. Departure: the
classifier is a cosine head whatever the base's is, since it need not agree with one that it replaces.
"""

from __future__ import annotations

from torch import Tensor, nn

from branchout.baselines import feature_heads
from branchout.baselines.networks import OnFeatures
from branchout.baselines.task import Baseline, Task
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead


class ConcatenatedHead(nn.Module):
    """One head over all features."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = CosineHead(width, classes)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(feature_heads.concatenated(features))  # type: ignore[no-any-return]


def learn(before: Classifier, task: Task) -> OnFeatures:
    feature_heads.seed_step(task)
    data = feature_heads.cached(before, task, feature_heads.balanced(task), views=task.views)
    _, _, vectors, k = data.features.shape
    head = ConcatenatedHead(vectors * k, len(task.space.classes)).to(task.device)
    feature_heads.train(head, task, data)
    return OnFeatures(before, head)


BASELINES = (Baseline("featcat-rt", "FeatCat+RT", learn, on="features"),)
