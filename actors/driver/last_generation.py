"""The end of a run that cannot continue though ranks are left: they save what they hold. Pure.

A run is given up for lack of workers, after more losses than are allowed, or because its ranks do
not meet. If the session keeps checkpoints, the ranks first form one more generation, the last. Its
`Resumption` says what the run will end with (`gives_up`), so the ranks leave their functions as if
to run them again from the top, write a checkpoint instead (runtime/recovery/last_checkpoint.py),
and freeze once more. What they say then (`Frozen.saved`) goes into the text of the end, whatever it
is: nobody forms another generation, nobody is admitted, and a deadline ends the run in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..messages.messages import NOWHERE, Failure, Frozen, Loss
from .regeneration import what_counts
from .run_state import RunState
from .situation import Plan


def plan_of(run: RunState) -> Plan | None:
    """The last generation of a run, of all ranks that are frozen; None if they cannot save."""
    frozen = run.round.frozen
    if run.request.last_save_s is None or not may_save(frozen):
        return None
    try:
        progress = what_counts(frozen)
    except ValueError:
        return None  # They have run different programs: nobody knows what counts.
    ranks = tuple(sorted(frozen))
    return Plan(tuple(run.members[rank] for rank in ranks), ranks, progress, restarts=True)


def may_save(frozen: Mapping[int, Frozen]) -> bool:
    """Whether the ranks can write down all that counts. A rank that has not begun holds nothing, so
    it does not matter that it cannot."""
    begun = [report for report in frozen.values() if report.entered != NOWHERE]
    return bool(begun) and all(report.can_save for report in begun)


def epilogue(frozen: Mapping[int, Frozen]) -> str:
    """What has become of the last generation. frozen: the reports of the ranks that are left."""
    saved = next((report.saved for report in frozen.values() if report.saved), None)
    if saved is not None:
        return (
            f"everything registered is saved as of the last step that counts, in {saved}; "
            'with resume="auto" the next run resumes from it'
        )
    met = next((str(report.error) for report in frozen.values()), "no rank is left")
    return (
        f"the state of the ranks could not be saved: {met}; the next run resumes from the "
        "checkpoint before, if there is one"
    )


def with_epilogue(cause: Loss | Failure, epilogue: str) -> Loss | Failure:
    """The cause with its epilogue, if the cause is a loss: the text of a failure is the rank's."""
    if isinstance(cause, Loss):
        return replace(cause, detail=f"{cause.detail}; {epilogue}")
    return cause
