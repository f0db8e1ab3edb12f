"""The programs in the README run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(programs())))
def test_a_program_of_the_readme_runs(tmp_path, number):
    script = tmp_path / "program.py"
    script.write_text(programs()[number])
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    assert len(eval(ran.stdout.strip().splitlines()[-1])) == 2, "one result per rank"
