"""The programs in the README and in docs/ run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def programs() -> dict[str, str]:
    return {
        f"{page.stem}-{number}": program
        for page in PAGES
        for number, program in enumerate(
            re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        )
    }


SLOW = {
    "checkpoints-0",
    "from-ray-train-0",
    "from-torch-2",
    "from-torch-3",
    "getting-started-0",
    "torch-distributed-0",
    "training-0",
    "uneven-inputs-0",
}
"""Programs that start sessions, beside others in the fast suite that do the same."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in programs()],
)
def test_a_program_of_the_documentation_runs(tmp_path, name, on_cluster):
    script = tmp_path / "program.py"
    script.write_text(programs()[name])
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, env=on_cluster
    )
    assert ran.returncode == 0, ran.stderr
    if name == "README-0":
        assert len(eval(ran.stdout.strip().splitlines()[-1])) == 2, "one result per rank"
