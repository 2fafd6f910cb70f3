"""Joint learning, the oracle: one network trained from scratch on all images of all classes so far. It has forgotten
nothing because it was never asked to do without, and costs a whole training at every step.

Source: the row "joint learning" of the paper's tables (Wu et al., CVPR 2022). Departure: the base's own schedule, which
for small images is shorter than the paper's 90 epochs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from branchout.baselines import feature_heads
from branchout.baselines.task import Baseline, Task
from branchout.errors import DoesNotApply
from branchout.model.architectures import FAMILIES
from branchout.model.classifier import Classifier


def learn(before: Classifier, task: Task) -> Classifier:
    """Of `before` only the shape of the network counts."""
    if before.arch["family"] not in FAMILIES:
        raise DoesNotApply(
            f"joint learning trains our own networks from scratch, and the base is {before.arch['name']!r}: "
            "pretrain a base (branchout pretrain), or leave this method out"
        )
    assert task.from_scratch is not None
    return in_order(task.from_scratch(feature_heads.everything(task)), task.space.classes)


def in_order(model: Classifier, classes: Sequence[str]) -> Classifier:
    """The same network, answering with its classes in this order."""
    head = copy.deepcopy(model.base_head)
    with torch.no_grad():
        head.weight.copy_(head.weight[torch.from_numpy(model.space.index(list(classes))).to(head.weight.device)])
    return Classifier(model.arch, model.backbone, head, classes, model.preprocessing, model.kind)


BASELINES = (Baseline("joint", "joint learning (oracle)", learn, on="network", oracle=True, anew=True),)
