"""What a whole process of the training side remembers lives in three modules, where a reader finds
all of it; everything else is an attribute of some object."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

KEEPERS = (
    "runtime/process/running.py",
    "runtime/process/step_boundary.py",
    "runtime/process/between_runs.py",
)
"""The call of the train function in this process; the steps of its run; what stays for the next."""
IN_THE_USERS_PROCESS = {
    "runtime/notebook/cells.py": ["_started"],  # Sessions by cell: the kernel outlives them all.
    "runtime/notebook/magics.py": ["_cell_numbers"],  # Names the cells of one kernel.
    # The local cluster, which Ray has once in a process: the last session that uses it stops it.
    "runtime/session/connecting.py": [
        "_lasting_thread",
        "_num_users",
        "_one_at_a_time",
        "_our_node",
    ],
    "runtime/session/showing/rays_notices.py": ["_pids"],  # Of workers of which sessions tell.
    "runtime/tracking/tracking.py": ["_latest"],  # By tracker, which may follow many sessions.
}
"""By file, names that no worker process changes."""
UNCHANGEABLE = {
    "auto",
    "compile",
    "frozenset",
    "getLogger",
    "ParamSpec",
    "property",
    "range",
    "Struct",
    "tuple",
    "TypeVar",
}
"""Callables whose results hold no state of ours."""
CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft"),
    *("popitem", "remove", "reverse", "setdefault", "sort", "update"),
}
"""Methods that change a list, a dictionary, a set or a queue."""


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, `c` and `c(...)`."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def frozen_classes(tree: ast.Module) -> set[str]:
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def changed_names(tree: ast.Module) -> set[str]:
    """Names whose value some code changes: by an index, a method or an operator."""
    changed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed.add(last_name(node.value))
        elif isinstance(node, ast.AugAssign):
            changed.add(last_name(node.target))
        elif isinstance(node, ast.Attribute) and node.attr in CHANGES:
            changed.add(last_name(node.value))
    return changed


def bindings(body: list[ast.stmt], *, in_class: bool = False) -> Iterator[tuple[str, ast.expr]]:
    """What is bound when the module is imported, also in its classes and branches."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield last_name(target), node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            # The fields of a dataclass have a value of their own in each instance.
            if not (in_class and last_name(node.value) == "field"):
                yield last_name(node.target), node.value
        elif isinstance(node, ast.ClassDef):
            yield from bindings(node.body, in_class=True)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            branches = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            handlers = [handler.body for handler in getattr(node, "handlers", [])]
            for branch in (*branches, *handlers):
                yield from bindings(branch, in_class=in_class)


def state(path: Path) -> list[str]:
    """The names in this file that hold state of the whole process."""
    tree = ast.parse(path.read_text())
    harmless, changed = UNCHANGEABLE | frozen_classes(tree), changed_names(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found += node.names
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
            last_name(decorator) in ("cache", "lru_cache") for decorator in node.decorator_list
        ):
            found.append(node.name)
    for name, value in bindings(tree.body):
        match value:
            case ast.List(elts=[]) | ast.Dict(keys=[]):
                found.append(name)
            case ast.List() | ast.Dict() | ast.Set() | ast.ListComp() | ast.DictComp():
                if name in changed:
                    found.append(name)
            case ast.Call() if last_name(value) not in harmless:
                found.append(name)
    return sorted(set(found))


def offences() -> dict[str, list[str]]:
    paths = sorted((ROOT / "runtime").rglob("*.py"))
    found = {path.relative_to(ROOT).as_posix(): state(path) for path in paths}
    return {path: names for path, names in found.items() if names and path not in KEEPERS}


def test_what_a_process_remembers_is_in_three_modules() -> None:
    assert offences() == IN_THE_USERS_PROCESS


@pytest.mark.parametrize("keeper", KEEPERS)
def test_each_of_them_has_one_name_for_it(keeper: str) -> None:
    assert len(state(ROOT / keeper)) == 1


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("_now = None\ndef enter(context):\n    global _now\n    _now = context\n", ["_now"]),
        ("_by_group: WeakKeyDictionary[Group, int] = WeakKeyDictionary()\n", ["_by_group"]),
        ("_seen: list[int] = []\n", ["_seen"]),
        ("if True:\n    _by_name = dict()\n", ["_by_name"]),
        ("class Store:\n    kept = {}\n", ["kept"]),
        ("SIZES = {'K': 10}\ndef learn(name, size):\n    SIZES[name] = size\n", ["SIZES"]),
        ("NAMES = ['a']\ndef learn(name):\n    NAMES.append(name)\n", ["NAMES"]),
        ("class Meter:\n    pass\n_meter = Meter()\n", ["_meter"]),
        ("_numbers = itertools.count()\n", ["_numbers"]),
        ("@functools.cache\ndef table():\n    return {}\n", ["table"]),
        ("SIZES = {'K': 10}\nNAMES = ['a']\n_WORD = re.compile('a')\nT = TypeVar('T')\n", []),
        ("@dataclass(frozen=True)\nclass Facts:\n    pass\n_NOTHING = Facts()\n", []),
        ("@dataclass\nclass Place:\n    done: dict[str, int] = field(default_factory=dict)\n", []),
    ],
)
def test_state_is_found_wherever_it_hides(tmp_path: Path, planted: str, found: list[str]) -> None:
    file = tmp_path / "planted.py"
    file.write_text(planted)
    assert state(file) == found
