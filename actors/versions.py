"""Which versions a process runs, and whether two processes can work together."""

from __future__ import annotations

import importlib.metadata
import platform

UNKNOWN = "unknown"


def versions_here() -> dict[str, str]:
    import torch  # Not above: the driver compares versions, and has no torch.

    try:
        ours = importlib.metadata.version("chorusline")
    except importlib.metadata.PackageNotFoundError:
        ours = UNKNOWN  # It is on the path, and was not installed.
    # A str: what torch has there is a type of its own, and would bring torch along.
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "chorusline": ours,
    }


def difference(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """What stands against a worker with `theirs` under a caller with `ours`; empty if nothing does.

    Functions travel as byte code, which belongs to a minor version of Python; tensors and our own
    messages as pickles of classes. The build of torch (CPU, CUDA) may differ: a caller on a head
    node without a GPU is not to be kept out.
    """
    told = []
    for name, here in ours.items():
        there = theirs.get(name, UNKNOWN)
        if UNKNOWN not in (there, here) and _what_counts(name, there) != _what_counts(name, here):
            told.append(f"{name} {there} where the caller has {here}")
    if not told:
        return ""
    return (
        f"runs {' and '.join(told)}; install the same on all nodes, or have Ray do it with "
        "runtime_env"
    )


def _what_counts(name: str, version: str) -> str:
    if name == "Python":
        return ".".join(version.split(".")[:2])
    return version.split("+")[0]
