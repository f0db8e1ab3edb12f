"""The programs in the README and in docs/ run as they stand."""

import re

import pytest

from tests import ROOT
from tests.harness.programs import output_of

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
    "close-the-laptop-0",
    *(f"data-{number}" for number in range(4)),
    *(f"input-{number}" for number in range(3)),
    "from-ray-train-0",
    "from-torch-2",
    "from-torch-3",
    *(f"recipes-{number}" for number in range(7)),
    "same-result-0",
    "torch-distributed-0",
    *(f"tracking-{number}" for number in range(2)),
    "training-0",
    "uneven-inputs-0",
}
"""Programs that start sessions, beside others in the fast suite that do the same."""


def test_the_programs_that_are_called_slow_exist() -> None:
    assert programs().keys() >= SLOW
    assert {name for name in programs() if name.startswith(("data", "input", "recipes"))} <= SLOW


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in programs()],
)
def test_a_program_of_the_documentation_runs(tmp_path, name, on_cluster):
    script = tmp_path / "program.py"
    script.write_text(programs()[name])
    said = output_of(script, timeout_s=100, environment=on_cluster)
    if name == "README-0":
        assert eval(said.strip().splitlines()[-1]) == [96, 96], "steps, by rank"


def test_the_program_of_the_readme_survives_the_kill_that_it_shows(tmp_path, on_cluster):
    (plan,) = re.findall(
        r'^\$ CHORUSLINE_FAULT_PLAN="(.*)" python train.py$',
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    script = tmp_path / "train.py"
    script.write_text(programs()["README-0"])
    environment = on_cluster | {"CHORUSLINE_FAULT_PLAN": plan}
    said = output_of(script, timeout_s=100, environment=environment)
    steps = eval(said.strip().splitlines()[-1])
    # One worker took the batches of two. Without the kill both take 96 steps.
    assert len(set(steps)) == 1 and steps[0] > 96
