"""The scripts of docs/before-and-after.md: both sides run, and print what they have to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT

PAGE = ROOT / "docs/before-and-after.md"
SCRIPTS = {
    (side, name): script
    for side, name, script in re.findall(
        r"```python (before|after)=([\w-]+)\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.timeout(300)
is_slow = pytest.mark.slow
"""Each script starts processes of its own, half of them a cluster."""


def printed(folder: Path, side: str, name: str, launcher: list[str]) -> str:
    """The last line of it."""
    script = folder / f"{side}.py"
    script.write_text(SCRIPTS[side, name])
    ran = subprocess.run(
        [sys.executable, *launcher, script],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
        # Ray would join a cluster of other tests.
        env={**os.environ, "RAY_ADDRESS": "local"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip().splitlines()[-1]


@is_slow
@pytest.mark.parametrize(
    ("name", "launcher"),
    [("ddp", TORCHRUN), ("fsdp2", TORCHRUN), ("ray-train", [])],
    ids=["ddp", "fsdp2", "ray-train"],
)
def test_a_script_prints_the_same_before_and_after(
    tmp_path: Path, name: str, launcher: list[str]
) -> None:
    if name == "ray-train":
        pytest.importorskip("pandas", reason="Ray Train needs the extra bench")
    before = printed(tmp_path, "before", name, launcher)
    assert re.fullmatch(r"(bias|loss) -?\d+\.\d{5}", before)
    assert printed(tmp_path, "after", name, []) == before


@is_slow
def test_the_script_with_uneven_inputs_gives_what_one_process_gives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    batches = [
        torch.randn(length, 4, 9, generator=torch.Generator().manual_seed(rank))
        for rank, length in enumerate((5, 9))
    ]
    for step in range(9):
        for of_rank in batches:
            if step < len(of_rank):
                batch = of_rank[step]
                loss = (model(batch[:, :8]) - batch[:, 8:]).square().mean()
                (loss / 2).backward()
        optim.step()
        optim.zero_grad()
    expected = pytest.approx(model.weight.flatten().tolist(), abs=2e-5)
    name, *told = printed(tmp_path, "after", "zero", []).split()
    assert name == "weights"
    assert [float(word) for word in told] == expected
    before = printed(tmp_path, "before", "zero", TORCHRUN).split()[1:]
    assert [float(word) for word in before] != expected, "torch's is exact now: say so in the page"


def step_20_of_one_process() -> str:
    """What both sides of torchft's script print: its ranks have the same batches."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.randn(64, 9)
    for _ in range(20):
        batch = data[torch.randint(64, (4,))]
        optim.zero_grad()
        loss = (model(batch[:, :8]) - batch[:, 8:]).square().mean()
        loss.backward()
        optim.step()
    with torch.no_grad():
        loss = (model(data[:, :8]) - data[:, 8:]).square().mean()
    return f"step 20, loss {loss.item():.3f}"


@is_slow
def test_the_script_that_survives_takes_the_steps_of_one_process(tmp_path: Path) -> None:
    assert printed(tmp_path, "after", "torchft", []) == step_20_of_one_process()


@is_slow
def test_torchfts_script_prints_the_same_as_ours_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", lighthouse.address())
    told = printed(tmp_path, "before", "torchft", [*TORCHRUN[:-1], "1"])
    lighthouse.shutdown()
    assert told == step_20_of_one_process()


def test_every_script_has_both_sides() -> None:
    assert {name for _, name in SCRIPTS} == {"ddp", "zero", "fsdp2", "ray-train", "torchft"}
    assert len(SCRIPTS) == 10
