"""Imports point down only, between the packages and inside them; and each secret has one keeper.

Every import counts: those for type checking and those inside functions as well, since a reader
follows them alike.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

from tests import ROOT

LAYERS = ("collectives", "actors", "runtime", "chorusline")
"""From the bottom up: each may import itself and what stands before it."""
ORDER = {
    "collectives": [
        "contract",
        "diagnosis",
        "stores",
        "operations",
        "shared_memory",
        "objects",
        "transports",
        ("group", "group_family", "meeting", "neutral", "kept_results", "dry_run"),
        "torch_backend",
        ("__init__",),
    ],
    "actors": [
        "parcels",
        ("errors", "memory_kills", "fault_plan"),
        "ray_calls",
        "messages",
        "reporting",
        "driver",
        "worker",
        "forking",
        "worker_group",
        ("__init__",),
    ],
    "runtime": [
        "partition",
        "process",
        "join",
        "data/fetching",
        "data",
        "data/steps",
        "data_parallel/gradients",
        "data_parallel",
        "zero/shards",
        "zero/digests",
        "zero",
        "checkpoint/format",
        "checkpoint",
        "averaging",
        "lightning",
        "recovery",
        "program",
        "tracking",
        "notebook",
        "session/placing",
        "session/showing",
        "session/holding",
        "session/detached",
        "session",
        "commands",
        ("__init__",),
    ],
}
"""By package, its folders and the files of its root (in parentheses), in the order of LAYERS."""


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """What a file of `package` imports, anywhere in it: (module, line)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            # A relative import stays inside the package: no folder here climbs out of it.
            module = package if node.level else node.module or ""
            for alias in node.names:
                yield (alias.name if module == "chorusline" else module), node.lineno


def files() -> Iterator[tuple[str, Path]]:
    for layer in LAYERS[:-1]:
        for path in sorted((ROOT / layer).rglob("*.py")):
            yield layer, path
    yield "chorusline", ROOT / "chorusline/__init__.py"


def offences(layer: str, path: Path, text: str) -> list[str]:
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    found = []
    for module, line in imports(ast.parse(text), layer):
        module = module.removeprefix("chorusline.")
        top = module.split(".")[0]
        where = f"{path.name}:{line} imports {module}"
        if top in above:
            found.append(f"{where}, which stands above {layer}")
        if top == "ray" and layer == "collectives":
            found.append(f"{where}: collectives know no Ray")
        if top == "cupy" and path.name != "nccl.py":
            found.append(f"{where}: only collectives/transports/nccl.py knows CuPy")
    return found


@pytest.mark.parametrize(("layer", "path"), list(files()), ids=lambda x: getattr(x, "name", x))
def test_every_file_imports_downward_only(layer: str, path: Path) -> None:
    assert offences(layer, path, path.read_text()) == []


def test_an_upward_import_is_found_wherever_it_hides() -> None:
    text = (
        "def f():\n    from chorusline.actors.worker.worker import Worker\n"
        "    import cupy, ray.util\n"
    )
    assert offences("collectives", Path("work.py"), text) == [
        "work.py:2 imports actors.worker.worker, which stands above collectives",
        "work.py:3 imports cupy: only collectives/transports/nccl.py knows CuPy",
        "work.py:3 imports ray.util: collectives know no Ray",
    ]
    assert offences("runtime", Path("join.py"), "from .session import Session\n") == []
    text = "from chorusline import runtime\nimport chorusline\n"
    assert len(offences("actors", Path("worker_group.py"), text)) == 2


# -- inside a package ------------------------------------------------------------------------------


def texts_of(package: str) -> dict[str, str]:
    """By path in the repository, what stands in the files of `package`."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def edges(texts: Mapping[str, str]) -> Iterator[tuple[str, int, str]]:
    """Which file imports which other one of `texts`, and in which line: (from, line, to)."""
    paths = {module_of(path): path for path in texts}
    for path, text in texts.items():
        parents = PurePosixPath(path).parent.parts
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                modules = [alias.name.removeprefix("chorusline.") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = parents[: len(parents) - node.level + 1] if node.level else ()
                module = ".".join([*above, *([node.module] if node.module else [])])
                module = module.removeprefix("chorusline.")
                full = [f"{module}.{alias.name}" for alias in node.names]
                modules = [name if name in paths else module for name in full]
            else:
                continue
            for module in dict.fromkeys(modules):
                if module in paths and paths[module] != path:
                    yield path, node.lineno, paths[module]


def circle(texts: Mapping[str, str]) -> list[str]:
    """Files each of which imports the next, the first of them once more at the end; or none."""
    graph: dict[str, set[str]] = {}
    for importer, _, imported in edges(texts):
        # A package's __init__ hands names on: who imports it wants what it imports.
        if not imported.endswith("/__init__.py"):
            graph.setdefault(importer, set()).add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        # In graphlib's list the next file imports the one before.
        return list(reversed(error.args[1]))
    return []


def place(path: str) -> int | None:
    """Of a file in the order of its package; None for a file that has not found one."""
    package, *folders, name = PurePosixPath(path).with_suffix("").parts
    for number, entry in enumerate(ORDER[package]):
        if entry == "/".join(folders) if folders else not isinstance(entry, str) and name in entry:
            return number
    return None


def upward(texts: Mapping[str, str]) -> list[str]:
    found = []
    for importer, line, imported in edges(texts):
        here, there = place(importer), place(imported)
        if here is not None and there is not None and here < there:
            found.append(f"{importer}:{line} imports {imported}, which stands above it")
    return found


@pytest.mark.parametrize("package", ORDER)
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    assert circle(texts_of(package)) == []


@pytest.mark.parametrize("package", ORDER)
def test_every_import_goes_down_the_order_of_folders(package: str) -> None:
    assert upward(texts_of(package)) == []


@pytest.mark.parametrize("package", ORDER)
def test_every_file_stands_in_the_order(package: str) -> None:
    folders = [entry for entry in ORDER[package] if isinstance(entry, str)]
    assert [folder for folder in folders if not (ROOT / package / folder).is_dir()] == []
    assert [path for path in texts_of(package) if place(path) is None] == []


@pytest.mark.parametrize("package", ORDER)
def test_every_folder_says_what_it_is(package: str) -> None:
    texts = texts_of(package)
    inits = [path for path in texts if path.endswith("/__init__.py")]
    assert [path for path in inits if not ast.get_docstring(ast.parse(texts[path]))] == []


def test_circles_and_upward_imports_are_found_wherever_they_hide() -> None:
    work, group = "collectives/contract/work.py", "collectives/group.py"
    for_typing = "if TYPE_CHECKING:\n    from ..group import Group\n"
    deferred = "def f():\n    from .contract import work\n"
    texts = {"collectives/contract/__init__.py": "", work: for_typing, group: deferred}
    assert upward(texts) == [f"{work}:2 imports {group}, which stands above it"]
    assert circle(texts) in ([work, group, work], [group, work, group])

    texts[group] = "from chorusline.collectives.torch_backend import NAME, options\n"
    options, face = "collectives/torch_backend/options.py", "collectives/torch_backend/__init__.py"
    texts |= {options: "", face: "from ..group import Group\nfrom .options import NAME\n"}
    assert circle(texts) == []
    assert upward(texts)[1:] == [
        f"{group}:1 imports {face}, which stands above it",
        f"{group}:1 imports {options}, which stands above it",
    ]

    pieces, manifest = "runtime/checkpoint/format/pieces.py", "runtime/checkpoint/manifest.py"
    texts = {
        pieces: "import chorusline.runtime.checkpoint.manifest\n",
        manifest: "from .format import pieces\n",
    }
    assert upward(texts) == [f"{pieces}:1 imports {manifest}, which stands above it"]


# -- what is imported ------------------------------------------------------------------------------


def test_the_drivers_process_and_a_readers_do_without_torch() -> None:
    """Ray imports the worker's file there, too, as the driver has handles of workers."""
    places = "actors.driver.driver", "actors.worker.worker", "runtime.data.row_reader"
    modules = ", ".join(f"chorusline.{place}" for place in places)
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
