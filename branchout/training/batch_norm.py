"""BatchNorm over a batch that several processes share, on any device; torch's own `SyncBatchNorm` needs GPUs.

Inside `WholeBatchNorm` every BatchNorm layer in training mode uses the mean and variance of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from branchout.training import processes


class WholeBatchNorm(TorchFunctionMode):
    """Replaces `F.batch_norm`, through which torch's and timm's layers compute, where it would use the batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As `F.batch_norm`, whose parameters these are."""
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    mean, variance, images = _statistics(x)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(variance * images / (images - 1), momentum)
    normalised: Tensor = _Normalise.apply(x, mean, (variance + eps).rsqrt(), images)
    shape = (1, -1, *[1] * (x.ndim - 2))
    if weight is not None:
        normalised = normalised * weight.view(shape)
    if bias is not None:
        normalised = normalised + bias.view(shape)
    return normalised.to(x.dtype)


@torch.no_grad()
def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel over all processes, and the number of values."""
    channels, values = x.shape[1], x.numel() // x.shape[1]
    table = torch.zeros(processes.count(), 2 * channels + 1, dtype=torch.float64, device=x.device)
    if values:
        variance, mean = torch.var_mean(_in_full(x), _all_but_channels(x), correction=0)
        table[processes.rank()] = torch.cat([mean, variance, mean.new_tensor([values])])
    processes.sum_up(table)
    means, variances, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    dtype = _in_full(x[:0]).dtype
    return mean.to(dtype), variance.to(dtype), total.to(dtype)


def _in_full(x: Tensor) -> Tensor:
    """At least single precision; activations are in half precision on a GPU."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


class _Normalise(torch.autograd.Function):
    """(x − mean) · scale, where mean and scale depend on the values of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, values: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.ndim - 2))
        normalised = (_in_full(x) - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normalised, scale.view(shape), values)
        ctx.dtype = x.dtype
        return normalised

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        normalised, scale, values = ctx.saved_tensors
        dims = _all_but_channels(gradient)
        sums = processes.sum_up(torch.stack([gradient.sum(dims), (gradient * normalised).sum(dims)])) / values
        first, second = (each.view(scale.shape) for each in sums)
        return ((gradient - first - normalised * second) * scale).to(ctx.dtype), None, None, None
