"""The programs of docs/collectives.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "collectives.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_of_the_page_runs(tmp_path: Path, number: int) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAMS[number])
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 4
