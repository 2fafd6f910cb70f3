"""Joint learning, the oracle: one network trained from scratch on all images of all classes so far. It has forgotten
nothing because it was never asked to do without, and costs a whole training at every step.

Source: the row "joint learning" of the paper's tables (Wu et al., CVPR 2022). Departure: the base's own schedule, which
for small images is shorter than the paper's 90 epochs.
"""

from __future__ import annotations

from branchout.baselines import heads
from branchout.baselines.common import Task
from branchout.baselines.registry import Method
from branchout.errors import DoesNotApply
from branchout.model.classifier import Classifier
from branchout.train.pretrain import pretrain


def learn(before: Classifier, task: Task) -> Classifier:
    """Of `before` only the shape of the network counts."""
    if before.arch["family"] != "resnet":
        raise DoesNotApply(
            f"joint learning trains our own ResNets from scratch, and the base is {before.arch['name']!r}: "
            "pretrain a base (branchout pretrain), or leave this method out"
        )
    labelled = task.labelled(heads.everything(task))
    return pretrain(
        labelled.images,
        labelled.labels,
        task.space.classes,
        before.preprocessing,
        arch=before.arch["name"],
        width=before.arch.get("width"),
        kind=task.kind,
        optimisation=task.pretraining,
        seed=task.seed,
        device=task.device,
        report=task.report,
    )


METHODS = (Method("joint", "joint learning (oracle)", learn, on="network", oracle=True),)
