"""All tests that need a GPU, on this machine's: what `make test-gpu` runs.

    python -m tests.on_gpu [--out FILE] [folders, files and options of pytest]

Prints driver, devices and versions, runs the tests that are marked `gpu` (those on the stand-in are
not), and writes one JSON object: what was seen, how often each outcome came, and what was skipped,
left out or failed. The exit status is 0 if tests ran and none failed, 1 if not, and 3 without a
GPU.

Only torch, CuPy and pytest have to be there. A file whose imports need a package that is missing,
such as Ray, is left out, and the JSON names both. Where a command may run for some minutes only,
name one folder of tests at a time, each with an --out of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.gpu_machine import NO_GPU, seen, show, why_no_gpu
from tests import ROOT

MISSING = re.compile(r"ModuleNotFoundError: (?:No module named|import of) '?([\w.]+)")
ALSO_WITHOUT_PLUGINS = ("-o", "addopts=-ra", "--continue-on-collection-errors")
"""Options of pytest: marks of plugins that are not installed are no errors."""


def outcomes(junit: str) -> dict[str, Any]:
    """counts: by outcome. skipped, failed: tests with pytest's sentence. left_out: files with
    what they need. junit: pytest's report."""
    counts: Counter[str] = Counter()
    found: dict[str, dict[str, str]] = {"skipped": {}, "failed": {}, "left_out": {}}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        outcome = "passed"
        for part in case:
            missing = MISSING.search(part.text or "")
            if part.get("message") == "collection failure" and missing:
                outcome = "left_out"
                found[outcome][name.strip(".")] = f"needs the package {missing[1]}"
            elif part.get("message") == "collection skipped":
                outcome = "left_out"
                reason = (part.text or "").partition("Skipped: ")[2].removesuffix("')")
                found[outcome][name.strip(".")] = reason
            elif part.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if part.tag == "skipped" else "failed"
                found[outcome][name] = part.get("message", "")
        counts[outcome] += 1
    return {"counts": dict(counts), **found}


def main(arguments: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--out", type=Path, default=ROOT / "out" / "test-gpu.json")
    args, of_pytest = flags.parse_known_args(arguments)
    reason = why_no_gpu()
    if reason:
        print(reason)
        return NO_GPU
    machine = seen()
    show(machine)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", *ALSO_WITHOUT_PLUGINS]
        subprocess.run([*command, f"--junitxml={report}", *of_pytest], cwd=ROOT)
        if not report.exists():
            print("pytest has written no report: see what it says above")
            return 1
        found = outcomes(report.read_text())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"seen": machine, **found}, indent=1) + "\n")
    print(f"{found['counts']}; written: {args.out}")
    return 0 if found["counts"].get("passed") and not found["counts"].get("failed") else 1


if __name__ == "__main__":
    sys.exit(main())
