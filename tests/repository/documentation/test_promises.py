"""Each promise of docs/guarantees.md is kept by a test that every run of the suite holds, and the
tests that docs/features.md names exist."""

from __future__ import annotations

import re

import pytest

from tests import ROOT


def promises() -> list[str]:
    """The first column of the table under "What is promised"."""
    section = (ROOT / "docs/guarantees.md").read_text().split("## What is promised\n")[1]
    rows = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| ")]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]]


def test_every_promise_has_a_test_in_this_run(request: pytest.FixtureRequest) -> None:
    config = request.config
    if config.args != config.getini("testpaths") or config.getoption("keyword"):
        pytest.skip("only a part of the suite was asked for")
    kept = {
        what
        for item in request.session.items
        for mark in item.iter_markers("promise")
        for what in mark.args
    }
    assert len(promises()) > 10
    assert kept == set(promises())


def test_the_tests_that_the_page_of_features_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs/features.md").read_text())
    assert len(named) > 100
    texts = {file: (ROOT / file).read_text() for file, _ in named}
    assert [name for file, name in named if name and f"def {name}(" not in texts[file]] == []
