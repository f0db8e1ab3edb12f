"""What `import chorusline` gives, and what it says when somebody else's package is in its way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import chorusline


def test_every_public_name_is_there():
    for name in chorusline.__all__:
        assert getattr(chorusline, name) is not None


def test_what_a_type_checker_is_told_is_what_is_imported_when_it_is_used():
    tree = ast.parse(Path(chorusline.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    told = {a.name: i.module for b in blocks for i in b.body for a in i.names}
    assert told == chorusline._WHEN_USED
    assert set(told) <= {*dir(chorusline), "ChoruslineStrategy"}


def test_an_import_waits_for_nothing_that_is_not_used():
    program = (
        "import sys, chorusline as cl\n"
        "loaded = [name for name in sys.modules if name.partition('.')[0] == 'runtime']\n"
        "assert not loaded, loaded\n"
        "import torch.distributed as dist\n"
        "assert 'chorusline' in dist.Backend.backend_list\n"
        "assert cl.Join is cl.Join and 'runtime.session.session' not in sys.modules\n"
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
]
"""What a person sees who types `ctx.` and Tab. The docs explain each of them."""


def test_a_context_shows_the_names_that_users_type_and_no_others():
    shown = [name for name in dir(chorusline.Context) if not name.startswith("_")]
    assert shown == CONTEXT
    assert all(getattr(chorusline.Context, name).__doc__ for name in shown)


@pytest.mark.parametrize("name", ["runtime", "actors", "collectives"])
@pytest.mark.parametrize("kind", ["package", "module", "namespace"])
def test_a_stranger_of_the_same_name_is_named_with_the_mend(tmp_path, name, kind):
    if kind == "module":
        stranger = tmp_path / f"{name}.py"
        stranger.write_text("")
    else:
        (tmp_path / name).mkdir()
        stranger = tmp_path / name / "__init__.py"
        if kind == "package":
            stranger.write_text("")
        else:
            # A folder without __init__.py loses against a package that stands anywhere on the
            # path, so it is in the way only of somebody who has imported it before.
            stranger = tmp_path / name
            (stranger / "x.py").write_text("")
    program = "import chorusline"
    if kind == "namespace":
        program = (
            "import sys; path = sys.path[:]; sys.path[:] = [sys.argv[1]]; "
            f"import {name}; sys.path[:] = path; import chorusline"
        )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert f"import {name!r} finds {stranger}" in ran.stderr
    assert "Rename that package" in ran.stderr
