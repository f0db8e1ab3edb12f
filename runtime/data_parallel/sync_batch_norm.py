"""`SyncBatchNorm`: batch normalisation by the statistics of all ranks' samples.

Every rank sends the mean of its samples, the sum of their squared deviations, and their number. All
ranks combine these in rank order, so they get the same bits. A rank without samples (an empty
batch, or no more data inside Join) sends zeros, which change nothing.

Sources: Ioffe and Szegedy, arXiv:1502.03167, for the layer and its gradient; Chan, Golub and
LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979, for
combining statistics without the cancellation of sums of squares.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from chorusline.collectives.contract.argument_kinds import check_kinds, check_range, checked_device
from chorusline.collectives.contract.torch_hints import says
from chorusline.collectives.group import Group

from ..process.between_runs import between_runs
from ..process.running import current_group


def group_beside(group: Group) -> Group:
    """A second group of the same ranks; the first call makes it, a blocking collective.

    A rank launches a bucket of gradients when it is complete, so in one group the order of buckets
    and statistics would differ between ranks.
    """
    known = between_runs().of_group(group)
    beside = known.beside() if known.beside else None
    if beside is None:
        beside = group.new_group(range(group.size), name=f"{group.name}, statistics")
        assert beside is not None
        known.beside = weakref.ref(beside)
    return beside


class SyncBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm over a Group, on any device, including uneven inputs inside Join.

        net = torch.nn.Sequential(net, torch.nn.BatchNorm1d(1))
        net = cl.SyncBatchNorm.convert_sync_batchnorm(net)
        model = cl.DistributedDataParallel(net, group)

    Input: (samples, num_features, …) with at least 2 dimensions; the batch may be empty. In
    training the mean and variance are those of the samples of all ranks, and the running statistics
    follow them. In evaluation the layer is plain batch normalisation.

    num_features, eps, momentum, affine, track_running_stats, bias: as in torch.
    process_group: a Group. None, or the model's own group: a second group of the same ranks as the
        DistributedDataParallel around the layer, or, without one, as the session.

    Each rank sends 2·C+1 numbers in the forward pass and 2·C in the backward pass (C features).

    Raises ValueError, on all ranks, in training with at most one value per channel over all ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        check_kinds(SyncBatchNorm.__init__, locals())
        check_range("num_features", num_features, 0)
        device = None if device is None else checked_device(device)
        factory = {"device": device, "dtype": dtype}
        # An older torch has no such argument.
        options: dict[str, Any] = factory if bias else {**factory, "bias": False}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.process_group = process_group
        self._group: Group | None = None  # None: until the first forward pass
        self._checks_at_once = False

    @property
    def group(self) -> Group | None:
        """The group that shares statistics; None before a model or a forward pass has set it."""
        return self._group

    @classmethod
    @says(group="write process_group=")
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: Group | None = None
    ) -> torch.nn.Module:
        """Replace each BatchNorm layer in `module`, including torch.nn.SyncBatchNorm, by one of
        this class with its parameters and buffers. Call it before DistributedDataParallel."""
        check_kinds(cls.convert_sync_batchnorm, locals())
        converted = module
        # One of this class stays as it is, with its own group.
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            for name in ("weight", "bias"):
                # The same parameter object, which an optimizer may have already.
                setattr(converted, name, getattr(module, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                setattr(converted, name, getattr(module, name))
            converted.training = module.training
        for name, child in module.named_children():
            setattr(converted, name, cls.convert_sync_batchnorm(child, process_group))
        return converted

    def bind(self, group: Group, *, checks_at_once: bool = False) -> None:
        """Set the group for the model around the layer; the user's process_group has precedence.

        checks_at_once: on a GPU, wait until the statistics are known to be whole, before the
            running statistics follow them.
        """
        given = self.process_group
        self._checks_at_once = checks_at_once
        self._group = group_beside(group) if given is None or given is group else given

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        # Running statistics are equal on all ranks: nothing has to be shared.
        if not self.training:
            return super().forward(input)
        if self._group is None:
            self._group = self.process_group or group_beside(current_group())
        # This rank's own statistics are those of all ranks.
        if self._group.size == 1:
            return super().forward(input)
        output, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, self._group, self._checks_at_once
        )
        self._track(mean, variance, count)
        normalised: torch.Tensor = output
        return normalised

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor: float | torch.Tensor | None = self.momentum
        if factor is None:  # On the device: a host that reads the number would wait for it.
            factor = self.num_batches_tracked.to(torch.float64).reciprocal().to(mean.dtype)
        unbiased = variance * (count / (count - 1))
        for running, newest in ((self.running_mean, mean), (self.running_var, unbiased)):
            # Computed in the precision of the statistics: bfloat16 running statistics round once.
            running.copy_(running.to(newest.dtype).lerp(newest, factor))

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels in dimension 1, got an input of shape "
                f"{tuple(input.shape)}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no group until a model binds it."""
        return {**self.__dict__, "process_group": None, "_group": None}


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias; mean and variance are over all ranks' samples.

    Statistics are float32, or float64 for a float64 input. The gradients of weight and bias are
    this rank's own; the model reduces them with those of all other parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: Group,
        checks_at_once: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x = input.to(torch.float64 if input.dtype == torch.float64 else torch.float32)
        channels = x.size(1)
        mine = x.new_zeros(2 * channels + 1)  # mean, squared deviations, count
        own_count = x.numel() // channels
        # Of an empty batch the mean would be NaN, on all ranks.
        if own_count:
            var, mean = torch.var_mean(x, _not_channels(x), correction=0)
            mine[:channels] = mean
            mine[channels : 2 * channels] = var * own_count
            mine[-1] = own_count
        everybody = mine.new_empty(group.size, len(mine))
        work = group.all_gather(everybody, mine)
        work.wait()
        means, deviations = everybody[:, :channels], everybody[:, channels : 2 * channels]
        counts = everybody[:, -1:]
        count = counts.sum()
        is_read = own_count <= 1  # Else there is more than one value, and no host has to look.
        if is_read or checks_at_once:
            work.wait_on_host()
        if is_read and not count > 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{tuple(input.shape)} on rank {group.rank}, and {count:g} over all ranks"
            )
        mean = (means * counts).sum(0) / count
        squares = (deviations + counts * (means - mean).square()).sum(0)
        variance = squares / count
        inverse = torch.rsqrt(variance + eps)
        scale = inverse if weight is None else inverse * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        output = torch.addcmul(_shaped(shift, x), x, _shaped(scale, x)).to(input.dtype)
        ctx.save_for_backward(input, weight, mean, inverse, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        ctx.set_materialize_grads(False)  # Of the statistics there would be zeros, for nothing.
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        input, weight, mean, inverse, count = ctx.saved_tensors
        if gradient is None:  # Another node has given none. The other ranks wait for this one.
            gradient = torch.zeros_like(input)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x, dy = input.to(mean.dtype), gradient.to(mean.dtype)
        centred = (x - _shaped(mean, x)) * _shaped(inverse, x)
        channels = x.size(1)
        sums = torch.cat([dy.sum(_not_channels(x)), (dy * centred).sum(_not_channels(x))])
        # Before the sum over the ranks: the model reduces these with all other gradients.
        grad_bias = sums[:channels].to(weight.dtype) if needs_bias else None
        grad_weight = sums[channels:].to(weight.dtype) if needs_weight else None
        grad_input = None
        # Alike on all ranks, as the layer before is.
        if needs_input:
            totals = sums.clone()
            ctx.group.all_reduce(totals).wait()
            totals /= count
            scale = inverse if weight is None else inverse * weight
            inner = dy - _shaped(totals[:channels], x) - centred * _shaped(totals[channels:], x)
            grad_input = (inner * _shaped(scale, x)).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


def _not_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _shaped(of_channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return of_channels.view(1, -1, *[1] * (x.dim() - 2))
