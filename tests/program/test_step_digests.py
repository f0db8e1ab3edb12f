"""Digests of steps: the same on any number of workers, and what two runs differ in is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import chorusline as cl
from chorusline.runtime.commands.command_line import main
from chorusline.runtime.program.step_digests import digest_of, read_digests, write_digests


def net() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def run(path: Path, num_steps: int, *, changed: str = "", at: int = 0) -> None:
    """changed: the parameter or buffer of whose last value step `at` changes the last bit."""
    module = net()
    for step in range(1, num_steps + 1):
        if step == at:
            values = module.state_dict()[changed].view(-1)
            values[-1] = torch.nextafter(values[-1], torch.tensor(9.0))
        write_digests(path, step, module)


@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_the_first_step_that_differs_is_found_with_the_name(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "new/one.jsonl", tmp_path / "other.jsonl"
    run(one, 6)
    run(other, 8, changed=name, at=5)
    assert main(["compare", str(one), str(other)]) == 1
    told = capsys.readouterr().out
    assert told == f"4 steps, 1 to 4, are the same\nafter step 5 they differ in {name}\n"


def test_runs_that_are_the_same_have_exit_code_0_and_a_step_that_was_taken_again_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    run(one, 3, changed="0.bias", at=3)
    write_digests(one, 4, net())
    write_digests(one, 3, net())  # After a lost worker; step 4 has yet to come again.
    run(other, 4)
    with other.open("a") as file:
        file.write('{"step": 5, "dig')  # The worker was killed, and another one writes on.
    write_digests(other, 6, net())
    write_digests(other, 7, net())
    assert main(["compare", str(one), str(other)]) == 0
    assert capsys.readouterr().out == "3 steps, 1 to 3, are the same\n"


def test_files_that_cannot_be_compared_are_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    run(one, 2)
    write_digests(other, 7, net())
    (tmp_path / "notes").write_text("step 1\n")
    for file, words in [
        (other, "no step in common"),
        (tmp_path / "notes", "notes has no line that ctx.write_digests has written"),
        (tmp_path / "none", "No such file"),
    ]:
        with pytest.raises(SystemExit) as raised:
            main(["compare", str(one), str(file)])
        assert raised.value.code == 2 and words in capsys.readouterr().err


def test_a_digest_is_of_the_values_whatever_their_dtype_and_memory_format() -> None:
    values = torch.randn(2, 3, 4, 5)
    assert digest_of(values) == digest_of(values.to(memory_format=torch.channels_last))
    assert digest_of(values) != digest_of(values.flatten())
    assert digest_of(torch.zeros(2)) != digest_of(-torch.zeros(2))
    half = torch.ones(3, dtype=torch.bfloat16)
    assert digest_of(half) == digest_of(half.clone()) != digest_of(half.half())
    assert digest_of(torch.tensor(1)) != digest_of(torch.tensor(2))
    conjugate = torch.tensor([1 + 2j]).conj()
    assert digest_of(conjugate) == digest_of(torch.tensor([1 - 2j])) != digest_of(conjugate.conj())
    assert digest_of(torch.empty(0)) != digest_of(torch.empty(0, 1))


def train(ctx: cl.Context, file: Path, lr_of_step_6: float = 0.01) -> None:
    model = ctx.register("model", cl.DistributedDataParallel(net()))
    optim = ctx.register(
        "optim", cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01, replicas=2)
    )
    data = torch.randn(48, 4, generator=torch.Generator().manual_seed(5))
    for epoch in ctx.epochs(2):
        for step in ctx.steps(data, global_batch_size=8, micro_batch_size=2, epoch=epoch):
            for batch in step:
                model(batch).square().mean().backward()
            optim.step()
            optim.zero_grad()
            ctx.write_digests(file, model)
            optim.param_groups[0]["lr"] = lr_of_step_6 if ctx.step == 5 else 0.01


async def test_any_step_is_taken_again_on_another_number_of_workers_with_the_same_digests(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places, few = tmp_path / "checkpoints", {"CPU": 0.1}
    config = cl.CheckpointConfig(places, every_n_steps=4, num_to_keep=9)
    first, again, other = (tmp_path / f"{name}.jsonl" for name in ("first", "again", "other"))
    async with cl.Session(3, resources_per_worker=few, checkpoint=config) as session:
        await session.run(train, file=first)
    assert sorted(read_digests(first)) == [*range(1, 13)]
    [saved] = places.glob("step-00000004-*")
    resumed = cl.CheckpointConfig(tmp_path / "elsewhere", resume=saved)
    async with cl.Session(2, resources_per_worker=few, checkpoint=resumed) as session:
        await session.run(train, file=again)
        # The second run of the session begins anew, from the same checkpoint.
        await session.run(train, file=other, lr_of_step_6=0.02)
    assert sorted(read_digests(again)) == [*range(5, 13)]
    assert main(["compare", str(first), str(again)]) == 0
    assert capsys.readouterr().out == "8 steps, 5 to 12, are the same\n"
    assert main(["compare", str(first), str(other)]) == 1
    assert "step 5 is the same\nafter step 6 they differ in module.0.weight" in (
        capsys.readouterr().out
    )
