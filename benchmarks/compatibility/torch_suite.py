"""PyTorch's own distributed tests, on our backend and on Gloo: passed, failed, skipped.

    python -m benchmarks.compatibility.torch_suite [--ranks 2,4] [--only ours|gloo] [--match TEXT]
        [--json]
    python -m benchmarks.compatibility.torch_suite --source pytorch/test/distributed
        [--files GLOBS] [--on-cpu] …

The suite ships in torch's wheel (torch.testing._internal.distributed.distributed_test) and decides
by the name of the backend what it runs. So ours runs under the name of Gloo: in these processes
torch makes one of our process groups wherever it would make Gloo's. What fails there runs once more
under our own name, which some test may ask for, and is counted as it ends then. A test that Gloo
passes and ours does not is a difference; docs/torch-suite.md explains each.

With --source, the test files of a checkout of PyTorch run instead, in the same two ways. GLOBS,
with commas between, choose files; without them those run that docs/torch-suite.md counts. Most of
those tests are for GPUs: with --on-cpu they run as if they were for CPUs, and many do.

Needs the package expecttest.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

from benchmarks.alternation import parser, table
from benchmarks.compatibility.torch_files import reached_a_process_group, run_files

_OURSELVES = (sys.executable, "-m", "benchmarks.compatibility.torch_suite")
_TEST_TIMEOUT_S = 100


def put_ours_in_the_place_of_gloo() -> None:
    import torch.distributed
    from torch.distributed import distributed_c10d
    from torch.distributed.constants import default_pg_timeout

    from chorusline.collectives.group import Group
    from chorusline.collectives.stores.torch_store import StoreFromTorch
    from chorusline.collectives.torch_backend.process_group import ChoruslineProcessGroup

    gloos: Any = distributed_c10d.ProcessGroupGloo

    class InPlaceOfGloo(ChoruslineProcessGroup):
        profiling_name = "gloo"  # The suite looks for ranges of this name.

        _Options = gloos._Options
        create_device = staticmethod(gloos.create_device)
        create_default_device = staticmethod(gloos.create_default_device)

        def __init__(
            self, store: Any, rank: int, size: int, timeout: Any = default_pg_timeout
        ) -> None:
            """timeout: a timedelta, or Gloo's options."""
            reached_a_process_group()
            limit = getattr(timeout, "_timeout", timeout)
            host = Group.create(StoreFromTorch(store), rank, size, timeout_s=limit.total_seconds())
            super().__init__(host, store)
            self.gloo_options = gloos._Options()
            self.gloo_options._timeout = limit

        def _set_default_timeout(self, timeout: Any) -> None:
            super()._set_default_timeout(timeout)
            self.gloo_options._timeout = timeout

        @property
        def options(self) -> Any:
            return self.gloo_options

    for place in (distributed_c10d, torch.distributed):
        place.ProcessGroupGloo = InPlaceOfGloo  # type: ignore[attr-defined]


def run_suite(backend: str, num_ranks: int, wanted: str) -> dict[str, str]:
    """What became of each test: passed, skipped, or the end of what it said.

    backend: "gloo", "ours" under its name, or "chorusline". wanted: a part of the tests' names, or
    several whole names with commas between.

    Ranks are forks of this process, which has imported torch: a fresh interpreter for each rank of
    each test would take an hour.
    """
    name = "gloo" if backend == "ours" else backend
    os.environ |= {"BACKEND": name, "WORLD_SIZE": str(num_ranks)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    scratch = tempfile.TemporaryDirectory()
    os.environ["TEMP_DIR"] = scratch.name
    os.environ["INIT_METHOD"] = f"file://{scratch.name}/shared_init_file"
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    import chorusline  # noqa: F401  # registers ours

    torch.set_num_threads(1)
    logging.getLogger(common_distributed.__name__).setLevel(logging.WARNING)
    common_distributed.TIMEOUT_DEFAULT = _TEST_TIMEOUT_S
    common_distributed.TIMEOUT_OVERRIDE = {}
    if backend == "ours":
        put_ours_in_the_place_of_gloo()

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    names = list(unittest.TestLoader().getTestCaseNames(Suite))
    names = (
        [name for name in wanted.split(",") if name]
        if "," in wanted
        else [name for name in names if wanted in name]
    )
    outcomes: dict[str, str] = {}
    for name in names:
        began_at = time.monotonic()
        result = unittest.TextTestRunner(stream=io.StringIO()).run(Suite(name))
        told = [text for _, text in result.errors + result.failures]
        if told:
            outcomes[name] = told[0][-3000:]
        else:
            outcomes[name] = "skipped" if result.skipped else "passed"
        word = "FAILED" if told else outcomes[name]
        seconds = time.monotonic() - began_at
        print(f"{backend}, {num_ranks} ranks: {name} {word} {seconds:.1f} s", file=sys.stderr)
    return outcomes


def counts(outcomes: dict[str, str]) -> tuple[int, int, int]:
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    skipped = sum(outcome == "skipped" for outcome in outcomes.values())
    return passed, len(outcomes) - passed - skipped, skipped


def in_a_process_of_its_own(backend: str, num_ranks: int, wanted: str) -> dict[str, str]:
    """The suite reads the backend and the number of ranks when it is imported."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes"
        command = [*_OURSELVES, "--write", str(path), "--only", backend]
        subprocess.run(
            [*command, "--ranks", str(num_ranks), "--match", wanted],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        outcomes: dict[str, str] = json.loads(path.read_text())
    failed = [name for name, told in outcomes.items() if told not in ("passed", "skipped")]
    if backend == "ours" and failed:
        # The comma at the end says that these are whole names.
        again = in_a_process_of_its_own("chorusline", num_ranks, ",".join([*failed, ""]))
        outcomes |= {name: told for name, told in again.items() if told == "passed"}
        own = sorted(name for name in failed if again[name] == "passed")
        print(f"ours, {num_ranks} ranks, passed under our own name: {', '.join(own) or 'none'}")
    return outcomes


FILES = (
    "test_c10d_common.py,test_c10d_gloo.py,test_c10d_object_collectives.py,test_functional_api.py,"
    "test_c10d_functional_native.py,test_device_mesh.py,checkpoint/**/test_*.py,"
    "_composable/fsdp/test_*.py,pipelining/test_[!s]*.py,pipelining/test_st*.py,"
    "pipelining/test_schedule_multiproc.py,tensor/parallel/test_*.py,_tensor/test_[!do]*.py,"
    "_tensor/test_dtensor.py,_tensor/test_op*.py"
)
"""What is left out needs no process group and takes long: a schedule's order, each operator of a
DTensor on ranks that are threads, and torch.compile of DTensors."""


def files_of_a_checkout(args: argparse.Namespace) -> None:
    """Run the files on Gloo, then on ours; files one after the other."""
    backends = [args.only] if args.only else ["gloo", "ours"]
    by_backend = {backend: _files_in_a_process(backend, args) for backend in backends}
    rows = []
    for name in next(iter(by_backend.values())):
        for backend, files in by_backend.items():
            outcomes = {test: ended["outcome"] for test, ended in files[name].items()}
            reached = sum(bool(ended["reached"]) for ended in files[name].values())
            rows.append((name, backend, *map(str, counts(outcomes)), str(reached)))
        if len(by_backend) == 2:
            gloos, ours = (by_backend[backend][name] for backend in backends)
            for test in differences(gloos, ours):
                print(f"\nDIFFERENCE in {name}: {test}")
                for backend, tests in (("gloo", gloos), ("ours", ours)):
                    print(f"{backend}: {tests.get(test, {}).get('outcome', 'absent')}")
    table("torch's test files", ("file", "backend", "passed", "failed", "skipped", "reached"), rows)
    if args.json:
        print(json.dumps({"figures": by_backend}))


def differences(gloos: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The tests that end in another way on ours; two failures are alike."""

    def word(tests: dict[str, Any], name: str) -> str:
        outcome = tests.get(name, {}).get("outcome", "absent")
        return outcome if outcome in ("passed", "skipped", "absent") else "failed"

    return [name for name in {**gloos, **ours} if word(gloos, name) != word(ours, name)]


def _files_in_a_process(backend: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "outcomes"
        command = [*_OURSELVES, "--write", str(written), "--only", backend]
        command += ["--source", args.source, "--files", args.files, "--match", args.match]
        command += ["--limit", str(args.limit), *(["--on-cpu"] if args.on_cpu else [])]
        # torch.set_num_threads(1) would make ranks that are threads fail at random.
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=one_thread)
        outcomes: dict[str, Any] = json.loads(written.read_text())
    return outcomes


def _write_files(args: argparse.Namespace) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if args.only == "ours":
        import chorusline  # noqa: F401  # registers ours

        put_ours_in_the_place_of_gloo()
    source = Path(args.source).resolve()
    paths = [path for glob in args.files.split(",") for path in sorted(source.glob(glob))]
    outcomes = run_files(
        list(dict.fromkeys(paths)), source, args.match, args.limit, on_cpu=args.on_cpu
    )
    Path(args.write).write_text(json.dumps(outcomes))


def main() -> None:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--ranks", default="2,4")
    flags.add_argument("--only", choices=["ours", "gloo", "chorusline"])
    flags.add_argument("--match", default="", help="run the tests whose names contain this")
    flags.add_argument("--source", help="test/distributed of a checkout of PyTorch")
    flags.add_argument("--files", default=FILES, help="globs below --source")
    flags.add_argument("--limit", type=float, default=100, help="seconds for a test of a file")
    flags.add_argument(
        "--on-cpu", action="store_true", help="let the files' tests for GPUs run on CPUs"
    )
    flags.add_argument("--write", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.source:
        _write_files(args) if args.write else files_of_a_checkout(args)
        return
    if args.write:
        outcomes = run_suite(args.only, int(args.ranks), args.match)
        Path(args.write).write_text(json.dumps(outcomes))
        return
    backends = [args.only] if args.only else ["gloo", "ours"]
    figures: dict[str, Any] = {}
    rows = []
    for num_ranks in map(int, args.ranks.split(",")):
        by_backend = {
            backend: in_a_process_of_its_own(backend, num_ranks, args.match) for backend in backends
        }
        for backend, outcomes in by_backend.items():
            passed, failed, skipped = counts(outcomes)
            rows.append((backend, str(num_ranks), str(passed), str(failed), str(skipped)))
            figures[f"{backend}/{num_ranks}"] = {
                "passed": passed,
                "failed": failed,
                "skipped": skipped,
                "outcomes": outcomes,
            }
            for name, told in outcomes.items():
                if told not in ("passed", "skipped"):
                    print(f"\n{backend}, {num_ranks} ranks: {name}\n{told}")
        if len(by_backend) == 2:
            for name, outcome in by_backend["gloo"].items():
                if outcome == "passed" != by_backend["ours"][name]:
                    print(f"DIFFERENCE, {num_ranks} ranks: {name} passes on Gloo, not on ours")
    table("torch's suite", ("backend", "ranks", "passed", "failed", "skipped"), rows)
    if args.json:
        print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
