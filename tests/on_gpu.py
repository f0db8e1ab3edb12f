"""All tests that need a GPU, on this machine's: what `make test-gpu` runs.

    python -m tests.on_gpu [--out FILE] [options of pytest]

Prints driver, devices and versions, runs the tests that are marked `gpu` (those on the stand-in are
not), and writes one JSON object: what was seen, how often each outcome came, and what was skipped
or failed. The exit status is 0 if tests ran and none failed, 1 if not, and 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_machine import NO_GPU, seen, show, why_no_gpu
from tests import ROOT


def outcomes(junit: str) -> dict[str, Any]:
    """counts: by outcome. skipped, failed: tests with pytest's sentence. junit: pytest's report."""
    counts: Counter[str] = Counter()
    told: dict[str, dict[str, str]] = {"skipped": {}, "failed": {}}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        outcome = "passed"
        for part in case:
            if part.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if part.tag == "skipped" else "failed"
                told[outcome][name] = part.get("message", "")
        counts[outcome] += 1
    return {"counts": dict(counts), **told}


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
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}", *of_pytest]
        subprocess.run(command, cwd=ROOT)
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
