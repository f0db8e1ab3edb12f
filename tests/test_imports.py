"""Imports point down only: runtime, actors, collectives; and each secret has one keeper."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("collectives", "actors", "runtime", "chorusline")
"""From the bottom up: each may import itself and what stands before it."""


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """What a file of `package` imports, anywhere in it: (module, line)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package itself; there are no packages in packages.
            yield (package if node.level else node.module or ""), node.lineno


def files() -> Iterator[tuple[str, Path]]:
    for layer in LAYERS[:-1]:
        for path in sorted((ROOT / layer).rglob("*.py")):
            yield layer, path
    yield "chorusline", ROOT / "chorusline.py"


def offences(layer: str, path: Path, text: str) -> list[str]:
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    found = []
    for module, line in imports(ast.parse(text), layer):
        top = module.split(".")[0]
        where = f"{path.name}:{line} imports {module}"
        if top in above:
            found.append(f"{where}, which stands above {layer}")
        if top == "ray" and layer == "collectives":
            found.append(f"{where}: collectives know no Ray")
        if top == "cupy" and path.name != "nccl.py":
            found.append(f"{where}: only collectives/nccl.py knows CuPy")
    return found


@pytest.mark.parametrize(("layer", "path"), list(files()), ids=lambda x: getattr(x, "name", x))
def test_every_file_imports_downward_only(layer: str, path: Path) -> None:
    assert offences(layer, path, path.read_text()) == []


def test_an_upward_import_is_found_wherever_it_hides() -> None:
    text = "def f():\n    from actors.worker import Worker\n    import cupy, ray.util\n"
    assert offences("collectives", Path("work.py"), text) == [
        "work.py:2 imports actors.worker, which stands above collectives",
        "work.py:3 imports cupy: only collectives/nccl.py knows CuPy",
        "work.py:3 imports ray.util: collectives know no Ray",
    ]
    assert offences("runtime", Path("join.py"), "from .session import Session\n") == []
    assert len(offences("actors", Path("crew.py"), "import runtime\nimport chorusline\n")) == 2


def test_the_drivers_process_and_a_readers_do_without_torch() -> None:
    """Ray imports the worker's file there, too, as the driver has handles of workers."""
    modules = "actors.driver, actors.worker, actors.row_reader"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
