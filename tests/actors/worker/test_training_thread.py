"""The thread of the user's function always delivers, whatever goes wrong in it."""

import asyncio
import sys
import threading
import time
from pathlib import Path

import pytest

from chorusline.actors.worker.training_thread import TrainingThread


def thread_of(function, conclude=lambda value, error: (value, error)):
    return TrainingThread(function, conclude, name="training", num_threads=1)


async def test_a_value_and_an_awaited_value_are_delivered():
    async def later():
        return 2

    assert await thread_of(lambda: 1).run() == (1, None)
    assert await thread_of(later).run() == (2, None)


async def test_an_error_is_handed_to_conclude():
    def fail():
        raise KeyError("column")

    value, error = await thread_of(fail).run()
    assert value is None and isinstance(error, KeyError)


async def test_an_error_in_conclude_is_raised_and_not_waited_for():
    def conclude(value, error):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        await thread_of(lambda: 1, conclude).run()


async def test_a_module_that_is_being_imported_is_imported_whole_before_the_function_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "import time\nfor _ in range(40):\n    time.sleep(0.02)\nlast = 1\n"
    (tmp_path / "slowly_imported.py").write_text(lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    begun = threading.Event()

    def imports():
        begun.set()
        import slowly_imported  # noqa: F401

        while True:
            time.sleep(0.01)

    thread = thread_of(imports)
    running = asyncio.create_task(thread.run(), name="running")
    await asyncio.to_thread(begun.wait)
    await asyncio.sleep(0.1)
    await thread.stop(0.05)
    _, error = await running
    assert isinstance(error, asyncio.CancelledError)
    assert sys.modules.pop("slowly_imported").last == 1


async def test_an_interrupt_comes_too_late_where_the_outcome_is_being_made():
    begun = threading.Event()

    def conclude(value: object, error: BaseException | None) -> object:
        begun.set()
        for _ in range(60):
            time.sleep(0.01)
        return value, error

    thread = thread_of(lambda: 1, conclude)
    running = asyncio.create_task(thread.run(), name="running")
    await asyncio.to_thread(begun.wait)
    await thread.stop(0.1)
    assert await running == (1, None)
