"""The example as a Ray job, unchanged, on a cluster started as a user would: with Ray's token."""

import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient

from tests import ROOT
from tests.harness.head_node import (
    BIN,
    ENVIRONMENT,
    MARK,
    dashboard_of_head,
    wait_until,
)

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
TINY = ["--preset", "tiny", "--files", "6", "--block", "32", "--batch-size", "32"]


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """Address of the dashboard of a head node of our own, which asks for the token."""
    with dashboard_of_head(TOKEN) as address:
        yield address


@pytest.mark.slow
def test_a_job_without_the_token_is_refused(dashboard: str) -> None:
    done = submit(dashboard, "--help", environment={"RAY_AUTH_MODE": "disabled"})
    assert done.returncode != 0
    assert "token" in (done.stdout + done.stderr).lower()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_example_runs_unchanged_as_a_job(dashboard: str, tmp_path: Path) -> None:
    done = submit(dashboard, *TINY, "--verify", "--out", str(tmp_path / "out"))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").open()]
    assert f"step {len(records)}/{len(records)}  loss" in said, "no plain lines in the job's log"
    assert "is out of data; the others finish the epoch" in said
    assert "parameters against one process" in said
    assert (tmp_path / "out/loss.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_job_that_the_cluster_is_too_small_for_fails_and_says_so(
    dashboard: str, tmp_path: Path
) -> None:
    done = submit(dashboard, *TINY, "--gpu", "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "the cluster has no GPU, and it has no autoscaler" in done.stdout + done.stderr


ENDLESS = """
import time

def train(ctx):
    print("rank", ctx.rank, "trains")
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_is_stopped_ends_by_itself_and_leaves_no_worker(
    dashboard: str, tmp_path: Path
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    environment = {"PYTHONPATH": str(ROOT), "RAY_JOB_STOP_WAIT_TIME_S": "30"}
    bearer = {"Authorization": f"Bearer {TOKEN['RAY_AUTH_TOKEN']}"}
    client = JobSubmissionClient(dashboard, headers=bearer)
    job = client.submit_job(
        entrypoint=f"{sys.executable} -m chorusline.runtime.commands.command_line"
        " run endless.py:train"
        " --workers 2",
        runtime_env={"working_dir": str(tmp_path), "env_vars": environment},
    )
    wait_until(lambda: "[rank 1] rank 1 trains" in client.get_job_logs(job), 120)
    said = client.get_job_logs(job)
    assert "[rank 0] rank 0 trains" in said and "[rank 1] rank 1 trains" in said, said
    client.stop_job(job)
    wait_until(lambda: client.get_job_status(job).is_terminal(), 60)
    assert client.get_job_status(job) == "STOPPED"
    wait_until(lambda: not workers_alive(), 30)
    assert not workers_alive()
    # It was not killed: it came to its end, which takes closing the session.
    assert "Terminated: all ranks were stopped." in client.get_job_logs(job)


def workers_alive() -> list[str]:
    """Titles of the actor processes of this file's cluster."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title = (path / "cmdline").read_bytes().decode(errors="replace")
            is_ours = f"{MARK}=".encode() in (path / "environ").read_bytes()
            if is_ours and title.startswith(("ray::Worker", "ray::Driver")):
                found.append(title)
    return found


def submit(
    dashboard: str, *args: str, environment: Mapping[str, str] = TOKEN
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(BIN / "ray", "job", "submit", "--address", dashboard, "--working-dir", "."),
            *("--", "python", "examples/stdlib_gpt.py", *args),
        ],
        cwd=ROOT,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
