"""`chorusline compare`: the first step after which two runs differ, and in what."""

from __future__ import annotations

from pathlib import Path

from chorusline.collectives.contract.errors import listed, plain

from ..program.step_digests import compare_digests, read_digests
from .arguments import WrongUsage

_MOST_NAMES = 10


def show_comparison(one: Path, other: Path) -> int:
    """Exit code: 0 if all steps that both have are the same, else 1."""
    try:
        found = compare_digests(read_digests(one), read_digests(other))
    except (OSError, ValueError) as error:
        raise WrongUsage(str(error)) from None
    if found.same:
        print(f"{_steps(found.same)} the same")
    if found.step is None:
        return 0
    print(plain(f"after step {found.step} they differ in {listed(found.names, _MOST_NAMES)}"))
    return 1


def _steps(same: tuple[int, ...]) -> str:
    if len(same) == 1:
        return f"step {same[0]} is"
    return f"{len(same)} steps, {same[0]} to {same[-1]}, are"
