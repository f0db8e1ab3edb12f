"""The errors between actors, below the same root as those of the collectives.

    ChoruslineError
    ├── CollectiveError
    │   └── PeerLost
    │       └── WorkerLost     a worker's process is gone, as the caller of run() sees it
    ├── StartupError           the workers cannot be placed, or did not start
    │   └── NoCluster          there is no cluster on which they could start
    ├── Interrupted            the caller had all ranks stop, between two steps
    ├── RankFailed             a rank raised something that cannot be rebuilt in this process
    ├── DriverLost             the driver actor is gone; the workers may live
    │   └── HeadLost           the head of the cluster is gone
    └── StateLost              owner and replicas of a shard are gone; no rank has its state

An ordinary exception of the user's function is none of these: it reaches the caller as itself.
Fields are positional, and the text is made in `__str__`, as in
`chorusline.collectives.contract.errors`.
"""

from __future__ import annotations

from dataclasses import dataclass

from chorusline.collectives.contract.errors import (
    ChoruslineError,
    CollectiveTimeout,
    GroupAborted,
    PeerLost,
    StoreLost,
    StoreTimeout,
)

RESUMES = "With Session(checkpoint=CheckpointConfig(...)) the next run resumes from the last save"
LOADS_SHARDS = (
    "Save with torch.distributed.checkpoint, and load it at the beginning of the function"
)
"""As RESUMES, for replicas of fully_shard's models, which those checkpoints do not hold."""

PAGE_ON = {RESUMES: "docs/failures.md", LOADS_SHARDS: "docs/torch-distributed.md"}
"""By remedy, the page that tells how."""


@dataclass(eq=False, repr=False)
class WorkerLost(PeerLost):
    """A worker's process died, as the caller of run() sees it. A peer inside a collective sees
    PeerLost, so a handler of PeerLost catches both.

        try:
            cl.run(train, num_workers=2)
        except cl.WorkerLost as error:
            print(error.worker, error.step, error.remedy)

    detail: how it died, as far as known, and why the run could not continue without it.
    worker: which one it was, where it ran.
    step: optimizer steps of the run by then; 0 if unknown.
    remedy: what to write, so that a run survives this.
    """

    worker: str = ""
    step: int = 0
    remedy: str = ""

    def __str__(self) -> str:
        who = f"rank {', '.join(map(str, self.ranks))}" if self.ranks else "a rank"
        who += f" ({self.worker})" if self.worker else ""
        at = f" after step {self.step}" if self.step else ""
        remedy = f"{self.remedy} " if self.remedy else ""
        return (
            f"{who} died{at}: {self.detail}. The other ranks were stopped. {remedy}"
            "Call run() again to start with a new worker. (If the machine ran out of memory, use "
            "smaller batches.)"
        )


@dataclass(eq=False, repr=False)
class StartupError(ChoruslineError):
    """The workers could not be started before the deadline.

        try:
            cl.run(train, num_workers=8, use_gpu=True)
        except cl.StartupError as error:
            print(error.what, error.detail)

    what: the resources that were asked for. detail: why it failed.
    """

    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}"


class NoCluster(StartupError):
    """There is no cluster on which workers could start. The message is all that a person needs: no
    frame of the program is involved."""


@dataclass(eq=False, repr=False)
class RankFailed(ChoruslineError):
    """A rank raised something that cannot be raised in this process: an exception that does not
    survive pickling, or one that would end this process as well (SystemExit, KeyboardInterrupt).

        try:
            cl.run(train, num_workers=2)
        except cl.RankFailed as error:
            print(error.rank, error.reason)
    """

    rank: int
    generation: int
    reason: str

    def __str__(self) -> str:
        remedy = (
            ". A rank's function ends with `return`; sys.exit() and exit() are for the program"
            if self.reason.startswith("SystemExit")
            else ""
        )
        return f"rank {self.rank} of generation {self.generation} raised {self.reason}{remedy}"


@dataclass(eq=False, repr=False)
class Interrupted(ChoruslineError):
    """Raised inside the train function, on every rank between the same two steps, when the caller
    of run() was cancelled: in a notebook, when its cell was interrupted.

        try:
            optimizer.step()
        except cl.Interrupted as error:
            print(f"stopped after {error.step} steps")
            raise

    The group is alive, and nothing is in flight. A function lets this error pass; the caller of
    run() gets CancelledError. step: steps that this run has taken.
    """

    step: int

    def __str__(self) -> str:
        return (
            f"the run was interrupted; all ranks stopped after step {self.step}. What ctx.keep "
            "holds is still there: run the function again to continue"
        )


@dataclass(eq=False, repr=False)
class DriverLost(ChoruslineError):
    """The driver actor died during a run. The next run starts a new driver, which takes over the
    workers that are alive.

        try:
            await session.run(train)
        except cl.DriverLost:
            await session.run(train)  # With a new driver.

    incarnation: how many drivers the session had before this one.
    detail: the reason, as far as known.
    nobody_began: no worker had heard of the run, so it may be begun once more.
    """

    incarnation: int
    detail: str
    nobody_began: bool = False

    def __str__(self) -> str:
        return (
            f"the driver actor (incarnation {self.incarnation}) is gone: {self.detail}. The "
            "workers stop. Call run() again: it starts a new driver, which takes over the "
            "workers that are alive."
        )


class HeadLost(DriverLost):
    """The head node of the cluster accepts no connections, so no driver can report, and no new
    driver can be started."""

    def __str__(self) -> str:
        return (
            f"the head node of the cluster is gone: {self.detail}. The result of this run cannot "
            "be retrieved. Restart the cluster and make a new Session; with checkpoint= it "
            "resumes from the last checkpoint"
        )


@dataclass(eq=False, repr=False)
class StateLost(ChoruslineError):
    """Every rank that kept some part of an optimizer's state died, so the run cannot continue from
    memory.

        try:
            cl.run(train, num_workers=(1, 4))
        except cl.StateLost as error:
            print(error.replicas, error.lost)

    replicas: ranks that kept each part; 0 if every rank kept all of it.
    lost: which part.
    remedy: RESUMES or LOADS_SHARDS, from what the state comes again.
    """

    generation: int
    replicas: int
    lost: str
    remedy: str = RESUMES

    def __str__(self) -> str:
        remedy = f"{self.remedy} ({PAGE_ON[self.remedy]})."
        if not self.replicas:
            return f"the run cannot continue: {self.lost}. {remedy}"
        held, at_once, them = (
            ("1 rank", "one worker", "it")
            if self.replicas == 1
            else (f"{self.replicas} ranks", f"{self.replicas} workers", "them")
        )
        return (
            f"the run cannot continue, because a part of the optimizer's state was kept on {held} "
            f"only, and was lost with {them}. With ZeroRedundancyOptimizer(..., "
            f"replicas={self.replicas + 1}) {at_once} may be lost at a time. "
            f"{remedy} Lost in generation {self.generation}: {self.lost}"
        )


@dataclass(eq=False, repr=False)
class StreamLost(ChoruslineError, RuntimeError):
    """The reader of a Stream is gone, and the run cannot have the rows read again.

        try:
            await session.run(train, rows=rows)
        except cl.StreamLost as error:
            print(error.why, error.remedy)

    why: how the reader ended. remedy: a sentence.
    """

    why: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"the reader of a Stream is gone ({self.why}), and the rows that it had read are "
            f"lost. {self.remedy}"
        )


def ends_a_generation(error: BaseException) -> bool:
    """Whether the run may continue in a new generation after this error.

    A mismatch is not among these errors: it is the program's fault and would come again. A
    checkpoint that ranks did not live to write is: it says `is_by_loss`.
    """
    ends = PeerLost | CollectiveTimeout | GroupAborted | StoreTimeout | StoreLost
    return isinstance(error, ends) or getattr(error, "is_by_loss", False)
