"""What `import chorusline` gives."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import chorusline
from tests import ROOT


def test_every_public_name_is_there():
    for name in chorusline.__all__:
        assert getattr(chorusline, name) is not None


LISTED = ast.parse(Path(chorusline.__file__).with_suffix(".pyi").read_text())


def test_the_stub_is_the_list_of_public_names():
    imported = [a.name for n in LISTED.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert all(
        a.asname == a.name for n in LISTED.body if isinstance(n, ast.ImportFrom) for a in n.names
    ), "a type checker takes `import x as x` alone for a name that is handed on"
    unlisted = {"ChoruslineStrategy", "load_ipython_extension", "unload_ipython_extension"}
    assert set(imported) == {*chorusline.__all__, *unlisted}


def test_an_import_waits_for_nothing_that_is_not_used():
    program = (
        "import sys, chorusline as cl\n"
        "few = {'ray', 'torch', 'chorusline.collectives', 'chorusline.runtime'}\n"
        "assert not few & {*sys.modules}, few & {*sys.modules}\n"
        "from chorusline import actors, collectives, runtime\n"
        "assert 'torch' not in sys.modules\n"
        "import torch.distributed as dist\n"
        "assert 'chorusline' in dist.Backend.backend_list\n"
        "assert cl.Join is cl.Join and 'chorusline.runtime.session.session' not in sys.modules\n"
        "from chorusline import *\n"
        "assert Session is cl.Session\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not ran.returncode, ran.stderr


CONTEXT = [
    "barrier",
    "broadcast",
    "device",
    "epochs",
    "forget",
    "generation",
    "group",
    "init_torch_distributed",
    "keep",
    "kept",
    "local_rank",
    "local_world_size",
    "node_rank",
    "rank",
    "reduce",
    "register",
    "report",
    "resumed_from",
    "save",
    "seed",
    "shard",
    "step",
    "steps",
    "world_size",
    "write_digests",
]
"""What a person sees who types `ctx.` and Tab. The docs explain each of them."""


def test_a_context_shows_the_names_that_users_type_and_no_others():
    shown = [name for name in dir(chorusline.Context) if not name.startswith("_")]
    assert shown == CONTEXT
    assert all(getattr(chorusline.Context, name).__doc__ for name in shown)


def test_a_join_shows_the_names_that_users_type_and_no_others():
    shown = [name for name in dir(chorusline.Join) if not name.startswith("_")]
    assert shown == ["live_ranks", "notify_join_context"]


def test_a_session_shows_the_names_that_users_type_and_no_others():
    shown = [name for name in dir(chorusline.Session(1)) if not name.startswith("_")]
    lifetime = ["close", "interrupt", "start", "stop"]
    runs = ["reports", "results", "run", "submit"]
    facts = ["name", "num_spares", "num_workers", "snapshot", "state", "trace"]
    assert shown == sorted(lifetime + runs + facts)


def test_a_group_shows_the_names_that_the_reference_explains():
    page = (ROOT / "docs/reference/collectives.md").read_text().split("::: chorusline.Group\n")[1]
    left_out = re.search(r'"!\^\((\S+)\)\$"', page)[1].split("|")
    with chorusline.Group.create(chorusline.HashStore(), rank=0, size=1) as group:
        names = {*dir(chorusline.Group), *vars(group)}
        shown = {name for name in dir(group) if not name.startswith("_")}
    assert shown == {name for name in names if not name.startswith("_")} - {*left_out}
    assert {*left_out} < names


FOLDERS = ["actors", "collectives", "runtime"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_second_copy_of_a_package_is_refused(name):
    """From the root of a checkout a folder could be imported without `chorusline.`."""
    ran = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert f"import chorusline.{name}, not {name}" in ran.stderr


def test_a_program_beside_packages_of_the_same_names_trains(tmp_path, on_cluster):
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"WHOSE = 'the program, {name}'\n")
    (tmp_path / "train.py").write_text(
        "import actors, collectives, runtime, torch\n"
        "import chorusline as cl\n"
        "def train(ctx):\n"
        "    model = cl.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    return [each.WHOSE for each in (actors, collectives, runtime)]\n"
        "if __name__ == '__main__':\n"
        "    print(cl.run(train, num_workers=1))\n"
    )
    ran = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=on_cluster,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert str([f"the program, {name}" for name in FOLDERS]) in ran.stdout
