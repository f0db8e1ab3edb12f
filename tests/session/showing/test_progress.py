"""What the display concludes from reports, however they arrive, and what it prints in a log."""

import asyncio
import contextlib
import fcntl
import io
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

import chorusline as cl
from chorusline.actors.messages.messages import Report
from chorusline.actors.messages.run_status import RunStatus
from chorusline.actors.worker_group import recruiting
from chorusline.runtime.commands.status import drawn, survey
from chorusline.runtime.notebook.rank_output import show_line
from chorusline.runtime.session.showing.progress import Progress, is_terminal
from chorusline.runtime.session.showing.progress_model import (
    Pace,
    Places,
    ProgressModel,
    batches_left,
    headline,
    time_left,
)
from chorusline.runtime.session.showing.starting import Starting


def report(rank, number, num_batches, *, epoch=0, time=0.0):
    values = {"loss": 2.0 + rank, "tokens": 100, "epoch": epoch}
    values["batches_left"] = num_batches - number - 1
    return Report(rank, number, time, values, number + 1, number + 1)


def seen(*reports):
    total = ProgressModel()
    for one in reports:
        total = total.add(one)
    return total


def run_of(*num_batches, epoch=0):
    """Rank by rank, as a burst of reports comes in."""
    return [
        report(rank, number, count, epoch=epoch)
        for rank, count in enumerate(num_batches)
        for number in range(count)
    ]


def test_rank_without_batches_has_joined_once_another_takes_more():
    short = [report(0, 0, 2), report(0, 1, 2)]
    assert seen(*short, report(1, 0, 3), report(1, 1, 3)).joined == frozenset()
    assert seen(*short, *(report(1, n, 3) for n in range(3))).joined == {0}


def test_at_an_even_end_nobody_has_joined():
    assert seen(*run_of(4, 4)).joined == frozenset()


def test_rank_that_is_an_epoch_ahead_makes_nobody_join():
    first = run_of(2, 2)
    assert seen(*first[:2], report(0, 0, 2, epoch=1), *first[2:]).joined == frozenset()


def of_step(step, rank=0):
    return Report(rank, 0, 0.0, {"loss": 1.0}, global_step=step)


def test_the_step_is_that_of_the_furthest_rank_until_the_function_runs_again():
    """With the steps before the checkpoint that the run has resumed from."""
    ahead = [of_step(301), of_step(310), of_step(303, rank=1)]
    assert seen(*ahead).step == 310
    assert seen(*ahead, of_step(300, rank=1)).step == 300
    assert seen(*ahead, of_step(300, rank=1), of_step(300), of_step(304)).step == 304


def test_the_progress_of_a_resumed_run_counts_the_steps_before_the_checkpoint():
    places = places_of(RunStatus(0, taken=64, steps_before=300))
    pace = Pace()
    for now_s, taken in ((1.0, 60), (2.0, 64)):
        pace.look({}, now_s, taken)
    assert headline(ProgressModel(), places, pace, 365).startswith("step 364/365")
    assert time_left(places, pace, num_steps=400) == "0:09 left"
    # Before the first step, and where no optimizer of a session steps.
    begun = places_of(RunStatus(0, steps_before=300))
    assert headline(ProgressModel(), begun, None, 365).startswith("step 300/365")
    assert headline(seen(of_step(310)), begun, None, 365).startswith("step 310/365")
    back = places_of(RunStatus(0, taken=120, steps_before=-20))
    assert headline(seen(of_step(120)), back, None, 365).startswith("step 100/365")


def test_loss_is_the_mean_of_the_ranks_that_still_have_data():
    assert seen(report(0, 0, 5), report(1, 0, 5)).numbers["loss"] == 2.5
    assert seen(*run_of(1, 3)).numbers["loss"] == 3.0


def test_tokens_per_second_leave_out_the_step_that_paid_for_the_start():
    total = seen(*(report(0, number, 9, time=50.0 + number) for number in range(5)))
    assert total.tokens_per_s == 100


def test_a_number_of_any_size_is_a_few_characters():
    largest = {"loss": -1.5e308, "tokens": 1e308, "batches_left": 1e308, "epoch": 1e308}
    first = Report(0, 0, 0.0, largest, 1, 1)
    total = seen(first, Report(0, 1, 1.0, {**largest, "count": 10**300}, 2, 2))
    assert headline(total) == "step 2  loss -1.5e+308  count 1e+300  1e+308 tokens/s"
    assert batches_left(total) == ""
    few = {"a": 0, "b": 999, "c": 12_345_678, "d": float("inf"), "e": float("nan")}
    shown = "step 1  a 0.000  b 999.000  c 12,345,678  d inf  e nan"
    assert headline(seen(Report(0, 0, 0.0, few, 1, 1))) == shown


def test_many_ranks_are_counted_and_not_listed():
    assert batches_left(seen(*run_of(*range(1, 13)))).endswith(
        "0 to 0; 11 of 12 ranks are out of data"
    )


def test_reports_without_our_names_say_the_step_alone():
    total = seen(Report(0, 0, 0.0, {"accuracy": 0.5}, 2, 2))
    assert (total.step, total.tokens_per_s, batches_left(total)) == (2, None, "")
    assert "loss" not in total.numbers


def test_log_gets_whole_lines_with_the_join_and_the_end():
    log = io.StringIO()
    with Progress(5, console=Console(file=log, width=40)) as progress:
        for one in run_of(2, 5):
            progress.on_report(one)
    first, news, last = log.getvalue().splitlines()
    assert first.startswith("step 1/5  loss 2.000")
    assert news == "step 3: rank 0 is out of data; the others finish the epoch"
    assert last == "step 5/5  loss 3.000  batches left: rank 0 none, rank 1 0"


class Tee:
    """What programs put in the place of a stream, to write to a file as well."""

    def __init__(self):
        self.written = ""

    def write(self, text):
        self.written += text

    def flush(self):
        pass


class Closed(io.StringIO):
    def __init__(self):
        super().__init__()
        self.close()


class Written:
    written = ""

    def write(self, text):
        self.written += text


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_is_closed_counts_as_none_and_one_without_flush_is_not_flushed(
    monkeypatch, closed
):
    other = Written()
    monkeypatch.setattr(sys, "stdout", Closed() if closed == "stdout" else other)
    monkeypatch.setattr(sys, "stderr", Closed() if closed == "stderr" else other)
    assert not is_terminal(getattr(sys, closed))
    show_line("[rank 0] out", False)
    show_line("[rank 0] err", True)
    assert other.written == f"[rank 0] {'err' if closed == 'stdout' else 'out'}\n"


@pytest.mark.parametrize("stdout", [Tee(), None], ids=["tee", "none"])
@pytest.mark.parametrize("stderr", [Tee(), None], ids=["tee", "none"])
def test_a_stream_that_a_program_has_replaced_needs_only_write_and_flush(
    monkeypatch, stdout, stderr
):
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    console = Console(stderr=True, force_terminal=True, force_interactive=True)
    with Progress(console=console) as progress, Starting(progress):
        assert progress.is_shown
        progress.show_line("[rank 0] above", False)
        progress.show_line("[rank 0] an error", True)
    with Starting(Progress()):
        pass
    show_line("[rank 0] later", True)
    assert stdout is None or stdout.written.startswith("[rank 0] above\n")
    assert stderr is None or "[rank 0] later\n" in stderr.written


@pytest.mark.parametrize("is_entered", [True, False])
def test_the_second_run_of_a_progress_begins_anew(is_entered):
    log = io.StringIO()
    progress = Progress(5, console=Console(file=log, width=80))
    with progress if is_entered else contextlib.nullcontext():
        progress.begin()
        progress.look({0: status(0)}, {}, 1)
        for one in run_of(5):
            progress.on_report(one)
        progress.end()
        log.truncate(log.seek(0))
        progress.begin()
        progress.on_report(report(0, 0, 2))
        progress.end()
    assert log.getvalue().splitlines()[0] == "step 1/5  loss 2.000  batches left: rank 0 1"


def status(rank, *, epoch=1, taken=30, left=10, **more):
    return RunStatus(
        rank, taken=70, num_epochs=3, epoch=epoch, batches_taken=taken, batches_left=left, **more
    )


def places_of(*statuses, numbers=None, num_lost=0):
    return Places.of(dict(enumerate(statuses)), numbers, num_lost)


def test_headline_has_the_place_the_numbers_the_pace_and_the_workers():
    pace = Pace()
    for now_s in (1.0, 3.0):
        pace.look({0: status(0, samples=int(100 * now_s)), 1: status(1)}, now_s)
    reported = seen(Report(0, 0, 0.0, {"accuracy": 0.5, "top": {"five": 1.0}, "loss": 2e-5}))
    places = places_of(status(0), status(1, left=4), num_lost=1)
    assert headline(reported, places, pace) == (
        "epoch 2/3  step 30/40  loss 2e-05  accuracy 0.500  top.five 1.000  100 samples/s  "
        "2 workers, 1 lost"
    )
    without = places_of(status(0), status(1, has_joined=True), numbers={0: {"a": 1}, 1: {"a": 3}})
    assert headline(ProgressModel(), without) == "epoch 2/3  step 30/40  a 1.000  2 workers"
    assert batches_left(reported, places) == "batches left: rank 0 10, rank 1 4"
    assert batches_left(reported, places_of(status(0), status(1))) == "", "equal on all ranks"


def test_time_left_counts_the_epochs_to_come_and_is_of_the_pace_of_the_last_seconds():
    pace = Pace()
    for now_s, taken in ((1.0, 20), (3.0, 28)):  # 4 steps a second
        pace.look({0: status(0)}, now_s, taken)
    places = places_of(status(0), status(1))
    assert time_left(places, pace) == "0:12 left", "10 of this epoch, and 40 of the last"
    assert "epoch 2/3  step 30/40  0:12 left" in headline(ProgressModel(), places, pace)
    assert time_left(places, pace, num_steps=70 + 4 * 3700) == "1:01:40 left"
    assert time_left(places, pace, num_steps=70) == time_left(places, Pace()) == ""


def test_a_lost_rank_has_no_batches_left():
    reported = seen(report(0, 0, 9), report(1, 0, 5))
    assert batches_left(reported) == "batches left: rank 0 8, rank 1 4"
    assert batches_left(reported, places_of(status(0))) == "batches left: rank 0 8"


def test_a_lost_rank_has_no_part_in_the_numbers_of_the_headline():
    reported = seen(Report(0, 0, 0.0, {"loss": 0.1}), Report(1, 0, 0.0, {"loss": 9.0}))
    places = places_of(status(0), numbers={0: {"loss": 0.1}}, num_lost=1)
    assert "loss 0.100" in headline(reported, places)


def test_steps_without_data_count_in_the_epoch():
    shadows = status(0, taken=5, left=10, batches_shadowed=20)
    assert (places_of(shadows).done, places_of(shadows).total) == (25, 35)


def test_a_worker_that_has_come_takes_part_from_the_epochs_place_on():
    places = places_of(status(0, taken=163, left=75), status(1, taken=7, left=204))
    assert places.done == 163 and 163 + 203 <= places.total <= 163 + 204


def test_a_rank_that_has_not_begun_the_epoch_does_not_count_in_it():
    places = places_of(status(0, epoch=1, taken=40, left=0), status(1, epoch=2, taken=1))
    assert (places.of_epochs, places.done, places.total) == ("epoch 2/3", 40, 40)
    later = places_of(status(0, epoch=2), status(1, epoch=2))
    assert places.epoch_over(later) == "epoch 2/3 is over" and later.epoch_over(later) == ""
    first = places_of(status(0, epoch=0, taken=4))
    assert first.epoch_over(later) == "epoch 2/3 is over", "the step that follows is of all of them"


def test_a_number_that_is_reported_once_in_an_epoch_stays():
    first = Report(0, 0, 0.0, {"loss": 1.0, "accuracy": 0.25})
    assert seen(first, Report(0, 1, 1.0, {"loss": 0.5})).numbers == {"loss": 0.5, "accuracy": 0.25}


def train(ctx, pause_s=0.0):
    model = cl.DistributedDataParallel(torch.nn.Linear(2, 1))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)
    for epoch in ctx.epochs(2):
        with cl.Join([model, optim], skew_warning=None):
            for batch in ctx.shard(torch.ones(21, 2), batch_size=2, epoch=epoch):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
                time.sleep(pause_s)
        if ctx.rank == 0:
            print("x" * 200)
            ctx.report(accuracy=epoch + 0.5)


async def test_a_run_that_reports_nothing_in_its_steps_has_its_progress_in_a_log(session, capsys):
    """Without a line of the program, on stderr; a session in tests has no terminal."""
    await session.run(train)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("epoch 2/2  step 6/6  accuracy 1.500") and "2 workers" in last
    await session.run(lambda ctx: ctx.rank)
    assert capsys.readouterr().err == "", "nothing to say"


def never_registers(ctx, folder):
    model = cl.DistributedDataParallel(torch.nn.Linear(2, 1))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, replicas=2)
    while not ctx.reduce(float((Path(folder) / "told").exists()), op="max"):
        model(torch.ones(2, 2)).sum().backward()
        if optim.num_steps == 3 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optim.step()


async def test_a_loss_is_one_line_and_so_is_the_reason_why_no_worker_comes(
    cluster, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(recruiting, "WAITS_S", 0.1)
    said = ""
    async with cl.Session((1, 2), resources_per_worker={"CPU": 0.1}, timeout_s=20) as session:
        pids = await session.run(lambda ctx: os.getpid())
        running = asyncio.create_task(session.run(never_registers, folder=str(tmp_path)))
        async with asyncio.timeout(60):
            while "cannot admit it" not in said and not running.done():
                await asyncio.sleep(0.1)
                said += capsys.readouterr().err
        status = io.StringIO()
        Console(file=status, width=200).print(drawn(await survey(None)))
        (tmp_path / "told").touch()
        await running
    lines = (said + capsys.readouterr().err).splitlines()
    (loss,) = [line for line in lines if f"rank 1 (pid {pids[1]}) was killed or crashed" in line]
    assert loss.startswith("step 3: ") and "1 worker continues after" in loss
    assert f"  lost so far: 1, at step 3\n  {loss}\n" in status.getvalue()
    (why,) = [line for line in lines if "cannot admit it" in line]
    assert why.endswith(
        "has not registered its model and its ZeroRedundancyOptimizer (ctx.register)"
    )
    assert "1 worker at the end, 1 lost; 0 steps repeated" in lines


async def test_progress_and_output_can_be_switched_off(cluster, capsys):
    few = {"CPU": 0.1}
    async with cl.Session(
        1, resources_per_worker=few, progress=False, log_to_driver=False
    ) as session:
        await session.run(train)
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""
    with pytest.raises(TypeError, match=r"write progress=Progress\(num_steps=...\)"):
        cl.Session(progress=10)


ON_A_TERMINAL = """
import asyncio, sys
import chorusline as cl
from tests.session.showing.test_progress import train

async def main():
    async with cl.Session(2, resources_per_worker={"CPU": 0.1}) as session:
        running = asyncio.create_task(session.run(train, pause_s=0.2))
        while not running.done():
            await asyncio.sleep(0.5)
            print("y" * 30)
        await running

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("stdout_is_terminal", [True, False])
def test_a_terminal_has_bars_below_whole_lines(on_cluster, stdout_is_terminal):
    """What ranks and what the program itself print is not torn by the bars; and stdout that goes
    into a file has nothing but it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 300, 0, 0))
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL],
        stdout=theirs if stdout_is_terminal else subprocess.PIPE,
        stderr=theirs,
        env={**on_cluster, "PYTHONPATH": path, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    raw = b""
    try:
        while part := os.read(ours, 65536):
            raw += part
    except OSError:  # The other side is closed.
        pass
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, raw.decode()
    os.close(ours)
    terminal = raw.decode()
    lines = terminal.replace("\x1b[2K", "\n").replace("\r", "\n").splitlines()
    assert "epoch 2/2  step" in terminal and "this epoch" in terminal
    printed = lines if stdout_is_terminal else output.decode().splitlines()
    assert printed.count("[rank 0] " + "x" * 200) == 2
    assert printed.count("y" * 30) >= 3
    if not stdout_is_terminal:
        assert "xxx" not in terminal and set(printed) == {"[rank 0] " + "x" * 200, "y" * 30}
