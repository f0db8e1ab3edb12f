"""What a traceback shows of an error with which a run ends."""

from __future__ import annotations

import asyncio
import traceback

import pytest

from chorusline.actors.errors import WorkerLost
from chorusline.actors.messages.outcomes import RemoteTraceback
from chorusline.runtime.session.interrupts import users_frames


async def fails(error: BaseException) -> None:
    try:
        raise error
    finally:
        await asyncio.sleep(0)


def of_a_rank() -> BaseException:
    error = KeyError("learning_rate")
    error.__cause__ = RemoteTraceback("its frames")
    return error


@pytest.mark.parametrize(
    ("error", "is_cut"),
    [(WorkerLost("run", 0, [1], "killed"), True), (of_a_rank(), True), (KeyError("ours"), False)],
)
def test_only_the_users_frames_of_a_told_error_are_shown(
    error: BaseException, is_cut: bool
) -> None:
    with pytest.raises(type(error)) as raised:
        asyncio.run(fails(error))
    kept = traceback.extract_tb(users_frames(error, raised.tb))
    files = {frame.filename for frame in kept}
    assert (files == {__file__}) == is_cut
    assert [frame.name for frame in kept][-1] == "fails"
