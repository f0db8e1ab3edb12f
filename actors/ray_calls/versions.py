"""Which versions a process runs, and whether two processes can work together."""

from __future__ import annotations

import importlib.metadata
import platform

UNKNOWN = "unknown"


def our_version() -> str:
    """Chorusline's; empty where the package is on the path, and was not installed."""
    try:
        return importlib.metadata.version("chorusline")
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions_here() -> dict[str, str]:
    import torch  # Not at the top of the file: the driver compares versions, and has no torch.

    # torch's version is of a type of its own, which would import torch wherever it is unpickled.
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "chorusline": our_version() or UNKNOWN,
    }


def difference(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """Why a worker that runs `theirs` cannot serve a caller that runs `ours`; empty if it can.

    Functions travel as byte code, which belongs to a minor version of Python; tensors and messages
    travel as pickles of classes. The build of torch (CPU, CUDA) may differ: a caller may be on a
    head node without a GPU.
    """
    differences = []
    for name, here in ours.items():
        there = theirs.get(name, UNKNOWN)
        if UNKNOWN not in (there, here) and _what_counts(name, there) != _what_counts(name, here):
            differences.append(f"{name} {there} (the caller has {here})")
    if not differences:
        return ""
    return (
        f"runs {' and '.join(differences)}; install the same on all nodes, or have Ray do it with "
        "runtime_env"
    )


def _what_counts(name: str, version: str) -> str:
    if name == "Python":
        return ".".join(version.split(".")[:2])
    return version.split("+")[0]
