"""Communication hooks: functions that reduce a model's gradients in place of the reducer.

The reducer calls a hook with each bucket as soon as the backward pass has filled it, in the same
order on all ranks. The hook returns a future of the reduced gradients, which it has divided by the
number of ranks. This is the contract of torch.nn.parallel.DistributedDataParallel, and `GradBucket`
has the methods of torch.distributed.GradBucket (Python code cannot make one). So hooks for torch
run unchanged: they reduce in process groups of torch.distributed, and Chorusline can be the backend
(`Context.init_torch_distributed`). A hook may also use a Chorusline `Group`:

    def halved(group, bucket):
        small = bucket.buffer().to(torch.bfloat16)
        work = group.all_reduce(small, ReduceOp.AVG)
        return work.get_future().then(lambda future: future.value()[0])

A callback of a future runs in the thread that ends the work, so the order of callbacks may differ
between ranks. A callback that issues collectives needs a group of its own; torch.distributed's
collectives get one automatically.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chorusline.collectives.diagnosis.blame import check_like_rank_0
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object


class GradBucket:
    """Gradients that are reduced together, as a communication hook sees them.

        def in_half(group: cl.Group, bucket: cl.GradBucket):
            small = bucket.buffer().to(torch.bfloat16)
            return group.all_reduce(small, cl.ReduceOp.AVG).get_future()
        model = cl.DistributedDataParallel(net, group)
        model.register_comm_hook(group, in_half)
        model(torch.ones(2, 8)).mean().backward()

    The gradients start at multiples of 64 elements, in order; the gaps between them are zero.
    """

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        spans: Sequence[tuple[int, int, int]],
        parameters: Sequence[torch.nn.Parameter],
        is_last: bool,
    ) -> None:
        """spans: (parameter number, offset in elements, numel). parameters: all of the model's."""
        self._index = index
        self._buffer = buffer
        self._spans = spans
        self._parameters = [parameters[number] for number, _, _ in spans]
        self._is_last = is_last

    def index(self) -> int:
        """The number of the bucket, in the order of sending."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """(n,) all gradients of the bucket; writing to it changes them."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter, in its shape: views of the buffer."""
        return [
            self._buffer[offset : offset + numel].view(parameter.shape)
            for (_, offset, numel), parameter in zip(self._spans, self._parameters, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the bucket, in the order of `gradients()`."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether no other bucket follows in this step."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer, for a hook that wraps another hook: (n,) of any dtype."""
        self._buffer = buffer


@dataclass(frozen=True, slots=True)
class CommHook:
    """A communication hook and its first argument, the state."""

    state: object
    hook: Callable[[Any, Any], torch.futures.Future[Any]]

    @property
    def name(self) -> str:
        return getattr(self.hook, "__qualname__", type(self.hook).__qualname__)

    @property
    def trains_apart(self) -> bool:
        """Whether the hook is that of post-local SGD, which lets ranks use different gradients."""
        return hasattr(self.state, "start_localSGD_iter")

    def launch(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Call the hook. Raises the hook's own errors, and TypeError if it returns no future."""
        try:
            future = self.hook(self.state, bucket)
        except Exception as error:
            # The two mistakes that hooks of torch are given here; another error is the hook's own.
            if isinstance(self.state, Group) or not torch.distributed.is_initialized():
                error.add_note(
                    f"The communication hook {self.name} raised this error. torch's hooks reduce "
                    "in a process group of torch.distributed: call ctx.init_torch_distributed() in "
                    "the train function (outside a session, torch.distributed.init_process_group("
                    '"chorusline", …)), and pass None, or a process group, as their state'
                )
            raise
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"the communication hook {self.name} returned {type(future).__name__}; it "
                "must return a torch.futures.Future of the reduced gradients, such as "
                "work.get_future()"
            )
        return future

    def finish(
        self, future: torch.futures.Future[Any], content: torch.Tensor, group: Group
    ) -> None:
        """Wait for the future, and leave its value in `content`.

        content: (n,) the bucket's gradients. Raises the group's own error where the group has
        failed; ValueError for a value of another size.
        """
        try:
            value = future.wait()
        except Exception as error:
            failure = group.failure()
            # The hook's own error, or the group's as it is.
            if failure is None or isinstance(error, type(failure)):
                raise
            raise failure from error  # Futures with callbacks keep only the error's text.
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]  # Work.get_future() gives a list of one tensor.
        if not isinstance(value, torch.Tensor) or value.numel() != content.numel():
            given = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(
                f"the future of the communication hook {self.name} gave {given} for a bucket of "
                f"{content.numel()} elements"
            )
        # Most hooks reduce in place; one that compresses gives another tensor.
        if value.data_ptr() != content.data_ptr() or value.dtype != content.dtype:
            content.copy_(value.view(-1))

    def check_same(self, group: Group) -> None:
        """Raises CollectiveMismatch on all ranks if the names of their hooks differ."""
        names = all_gather_object(group, self.name)
        detail = f"the hooks are, by rank: {dict(enumerate(names))}"
        remedy = "Register the same hook on all ranks, between the same two steps."
        check_like_rank_0("register_comm_hook", group.generation, names, detail, remedy)
