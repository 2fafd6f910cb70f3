"""What the tests of stage I and of its parts share."""

from dataclasses import replace

import torch
from helpers import CPU, NEW, SIZES, exemplars, snapshot
from torch import Tensor

from branchout.data.images import open_images
from branchout.data.samples import Samples
from branchout.method.new_branch import Labelled
from branchout.method.recipes import Stage1
from branchout.method.stage1 import train_branch
from branchout.model.classifier import Classifier


def settings_of(recipe: Stage1, **changes: object) -> Stage1:
    return replace(recipe, optimisation=replace(recipe.optimisation, **({"epochs": 2} | changes)))


def labelled(model: Classifier, names: tuple[str, ...], samples: Samples) -> Labelled:
    space = model.space.extend(names)
    return Labelled(open_images(samples, SIZES, CPU), samples.labels_in(space))


def trained(
    model: Classifier, train: Samples, recipe: Stage1, views: int, limit: int | None = None, *, compressed: bool = False
) -> dict[str, Tensor]:
    step, losses = train_branch(
        model,
        NEW,
        labelled(model, NEW, train.of_classes(NEW)),
        settings_of(recipe),
        exemplars=labelled(model, NEW, exemplars(train)),
        views=views,
        cache_limit=limit,
        compressed=compressed,
        device=CPU,
    )
    return {"losses": torch.tensor(losses)} | snapshot(step.branch) | snapshot(step.head)
