"""What pytest reads instead of a test module says what was compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests import ROOT
from tests.compiled import rewritten, with_assertions


def test_a_module_is_read_with_its_assertions_rewritten_until_it_is_edited(tmp_path: Path) -> None:
    module = tmp_path / "test_of_two.py"
    module.write_text("number = 2\nassert number == 3\n")
    compiled = rewritten(module)
    assert compiled.parent == tmp_path / "__pycache__"
    code = rewrite._read_pyc(module, compiled)
    assert code is not None
    with pytest.raises(AssertionError, match="assert 2 == 3"):
        exec(code, {"__name__": "test_of_two"})
    module.write_text("number = 2\nassert number == 4\n")
    assert rewrite._read_pyc(module, compiled) is None
    with pytest.raises(AssertionError, match="assert 2 == 4"):
        exec(rewrite._read_pyc(module, rewritten(module)), {"__name__": "test_of_two"})


def test_the_modules_are_those_of_this_run(request: pytest.FixtureRequest) -> None:
    read = set(request.config.pluginmanager.rewrite_hook._rewritten_names.values())
    assert Path(__file__) in read
    # Modules of torch may be named as those of tests are.
    assert {path for path in read if path.is_relative_to(ROOT / "tests")} <= with_assertions()
