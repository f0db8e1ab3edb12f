"""Builds guard.cpp against the headers of the torch that is installed, once, and loads it.

The library must be loaded before torch is imported, which asks for hooks once. Therefore this file
imports no torch, and the ranks are forks of a process that has loaded the library (server.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def why_not() -> str:
    """Why there can be no stand-in on this machine; empty if there can be one."""
    if shutil.which("g++") is None:
        return "the stand-in GPU needs g++, to build some C++ against torch's headers"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():  # Also PyPI's build, of a plain version.
        return "the stand-in GPU takes the place of CUDA, which this build of torch has"
    if not (_torch() / "include" / "c10").is_dir():
        return "this torch has no C++ headers, which the stand-in GPU is built with"
    return ""


def build() -> Path:
    """The library; built if there is none of this source and this torch yet.

    Processes that start at the same time may all build it: each builds a file of its own name, and
    renames it when it is complete.
    """
    version = importlib.metadata.version("torch")
    key = hashlib.sha256(SOURCE.read_bytes() + f"{version} {_torch()}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"chorusline-stand-in-gpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else; remove it, or set TMPDIR")
    library = folder / f"guard-{key}.so"
    if not library.exists():
        unfinished = folder / f"guard-{key}-{os.getpid()}.unfinished"
        torch = _torch()
        command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o"]
        command += [str(unfinished), "-D_GLIBCXX_USE_CXX11_ABI=1", f"-I{torch}/include"]
        command += [f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib", "-lc10"]
        command += ["-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode != 0:
            raise RuntimeError(f"the stand-in GPU does not build:\n{built.stderr[-3000:]}")
        unfinished.rename(library)
    return library


def load(library: Path) -> ctypes.CDLL:
    """Before torch is imported; `install` on the result then makes the device known to torch."""
    guard = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    guard.stand_in_stream.restype = ctypes.c_longlong
    guard.stand_in_set_stream.argtypes = [ctypes.c_longlong]
    guard.stand_in_device_was_set.restype = ctypes.c_bool
    pointer = ctypes.POINTER(ctypes.c_longlong)
    guard.stand_in_take_wait.argtypes = [ctypes.c_longlong, pointer, pointer]
    guard.stand_in_take_wait.restype = ctypes.c_bool
    guard.stand_in_count_launch.argtypes = [ctypes.c_longlong]
    guard.stand_in_count_launch.restype = None
    guard.cuEventQuery.argtypes = [ctypes.c_void_p]
    guard.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(ctypes.c_int)]
    guard.stand_in_end_capture.restype = ctypes.c_bool
    guard.stand_in_keep_driver_busy.argtypes = [ctypes.c_double]
    return guard


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent
