"""What a plain script holds as of its last completed step, written down when a rank is lost.

A script that begins again goes back to its own checkpoint. But when a rank is lost, each survivor
of data-parallel training holds everything that a checkpoint needs, as of the last completed step:
only an optimizer's step changes parameters and its state, and the death of a rank ends a collective
of the step after it, before its optimizer. So one survivor writes that state where the script looks
for a checkpoint, before the script begins again.

    1. During the run, at the end of each step, this rank keeps what the step after it changes
       early: the generators of random numbers, and the buffers of the model.
    2. When a rank was lost, each survivor puts those back, and tells the others in the store of
       the run which step it holds.
    3. The one with the latest step writes, `writer_of`.

How a checkpoint is written, the script knows: a Trainer of transformers or Lightning and accelerate
by their own methods (hf_trainer.py, lightning_trainer.py, accelerate_loop.py), a loop by the
function that it gives to `before_restart`. A Trainer is found where it calls its optimizer, an
Accelerator where it wraps its model. Where nobody can write, a line says why, and the script goes
back to its own checkpoint.

Source: Gupta et al., Just-In-Time Checkpointing, EuroSys 2024.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import reprlib
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from chorusline.actors.ray_calls.actor_store import ActorStore
from chorusline.collectives.contract.argument_kinds import check_kinds
from chorusline.collectives.contract.errors import PeerLost, chain_of
from chorusline.collectives.group import Group
from chorusline.collectives.stores.signed_store import SignedStore
from chorusline.collectives.stores.store import PrefixStore, Store

from ..process import torch_distributed
from ..process.random_state import RandomState
from ..process.running import current, is_running
from ..process.sharded_tensors import steps_shards
from ..process.step_boundary import boundary
from . import accelerate_loop, hf_trainer, lightning_trainer

_MEET_S = 10.0
"""Seconds in which the survivors come here: one that computes is interrupted after two."""

_LOOK_S = 0.05

_SHARDED = ("FullyShardedDataParallel", "DeepSpeedEngine")
"""Classes that wrap a model; those of `fully_shard` have parameters that are DTensors."""


class Written(Protocol):
    """How a script writes its checkpoint."""

    def own_part(self) -> bytes:
        """What the checkpoint needs of each rank. The generators are as of the step."""

    def write(self, parts: Mapping[int, bytes]) -> str:
        """Write the checkpoint, on this rank alone; return where it is. parts: by rank, of the
        ranks that hold the same step."""


@dataclass(frozen=True, slots=True)
class HeldStep:
    """What a survivor tells the others.

    step: that it holds as a whole; None if it holds none.
    why_not: why this rank writes nothing; empty if it knows of no reason.
    part: as `Written.own_part`.
    """

    step: int | None
    why_not: str = ""
    part: bytes = b""


def writer_of(holdings: Mapping[int, HeldStep]) -> int | None:
    """The rank that writes: the lowest of those with the latest step. None if none can. A rank is
    one step late if the rank died in a collective that was over for the others."""
    steps = {rank: one.step for rank, one in holdings.items() if one.step is not None}
    if not steps or any(one.why_not for one in holdings.values()):
        return None
    return min(rank for rank, step in steps.items() if step == max(steps.values()))


@dataclass(frozen=True, slots=True)
class _Kept:
    """At the end of a step, what the next one changes before its collectives.

    step: number of completed steps. begun: as `LastStep.begun`, by then.
    buffers: of the models, each with its module, its name and a copy.
    samples: of the parameters that are trained, each with bytes of some elements. By them a
        survivor sees that the script has changed parameters since, such as to validate averaged
        ones.
    """

    step: int
    begun: int
    written: Written
    generators: dict[str, Any]
    buffers: tuple[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor], ...]
    samples: tuple[tuple[torch.nn.Parameter, torch.Tensor], ...]


class LastStep:
    """The steps of a script on one rank.

    begun: steps of optimizers that this rank has begun. The state is that of the step that was kept
    as long as it is what it was then: a step that was interrupted has changed some parameters.
    """

    def __init__(self, group: Group) -> None:
        self.begun = 0
        self.at_end = contextlib.ExitStack()
        self._group = group
        self._store = _of_its_own(group.another_store())
        self._kept: _Kept | None = None  # None: no step was kept
        self._called = 0
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._trainers: weakref.WeakSet[Any] = weakref.WeakSet()  # And Accelerators.
        self._why_sharded = ""
        self._why_not_of_trainer = ""  # Of the one that was found last.

    @property
    def why_not(self) -> str:
        """Why this rank can write nothing; empty if it knows of no reason."""
        return self._why_sharded or self._why_not_of_trainer

    @property
    def is_kept(self) -> bool:
        return self._kept is not None and self._kept.begun == self.begun

    def keep(self, written: Written, step: int | None = None) -> None:
        """A step has ended. step: how many have; by default, as many as there were calls."""
        self._called += 1
        samples = tuple(
            (parameter, _sample(parameter))
            for model in self._models
            for parameter in model.parameters()
            if parameter.requires_grad
        )
        # In one assignment: an interrupt finds the old record or the new one.
        self._kept = _Kept(
            self._called if step is None else step,
            self.begun,
            written,
            RandomState().state_dict(),
            self._buffers(),
            samples,
        )

    def keep_buffers(self) -> None:
        """Keep those of now with the last step: its hooks may have changed them since."""
        kept = self._kept
        if kept is not None and self.is_kept:
            self._kept = replace(kept, buffers=self._buffers())

    def _buffers(self) -> tuple[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor], ...]:
        """All that a checkpoint has: a kernel of BatchNorm changes no version of a tensor."""
        return tuple(
            (module, name, buffer, buffer.detach().clone())
            for model in self._models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside a with-block, this rank sees the models that are wrapped and the steps of
        optimizers."""
        with self.at_end:
            for hook in (
                register_module_module_registration_hook(self._has_module),
                register_optimizer_step_pre_hook(self._begins_step),
            ):
                self.at_end.callback(hook.remove)
            yield

    def _has_module(self, module: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel) and part is not None:
            self._models.add(part)
            accelerator = _that_calls(accelerate_loop.KINDS)
            # The Trainer of transformers uses one, and is called after its steps by itself.
            if accelerator is not None and _that_calls(hf_trainer.KINDS) is None:
                follow = functools.partial(accelerate_loop.call_after_bodies, accelerator, self)
                self._follows(accelerator, accelerate_loop.why_not, follow)
        elif (kind := type(module).__name__) in _SHARDED:
            self._why_sharded = f"a model of {kind} is in shards, of which the lost rank had one"

    def _begins_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._looks_at(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.begun += 1
            return None

        def then_begins() -> Any:
            loss = closure()  # With collectives: nothing has changed until they are over.
            self.begun += 1
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": then_begins}
        return (args[0], then_begins, *args[2:]), kwargs

    def _looks_at(self, optimizer: torch.optim.Optimizer) -> None:
        self._why_sharded = self._why_sharded or why_sharded(optimizer)
        of_libraries: dict[Any, tuple[Callable[..., None], ...]] = {
            hf_trainer: (self.keep,),
            lightning_trainer: (self.keep, self.keep_buffers),
        }
        for library, keepers in of_libraries.items():
            trainer = _that_calls(library.KINDS)
            if trainer is not None:
                follow = functools.partial(library.call_after_steps, trainer, *keepers)
                self._follows(trainer, library.why_not, follow)

    def _follows(
        self, found: Any, why_not: Callable[[Any], str], follow: Callable[[], None]
    ) -> None:
        if found in self._trainers:
            return
        self._trainers.add(found)
        try:
            self._why_not_of_trainer = why_not(found)
            if not self.why_not:
                follow()
        except Exception as error:  # It trains without this as well.
            what = f"{type(error).__name__}: {error}"
            self._why_not_of_trainer = f"the {type(found).__name__} is of another version: {what}"

    # ── A rank was lost ──────────────────────────────────────────────────────────────────────────

    def write(self, error: BaseException) -> None:
        """The script has ended with `error` on this rank. If that is because another rank is lost,
        meet the survivors; one of them writes. Raises nothing: the script begins again anyhow."""
        lost = _lost(error, self._group)
        if lost is None or (self._kept is None and not self.why_not):
            return  # A rank has failed, and would again; or nothing of the script can be written.
        boundary().status.is_saving = True  # Now this rank has the time that it takes.
        try:
            mine = self._held_step()
            holdings = self._meet(mine, lost)
            rank = self._group.rank
            writer = writer_of(holdings)
            if writer is None:
                if rank == min(holdings):
                    _say(f"no step is written down: {_why_none(holdings)}")
            # Once: a rank that came too late to be seen by the others sees itself as the best.
            elif writer == rank and self._store.add("writers", 1) == 1:
                assert self._kept is not None
                # No library asks any more whether this is rank 0, and none can wait for the others.
                torch_distributed.end()
                parts = {one: held.part for one, held in holdings.items() if held.step == mine.step}
                where = self._kept.written.write(parts)
                _say(f"the last completed step is written down: {where}")
        except Exception as failure:
            _say(f"the last step could not be written: {type(failure).__name__}: {failure}")
        finally:
            boundary().status.is_saving = False

    def _held_step(self) -> HeldStep:
        kept = self._kept
        if self.why_not or kept is None:
            return HeldStep(None, self.why_not)
        if kept.begun != self.begun:
            return HeldStep(None)
        if not all(torch.equal(_sample(now), before) for now, before in kept.samples):
            what = "the script has changed the parameters since, such as to validate averaged ones"
            return HeldStep(None, what)
        RandomState().load_state_dict(kept.generators)
        with torch.no_grad():
            for module, name, buffer, copied in kept.buffers:
                buffer.copy_(copied)
                module._buffers[name] = buffer
        return HeldStep(kept.step, part=kept.written.own_part())

    def _meet(self, mine: HeldStep, lost: set[int]) -> dict[int, HeldStep]:
        """What the survivors hold, by rank; without those that have not come in time."""
        rank = self._group.rank
        self._store.set(f"holding/{rank}", pickle.dumps(mine))
        awaited = {*range(self._group.size)} - lost - {rank}
        holdings = {rank: mine}
        give_up_at = time.monotonic() + _MEET_S
        while awaited and time.monotonic() < give_up_at:
            for other in [one for one in awaited if self._store.check([f"holding/{one}"])]:
                holdings[other] = pickle.loads(self._store.multi_get([f"holding/{other}"])[0])
                awaited.discard(other)
            time.sleep(_LOOK_S if awaited else 0)
        return holdings


class _Call:
    """The function of a script that saves, and its arguments as of a step."""

    def __init__(
        self, save: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        self._save, self._args, self._kwargs = save, args, kwargs

    def own_part(self) -> bytes:
        return b""

    def write(self, parts: Mapping[int, bytes]) -> str:
        self._save(*self._args, **self._kwargs)
        arguments = [reprlib.repr(one) for one in self._args]
        arguments += [f"{name}={reprlib.repr(one)}" for name, one in self._kwargs.items()]
        name = getattr(self._save, "__qualname__", type(self._save).__name__)
        return f"by {name}({', '.join(arguments)})"


def before_restart(save: Callable[..., object], *args: object, **kwargs: object) -> None:
    """In a loop of a plain script, at the end of each step, on every rank: what saves this step.

        def save(step):
            torch.save({"model": net.state_dict(), "step": step}, f"{folder}/last.pt")
        for step in range(100):
            ...  # forward, backward, optimizer.step()
            cl.before_restart(save, step + 1)

    `save(*args, **kwargs)` is called on one surviving rank if a rank is lost before the next step
    of an optimizer, and before `chorusline run --workers 3 --max-restarts 5` begins the script
    again; otherwise it is not called. It must write as if this rank were rank 0, without
    collectives, or be the `save_state` of an Accelerator. Random generators, and buffers of models
    in torch's DistributedDataParallel, are then as they are now. Give everything else that the loop
    changes in the next step as an argument, such as `step`.

    Under torchrun and python this does nothing. Raises RuntimeError in the train function of a
    session, where `ctx.register` says what survives.
    """
    check_kinds(before_restart, {"save": save})
    if not is_running():
        return
    last_step: LastStep | None = getattr(current(), "last_step", None)
    if last_step is None:
        raise RuntimeError(
            "before_restart is for scripts that begin again when a rank is lost; a train function "
            "registers what survives: ctx.register"
        )
    accelerator: Any = getattr(save, "__self__", None)
    is_accelerators = isinstance(accelerator, _imported(accelerate_loop.KINDS))
    if not is_accelerators or save.__name__ != "save_state":
        last_step.keep(_Call(save, args, kwargs))
    elif accelerator.sync_gradients:  # A part of a batch is no step.
        last_step.keep(accelerate_loop.AccelerateCheckpoint(accelerator, *args, **kwargs))


def why_sharded(optimizer: torch.optim.Optimizer) -> str:
    """Why one rank cannot write the optimizer's state; empty if it holds all of it."""
    if any(one.__name__ == "ZeroRedundancyOptimizer" for one in type(optimizer).__mro__):
        return "a ZeroRedundancyOptimizer has its state in shards, of which the lost rank had one"
    if steps_shards(optimizer):
        return "the parameters are DTensors in shards, of which the lost rank had one"
    return ""


def _sample(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Bytes of at most 15 elements; a write to `.data` changes no version of a tensor."""
    # In the order of memory: a view of the parameter, in any memory format.
    by_stride = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    elements = parameter.detach().permute(by_stride).flatten()
    # As bytes, a NaN equals itself.
    return elements[:: max(1, elements.numel() // 8)].clone().view(torch.uint8)


def _imported(kinds: Iterable[tuple[str, str]]) -> tuple[type, ...]:
    """The classes, given by module and name, of the modules that the script has imported."""
    found = [getattr(sys.modules.get(module), name, None) for module, name in kinds]
    return tuple(one for one in found if one is not None)


def _that_calls(kinds: Iterable[tuple[str, str]]) -> Any:
    """The object of one of the classes that calls what calls this; None if there is none."""
    classes = _imported(kinds)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, classes):
            return caller
        frame = frame.f_back
    return None


def _why_none(holdings: Mapping[int, HeldStep]) -> str:
    why = next((one.why_not for one in holdings.values() if one.why_not), "")
    return why or "each optimizer has begun a step since the last one that was kept as a whole"


def _lost(error: BaseException, group: Group) -> set[int] | None:
    """The ranks whose loss has ended the script here; None if it has ended by something else."""
    for one in (*chain_of(error), group.failure()):
        if isinstance(one, PeerLost):
            return {*one.ranks}
    return None


def _of_its_own(store: Store) -> Store:
    """The same store by another client: that of the group raises from the end of its generation
    on."""
    if isinstance(store, PrefixStore):
        return PrefixStore(store.prefix, _of_its_own(store.store))
    if isinstance(store, SignedStore):
        return SignedStore(_of_its_own(store.store), store.secret)
    return copy.copy(store) if isinstance(store, ActorStore) else store


def _say(what: str) -> None:
    sys.stderr.write(f"chorusline: {what}\n")  # In one piece, as lines of ranks are shown.
    sys.stderr.flush()
