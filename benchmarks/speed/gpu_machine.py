"""What this machine has to run on a GPU with: one look, for `make test-gpu` and `make bench-gpu`.

    python -m benchmarks.speed.gpu_machine [--install]

Prints driver, devices and versions. --install: installs CuPy and NCCL of the CUDA that torch is
built for, if they are missing. Without a GPU it says so in one sentence, and the exit status is 3.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.alternation import commit
from chorusline.collectives.transports.nccl import load_nccl

_ROOT = Path(__file__).resolve().parents[2]

NO_GPU = 3
"""The exit status where there is no GPU to run on."""

_PACKAGES = ("torch", "ray", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def why_no_gpu() -> str:
    """Why nothing can run on a GPU here, in one sentence; empty if something can."""
    if torch.cuda.is_available():
        return ""
    build = f"torch {torch.__version__} is " + (
        f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    )
    if Path("/dev/nvidiactl").exists():
        return (
            f"there is no GPU that torch could use, although this machine has NVIDIA's driver "
            f"({build}): install PyTorch's CUDA build, or see why `nvidia-smi` fails"
        )
    return f"there is no NVIDIA GPU on this machine ({build}), so nothing was run"


def why_no_ranks() -> str:
    """Why ranks cannot use NCCL here, in one sentence; empty if they can."""
    reason = why_no_gpu()
    if not reason:
        try:
            load_nccl()
        except ImportError as error:
            return str(error)
    return reason


def seen() -> dict[str, Any]:
    """Driver, devices and versions, for the JSON of a run."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "commit": commit(),
        "driver": _driver(),
        "devices": [
            {"name": one.name, "memory_gib": round(one.total_memory / 2**30, 1)}
            for one in properties
        ],
        "peers": [
            [a != b and torch.cuda.can_device_access_peer(a, b) for b in range(count)]
            for a in range(count)
        ],
        "cuda_of_torch": torch.version.cuda,
        "nccl_of_torch": _nccl_of_torch() if count else None,
        "nccl_of_cupy": load_nccl().get_version() if _has_cupy() else None,
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name))},
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "CUDA_"))},
    }


def show(what: dict[str, Any]) -> None:
    for name, value in what.items():
        if value not in (None, [], {}, ""):
            print(f"{name}: {value}")


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().splitlines()[0].strip() if path.exists() else ""


def _nccl_of_torch() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def _has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def install() -> None:
    """CuPy and NCCL for the CUDA of this torch. Raises CalledProcessError."""
    extra = "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda13"
    print(f"installing chorusline[{extra}]: CuPy and NCCL", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "-c", str(_ROOT / "constraints.txt"), "-e", f"{_ROOT}[{extra}]"], check=True
    )


def main(arguments: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--install", action="store_true", help="what is missing beside torch")
    args = flags.parse_args(arguments)
    reason = why_no_gpu()
    if reason:
        print(reason)
        return NO_GPU
    if args.install and not _has_cupy():
        install()
    show(seen())
    return 0


if __name__ == "__main__":
    sys.exit(main())
