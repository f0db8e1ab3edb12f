"""The end of a run that cannot go on though its ranks live: they save what they hold. Pure.

A run is given up for want of workers, for more losses than it may have, or because its ranks do not
meet. If the session keeps checkpoints, its ranks first form one more generation, the last. Its
`Resumption` says what the run will end with (`gives_up`): so they leave their functions as for
running them again from the top, write a checkpoint instead (runtime/recovery/last_checkpoint.py),
and freeze once more. What they say then (`Frozen.saved`) goes into the text of the end, whatever it
is: nobody forms another generation, nobody is taken in, and a deadline ends the run in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..messages import NOWHERE, Failure, Frozen, Loss


def may_save(frozen: Mapping[int, Frozen]) -> bool:
    """Whether the ranks can write down all that there is. Who has not begun has nothing, and does
    not stand against it."""
    begun = [word for word in frozen.values() if word.entered != NOWHERE]
    return bool(begun) and all(word.can_save for word in begun)


def epilogue(frozen: Mapping[int, Frozen]) -> str:
    """What has become of the last generation. frozen: the words of those that are left of it."""
    saved = next((word.saved for word in frozen.values() if word.saved), None)
    if saved is not None:
        return (
            f"all that was registered is saved as of the last step that counts, in {saved}; "
            'with resume="auto" the next run goes on from there'
        )
    met = next((str(word.error) for word in frozen.values()), "no rank is left")
    return (
        f"what the ranks had could not be saved: {met}; the next run goes on from the checkpoint "
        "before, if there is one"
    )


def with_epilogue(cause: Loss | Failure, words: str) -> Loss | Failure:
    """The cause with its epilogue, where its text is ours."""
    if isinstance(cause, Loss):
        return replace(cause, detail=f"{cause.detail}; {words}")
    return cause
