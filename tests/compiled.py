"""What tests import, compiled once for all processes of a run: `python -m tests.compiled`.

pytest rewrites the assertions of test modules and of its plugins. Each process of a run that finds
no such file, or for which PYTHONDONTWRITEBYTECODE is set, would rewrite all of them: half of what
it computes before its first test. `_pytest.assertion.rewrite` is private: constraints.txt has the
version of pytest.
"""

from __future__ import annotations

import compileall
import multiprocessing
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from _pytest.assertion import rewrite

from tests import ROOT

PACKAGES = ("actors", "collectives", "runtime", "chorusline", "tests")


def with_assertions() -> set[Path]:
    """The modules that pytest rewrites."""
    names = ("*.py", "**/test_*.py", "**/conftest.py", "contracts/*.py")
    found = {path for name in names for path in (ROOT / "tests").glob(name)}
    for installed in metadata.distributions():
        if any(one.group == "pytest11" for one in installed.entry_points):
            files = map(Path, map(installed.locate_file, installed.files or ()))
            found |= {file for file in files if file.suffix == ".py"}
    return found


def rewritten(path: Path) -> Path:
    """Where pytest looks for the module with its assertions rewritten; it is there now."""
    compiled = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(path, compiled) is None:
        source_hash, code = rewrite._rewrite_test(path, None)
        compiled.parent.mkdir(exist_ok=True)
        rewrite._write_pyc(SimpleNamespace(trace=print), code, source_hash, compiled)
    return compiled


def main() -> None:
    for package in PACKAGES:
        if not compileall.compile_dir(ROOT / package, quiet=1):
            sys.exit(1)
    with multiprocessing.Pool(2) as processes:
        processes.map(rewritten, sorted(with_assertions()), chunksize=8)


if __name__ == "__main__":
    main()
