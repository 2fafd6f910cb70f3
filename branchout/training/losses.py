"""The loss that several methods distil with."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def softened_kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """KL(teacher ‖ student) of the softmax of logits / temperature, the mean over images.

    Its gradient in `student` equals that of their cross-entropy.
    """
    log_p, log_q = F.log_softmax(student / temperature, dim=1), F.log_softmax(teacher / temperature, dim=1)
    return F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
