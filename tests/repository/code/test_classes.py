"""Classes are whole: each has a name of its own, and none is cut into a base class and its rest."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests import ROOT


@pytest.fixture(scope="module")
def trees() -> list[ast.Module]:
    """Of all files."""
    return [
        ast.parse(path.read_text())
        for package in ("collectives", "actors", "runtime")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def classes(trees: Iterable[ast.AST]) -> Iterator[ast.ClassDef]:
    for tree in trees:
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def bases(of: ast.ClassDef) -> list[str]:
    """Base classes that are named without a module: those of other libraries often are not."""
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in of.bases]
    return [base.id for base in plain if isinstance(base, ast.Name)]


def shared_names(trees: Iterable[ast.AST]) -> list[str]:
    times = Counter(one.name for one in classes(trees))
    return sorted(name for name, number in times.items() if number > 1)


def halves(trees: Iterable[ast.AST]) -> list[str]:
    """Base classes with one subclass that nothing else uses."""
    trees = list(trees)
    subclasses = defaultdict(list)
    in_bases = set()
    for one in classes(trees):
        for base in bases(one):
            subclasses[base].append(one.name)
        in_bases |= {id(node) for base in one.bases for node in ast.walk(base)}
    used = {
        node.id if isinstance(node, ast.Name) else node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in in_bases
    }
    names = {one.name for one in classes(trees)}
    single = {base for base, children in subclasses.items() if len(children) == 1}
    return sorted(single & names - used)


def private_members(trees: Iterable[ast.AST]) -> list[str]:
    """Of protocols, with the name of the protocol."""
    return [
        f"{one.name}.{name}"
        for one in classes(trees)
        if "Protocol" in bases(one)
        for member in one.body
        for name in [getattr(member, "name", "") or getattr(vars(member).get("target"), "id", "")]
        if name.startswith("_") and not name.endswith("__")
    ]


@pytest.mark.parametrize("found", [shared_names, halves, private_members])
def test_classes_are_whole(found: Callable[..., list[str]], trees: list[ast.Module]) -> None:
    assert found(trees) == []


def test_what_is_cut_is_found() -> None:
    one = "class Half: ...\nclass Whole(Half): ...\nclass Base: ...\nclass Sub(Base): ...\nBase()"
    other = (
        "class Sub(Protocol[T]):\n    _at: int\n    def _ask(self): ...\n    def __len__(self): ..."
    )
    trees = [ast.parse(one), ast.parse(other)]
    assert shared_names(trees) == ["Sub"]
    assert halves(trees) == ["Half"]
    assert private_members(trees) == ["Sub._at", "Sub._ask"]
