"""AutoAugment's policy for CIFAR and Cutout, for methods whose published experiments train with them.

Sources: Cubuk et al., CVPR 2019 (the policy is torchvision's); DeVries and Taylor, 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor

from branchout.baselines.networks import Alter
from branchout.data.preprocess import Preprocessing

TOGETHER = 4
"""Images that share one draw of the policy: a draw for each would take longer than a step of a small network."""


def auto_augmented(preprocessing: Preprocessing) -> Alter:
    """For batches of normalised views: the policy, then one square of half the side set to black."""
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy

    policy = AutoAugment(AutoAugmentPolicy.CIFAR10, fill=[128.0] * preprocessing.channels)

    def alter(pictures: Tensor) -> Tensor:
        mean, std = (
            torch.tensor(values, device=pictures.device).view(-1, 1, 1)
            for values in (preprocessing.mean, preprocessing.std)
        )
        pixels = ((pictures * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        changed = torch.cat([policy(part) for part in torch.split(pixels, TOGETHER)]).to(pictures.dtype) / 255
        return preprocessing.normalise(cutout(changed))

    return alter


def cutout(images: Tensor) -> Tensor:
    """A square around a random pixel of each image set to 0, its side half that of the image; outside it is cut off."""
    count, _, height, width = images.shape
    rows, columns = (
        (torch.arange(side) - torch.randint(side, (count, 1)) + side // 4) // (side // 2) == 0
        for side in (height, width)
    )
    hidden = rows[:, None, :, None] & columns[:, None, None, :]
    return images.masked_fill(hidden.to(images.device), 0.0)
