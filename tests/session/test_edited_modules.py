"""A module that is edited between two runs, which the workers have imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from ray import cloudpickle

import chorusline as cl


class Module:
    """A module in a folder that the program and the workers have on their path."""

    name = "edited_between_runs"

    def __init__(self, folder: Path) -> None:
        self.file = folder / f"{self.name}.py"
        self._num_writes = 0
        self.write("old")
        self.imported = importlib.import_module(self.name)

    def write(self, said: str) -> None:
        """As an editor does, a second later each time."""
        self.file.write_text(f"def train(ctx):\n    return {said!r}\n")
        self._num_writes += 1
        os.utime(self.file, ns=(0, self._num_writes * 10**9))

    def reload(self) -> ModuleType:
        return importlib.reload(self.imported)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Module(tmp_path)
    del sys.modules[Module.name]


async def test_a_session_whose_workers_have_imported_a_module_warns_once_of_each_edit(
    session: cl.Session, module: Module, caplog: pytest.LogCaptureFixture
) -> None:
    folder, train = str(module.file.parent), module.imported.train
    await session.run(lambda ctx: sys.path.insert(0, folder))
    try:
        assert await session.run(train) == ["old", "old"]
        module.write("new")
        assert not caplog.records
        assert await session.run(module.reload().train) == ["old", "old"]
        (warning,) = caplog.messages
        assert warning.startswith(f"{module.file} changed after an earlier run of this session")
        assert warning.endswith(f"ray.cloudpickle.register_pickle_by_value({Module.name})")
        await session.run(module.imported.train)
        assert len(caplog.messages) == 1

        cloudpickle.register_pickle_by_value(module.imported)
        try:
            assert await session.run(module.imported.train) == ["new", "new"]
            module.write("newer")
            assert await session.run(module.reload().train) == ["newer", "newer"]
        finally:
            cloudpickle.unregister_pickle_by_value(module.imported)
        assert len(caplog.messages) == 1
    finally:
        await session.run(lambda ctx: sys.path.remove(folder))
