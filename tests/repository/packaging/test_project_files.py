"""Files at the root say the same as each other, and as what is there."""

import re
import subprocess
import tomllib

import yaml

import chorusline as cl
from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_file_that_has_the_version_has_the_same() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changed = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cl.__version__ == PROJECT["version"] == cited["version"] == changed[0]
    assert cited["license"] == PROJECT["license"]


def test_the_hosted_workflow_runs_every_python_that_is_supported() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    named = [
        line.rpartition(" ")[2]
        for line in PROJECT["classifiers"]
        if re.search(r":: Python :: 3\.", line)
    ]
    assert jobs["all"]["strategy"]["matrix"]["python"] == named
    (setup,) = (s["with"] for s in jobs["oldest"]["steps"] if "setup-python" in s.get("uses", ""))
    assert PROJECT["requires-python"] == f">={setup['python-version']}"


def test_make_without_a_target_lists_every_target() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    said = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    listed = [re.match(r"make (\S+) +\S", line) for line in said.splitlines()]
    assert [line and line[1] for line in listed] == targets.split()


def test_a_hook_runs_each_command_of_make_check_before_a_commit() -> None:
    (recipe,) = re.findall(
        r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    for command in recipe.split("\n\t"):
        wanted = command.strip().lstrip("@").replace("$(BIN)", ".venv/bin").replace("$$", "$")
        wanted = wanted.removesuffix(" --check")
        assert any(wanted in entry for entry in hooks), wanted


def test_the_places_that_contributing_names_are_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (table,) = re.findall(r"^\| you change .*?\n\n", page, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`([\w/]+/[\w./-]*|\w+\.toml)`", table)
    assert len(named) > 30
    assert [place for place in named if not (ROOT / place).exists()] == []
