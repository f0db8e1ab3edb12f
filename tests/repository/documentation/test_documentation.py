"""The programs in the README and in docs/ run as they stand."""

import ast
import difflib
import inspect
import re

import pytest

import chorusline as cl
from chorusline.runtime.session.placing.placement import STRATEGIES
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
    *(f"data-{number}" for number in range(7) if number != 3),
    "from-ray-train-0",
    "from-torch-2",
    "from-torch-3",
    *(f"kill-a-worker-{number}" for number in range(2)),
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
    of_data = {name for name in programs() if name.startswith(("data", "recipes"))}
    # What stands for a sampler is in each run of the suite, as `ctx.shard` refuses one.
    assert of_data - SLOW == {"data-3"} and "WeightedRandomSampler" in programs()["data-3"]


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


def rows_of(page: str) -> list[list[str]]:
    text = (ROOT / "docs" / page).read_text()
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def test_the_page_of_options_has_each_argument_of_a_session_with_its_default() -> None:
    said = {
        cells[0].strip("`"): cells[1]
        for cells in rows_of("options.md")
        if cells[0].strip("`").islower()
    }
    parameters = inspect.signature(cl.Session.__init__).parameters
    assert said.keys() == parameters.keys() - {"self"}
    for name, default in said.items():
        wanted = 0 if name == "max_failures" else parameters[name].default
        assert ast.literal_eval(default.split("`")[1]) == wanted, name


def variables_of_the_product() -> set[str]:
    """The names of environment variables in files that read or set the environment."""
    found = set()
    for package in ("collectives", "actors", "runtime"):
        for file in (ROOT / package).rglob("*.py"):
            text = file.read_text()
            if re.search(r"os\.environ|environment: Mapping\[str, str\]|def environment_for", text):
                found |= {
                    node.value
                    for node in ast.walk(ast.parse(text))
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                    if re.fullmatch(
                        r"[A-Z][A-Z0-9]+(_[A-Z0-9]+)+|RANK|PATH|[A-Z]+BACKEND|RAY_[a-z_]+",
                        node.value,
                    )
                }
    constants = {"SC_PAGE_SIZE", "SC_PHYS_PAGES"}  # Of os.sysconf.
    return found - constants - set(STRATEGIES)


def test_the_page_of_options_has_each_environment_variable_of_the_code() -> None:
    said = {
        name
        for cells in rows_of("options.md")
        for name in re.findall(r"`([A-Z0-9_]+|RAY_[a-z_]+)`", cells[0])
    }
    assert said == variables_of_the_product()


def test_the_tutorial_shows_the_lines_in_which_its_two_programs_differ() -> None:
    (shown,) = re.findall(
        r"```diff\n(.*?)```", (ROOT / "docs/kill-a-worker.md").read_text(), re.DOTALL
    )
    before, after = (programs()[f"kill-a-worker-{n}"].splitlines() for n in range(2))
    differing = [
        line
        for line in difflib.unified_diff(before, after, n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert [line.split() for line in shown.splitlines()] == [
        [line[0], *line[1:].split()] for line in differing
    ]
