"""The thread of the user's function always delivers, whatever goes wrong in it."""

import pytest

from actors.worker.training_thread import TrainingThread


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
