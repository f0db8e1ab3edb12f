"""The user's results and exceptions: as messages in the worker, as objects again in the caller.

The worker pickles them, the caller rebuilds them, and the driver between the two sees bytes. A
class that the user made in a script or a notebook comes back as the very same class (cloudpickle
remembers those that it sent by value), so that `except MyError` works.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from ray import cloudpickle

from chorusline.collectives.contract.call_site import users_traceback
from chorusline.collectives.contract.errors import (
    ChoruslineError,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    PeerLost,
    chain_of,
    name_ranks,
)

from ..errors import LOADS_SHARDS, PAGE_ON, RESUMES, RankFailed, WorkerLost
from .messages import Cancellation, Failure, Loss, RunFailed, Success

_MARK = "LEADS_TO_USERS_CODE"
"""A module that calls the user's code, or what leads there, has a global of this name that is true.
Its frames are left out of tracebacks, as unittest leaves out those of modules with `__unittest`."""


class RemoteTraceback(Exception):
    """Carries the text of a traceback from another process, as concurrent.futures does."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


# ── In the worker ────────────────────────────────────────────────────────────────────────────────


def success(
    rank: int, value: object, collectives: int, *, is_group_over: bool
) -> Success | Failure:
    """The message of a result; a Failure if the result cannot be pickled."""
    # Not at the top of the file: the driver runs without torch.
    from ..parcels.pickling import pickled

    try:
        return Success(rank, pickled(value), collectives, is_group_over)
    except Exception as error:
        unpicklable = TypeError(
            f"the {type(value).__name__} that rank {rank} returned cannot be pickled ({error}); "
            "return numbers, tensors or containers of them"
        )
        return failure(rank, unpicklable)


def failure(
    rank: int,
    error: BaseException,
    *,
    was_told_to_stop: bool = False,
    as_counted: Callable[[CollectiveError], CollectiveError] | None = None,
) -> Failure:
    """The message of an exception.

    was_told_to_stop: this rank was told to stop, so that a cancelled coroutine is an echo, too.
    as_counted: turns an error of a group that was made of the session's group into one whose ranks
    are those of the session.
    """
    reason = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(traceback.format_exception(error.with_traceback(_users_part(error))))
    link = _of_group(error, rank, as_counted or (lambda link: link))
    culprits = tuple(link.ranks) if link else (rank,)
    is_echo = isinstance(link, GroupAborted | PeerLost) or (
        was_told_to_stop and isinstance(error, asyncio.CancelledError)
    )
    exception: bytes | None = None
    # An exception that ends a process or a task in the worker must not do so in the caller, and
    # StopIteration cannot leave a coroutine.
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        try:
            exception = cloudpickle.dumps(error)
        except Exception:
            exception = None  # The caller gets RankFailed, with `reason` and `traceback`.
    asks_all = any(
        isinstance(link, CollectiveTimeout | CollectiveMismatch) for link in chain_of(error)
    )
    return Failure(rank, exception, reason, text, culprits, is_echo, asks_all)


def _of_group(
    error: BaseException, rank: int, as_counted: Callable[[CollectiveError], CollectiveError]
) -> CollectiveError | None:
    """The group's error that another rank caused and that led to this one, even where the user's
    code has raised an error of its own from it."""
    for link in chain_of(error):
        if isinstance(link, CollectiveTimeout | CollectiveMismatch | GroupAborted | PeerLost):
            counted = as_counted(link)
            if rank not in counted.ranks:
                return counted
    return None


def _users_part(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on: after the last frame of Chorusline that leads
    there. Frames of Ray and asyncio come before it. If the text of the error says all, only frames
    of the user's files are kept."""
    users = part = error.__traceback__
    while part is not None:
        if part.tb_frame.f_globals.get(_MARK):
            users = part.tb_next
        part = part.tb_next
    if isinstance(error, ChoruslineError) and (trace := users_traceback(users)):
        return trace
    return users or error.__traceback__


# ── In the caller ────────────────────────────────────────────────────────────────────────────────


def raise_failure(failed: RunFailed, step: int = 0) -> NoReturn:
    """Raise in the caller what ended the run, with a note that says where it came from. step:
    optimizer steps that the run has taken; 0 if unknown."""
    cause = failed.cause
    match cause:
        case Cancellation(reason):
            error: Exception = GroupAborted(failed.generation, [], reason)
        case Loss(rank, worker, detail):
            where = f"pid {worker.pid} on {worker.hostname}, {worker.device}"
            fields = ("run", failed.generation, [rank], detail, where, step)
            error = WorkerLost(*fields, _how_to_survive(failed))
        case Failure():
            error = _rebuild(cause, failed.generation)
            error.__cause__ = RemoteTraceback(cause.traceback)
            error.add_note(
                f"raised by rank {cause.rank} of {len(failed.workers)} in generation "
                f"{failed.generation}, {failed.workers[cause.rank]}"
            )
            for loss in failed.losses:
                error.add_note(f"before that, rank {loss.rank} died ({loss.worker}): {loss.detail}")
    if failed.story:
        error.add_note(failed.story)
    if failed.returned:
        error.add_note(f"{name_ranks(failed.returned)} had returned from the function by then")
    if failed.stuck:
        error.add_note(
            f"{name_ranks(failed.stuck)} did not stop in time after the request to stop; a new "
            "worker is started in the place of each before the next run"
        )
    raise error


def _how_to_survive(failed: RunFailed) -> str:
    """What to write so that a run survives what ended this one. Where it could have survived, the
    detail of the loss says what was missing."""
    num_workers, size = len(failed.workers), failed.replica_size
    resumes = RESUMES
    more, replicas = "", " and ZeroRedundancyOptimizer(..., replicas=2)"
    if size > 1:
        resumes = LOADS_SHARDS
        more, replicas = f", replica_size={size}", ""
    if failed.may_lose or num_workers == size:
        return f"{resumes}."
    return (
        f"To survive this, write Session(num_workers=({size}, {num_workers}){more}){replicas}, and "
        f"register the model and the optimizer (ctx.register). {resumes} ({PAGE_ON[resumes]})."
    )


def _rebuild(cause: Failure, generation: int) -> Exception:
    if cause.exception is not None:
        try:
            error = cloudpickle.loads(cause.exception)
            if isinstance(error, Exception):
                return error
        except Exception:
            pass  # Its class does not exist here, or its __init__ wants other arguments.
    return RankFailed(cause.rank, generation, cause.reason)
