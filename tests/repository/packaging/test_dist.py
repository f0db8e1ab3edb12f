"""What `make dist` builds, and that it works where nothing else of this repository is."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from tests.harness.head_node import ENVIRONMENT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
(PROGRAM,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PACKAGES = ("collectives", "actors", "runtime")
LIBRARY = "chorusline/collectives/shared_memory/ticks.so"
SOURCE = "collectives/shared_memory/ticks.c"


def test_the_classifiers_name_every_python_from_the_oldest_on() -> None:
    named = [
        int(found[1])
        for line in PROJECT["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", line))
    ]
    oldest = int(PROJECT["requires-python"].removeprefix(">=3."))
    assert named == [*range(oldest, oldest + len(named))]
    assert sys.version_info.minor in named


def test_every_extra_says_what_it_brings_where_people_install() -> None:
    page = (ROOT / "docs/install.md").read_text()
    for extra in PROJECT["optional-dependencies"]:
        assert f"| `{extra}` |" in page, f"docs/install.md has no row for {extra!r}"


def test_a_build_has_one_name_at_the_top_level_with_its_types(tmp_path: Path) -> None:
    """What a wheel is made of, without the wheel and its compiler."""
    steps = f"-q egg_info -e {tmp_path} build_py -d {tmp_path / 'lib'}"
    _run(sys.executable, "-c", "import setuptools; setuptools.setup()", *steps.split(), cwd=ROOT)
    assert [path.name for path in (tmp_path / "lib").iterdir()] == ["chorusline"]
    made = [path for path in (tmp_path / "lib").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "lib")) for path in made} == {
        f"chorusline/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    } | {f"chorusline/{name}" for name in ("__init__.py", "__init__.pyi", "py.typed")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    # -o: the environment that runs the tests is there, and is not made anew.
    given = (f"DIST={folder}", f"BIN={Path(sys.executable).parent}")
    _run("make", "-o", ".venv/installed", "dist", *given, cwd=ROOT, timeout_s=300)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_wheel_and_an_sdist_have_all_files_of_the_packages(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    ours = {
        f"chorusline/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    } | {f"chorusline/{name}" for name in ("__init__.py", "__init__.pyi", "py.typed")}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {re.sub(r"(?<=/ticks).*(?=[.]so$)", "", name) for name in in_wheel} == ours | {LIBRARY}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= ours | {"README.md", "LICENSE", "pyproject.toml", SOURCE}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_ten_lines_run_in_a_clean_environment_from_either_file(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    (tmp_path / "ten_lines.py").write_text(PROGRAM)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    of_versions = ("-c", ROOT / "constraints.txt")
    for file, how in zip(built, ((), ("--no-deps", "--force-reinstall")), strict=True):
        _run(*pip, *of_versions, *how, file, cwd=tmp_path, timeout_s=800)
        where = "import chorusline.runtime as r, chorusline; print(r.__file__, chorusline.__file__)"
        places = _run(python, "-c", where, cwd=tmp_path, timeout_s=60).split()
        assert all(place.startswith(str(tmp_path / "env")) for place in places)
        said = _run(python, "ten_lines.py", cwd=tmp_path, timeout_s=300)
        assert len(eval(said.strip().splitlines()[-1])) == 2, "one result per rank"
        command = (python.with_name("chorusline"), "--version")
        assert _run(*command, cwd=tmp_path, timeout_s=60) == f"chorusline {PROJECT['version']}\n"


ASKED = """import torch
from torch.distributed.fsdp import fully_shard
import chorusline as cl

def train(ctx: cl.Context) -> int:
    model = cl.DistributedDataParallel(torch.nn.Linear(2, 1))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1)
    reveal_type(ctx.rank)
    reveal_type(ctx.register("model", model))
    reveal_type(ctx.reduce(ctx.rank, "max"))
    reveal_type(ctx.reduce(0.5, weight=2))
    reveal_type(ctx.reduce(torch.ones(2)))
    reveal_type(optim.num_steps)
    sharded = torch.nn.Linear(2, 1)
    fully_shard(sharded)
    with cl.Join([model, optim]), cl.Join([sharded]):
        return 1

reveal_type(cl.Session(2))
reveal_type(cl.Group.create(cl.HashStore(), 0, 1))
"""
REVEALED = ("int", "DistributedDataParallel", "int", "float", "Tensor", "int", "Session", "Group")
"""What type checkers say of ASKED, without the modules that mypy names."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_type_checkers_know_the_types_of_an_installed_wheel(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("pyright", reason="the extra dev is not installed")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    zipfile.ZipFile(built[0]).extractall(site)
    # torch and Ray are those of the tests, which stand in another environment.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "asked.py").write_text(ASKED)
    by_mypy = _run(
        *(sys.executable, "-m", "mypy", "--python-executable", python, "asked.py"),
        cwd=tmp_path,
        timeout_s=300,
    )
    by_pyright = _run(
        *(sys.executable, "-m", "pyright", "--pythonpath", python, "asked.py"),
        cwd=tmp_path,
        timeout_s=200,
    )
    assert "Success: no issues found" in by_mypy and "0 errors" in by_pyright
    found = re.findall(r'Revealed type is "(.*)"', by_mypy)
    assert tuple(re.sub(r"(?<![\w.])(?:\w+\.)+", "", one) for one in found) == REVEALED
    assert tuple(re.findall(r'Type of ".*" is "(.*)"', by_pyright)) == REVEALED


def _run(*command: str | Path, cwd: Path, timeout_s: float = 100.0) -> str:
    """What the command prints, in an environment that does not know this repository."""
    env = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
