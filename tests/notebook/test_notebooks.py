"""The notebooks, and what a session does in one: in a real kernel, with a real client."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
import ray
from nbclient import NotebookClient

from tests import ROOT
from tests.harness.kernels import Kernel

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

IMPORT = """
import chorusline as cl
%load_ext chorusline
"""

START = "session = await cl.Session(num_workers=2).start()"

TRAIN = """
import time, torch

def train(ctx, pause_s):
    def make():
        torch.manual_seed(0)
        model = cl.DistributedDataParallel(torch.nn.Linear(4, 1))
        return model, cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=1e-2)

    model, optim = ctx.keep("both", make)
    data = torch.randn(180, 4, generator=torch.Generator().manual_seed(1))
    keys = [0] * 120 + [1] * 60
    for epoch in ctx.epochs(3, resume="training"):
        with cl.Join([model, optim], skew_warning=None):
            for batch in ctx.shard(data, 4, epoch=epoch, keep_together=keys):
                loss = model(batch).square().mean()
                loss.backward()
                optim.step()
                optim.zero_grad()
                ctx.report(loss=loss, tokens=len(batch))
                time.sleep(pause_s)
    return ctx.generation, optim.num_steps, model.module.weight.tolist()
"""


@pytest.fixture(scope="module")
def kernel(cluster: None) -> Iterator[Kernel]:
    """On the cluster of all tests: a kernel of its own, not a Ray of its own."""
    kernel = Kernel(RAY_ADDRESS=ray.get_runtime_context().gcs_address, RAY_AUTH_MODE="disabled")
    assert kernel.run(IMPORT).error is None
    yield kernel
    kernel.stop()


@pytest.fixture(scope="module")
def started(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel with a session of two workers and a train function."""
    assert kernel.run(f"{START}\nfirst_shown = session._repr_html_()").error is None
    assert kernel.run(TRAIN).error is None
    yield kernel
    kernel.run("await session.close()")


# ── The notebooks ────────────────────────────────────────────────────────────────────────────────


SLOW = ("idle_rank", "first_steps")
"""The first measures: four ways through the same steps, half a minute in all."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_the_output_of_a_run(path: Path) -> None:
    """For people who see it on the web and do not run it."""
    notebook = nbformat.read(path, as_version=4)
    assert_shows_plots([cell for cell in notebook.cells if cell.cell_type == "code"])


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW))
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_and_shows_plots(kernel: Kernel, path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs = []
    assert notebook.cells[0].source.splitlines()[0].endswith("?"), "its title is a question"
    kernel.run("%reset -f")  # One kernel for all of them, but no name from the one before.
    client = NotebookClient(
        notebook,
        km=kernel.manager,
        timeout=90,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    assert_shows_plots(code)
    if path.stem == "killed_worker":
        told = "".join(output.get("text", "") for cell in code for output in cell.outputs)
        assert "a new worker took its first of" in told
        (html,) = [one for one in shown_in(code) if "1 worker lost" in one]
        lines = re.findall(r"<div>(step \d+: [^<]*)</div>", html)
        assert re.match(
            r"step \d+: rank 1 \(pid \d+\) was killed or crashed. 1 worker con", lines[0]
        )
        assert all(html.count(f"<title>{line}</title>") == 2 for line in lines), (
            "marks in the plots"
        )


def shown_in(code: list[nbformat.NotebookNode]) -> list[str]:
    outputs = [output for cell in code for output in cell.outputs]
    return [one.data["text/html"] for one in outputs if "text/html" in one.get("data", {})]


def assert_shows_plots(code: list[nbformat.NotebookNode]) -> None:
    outputs = [output for cell in code for output in cell.outputs]
    shown = shown_in(code)
    assert any("<svg" in html for html in shown)
    assert not any("running for" in html for html in shown), "saved as it ended, not as it ran"
    assert not any(one.output_type == "error" for one in outputs)


# ── Interrupts ───────────────────────────────────────────────────────────────────────────────────


def test_a_cell_that_is_interrupted_goes_on_in_the_next_one_to_the_same_bits(
    started: Kernel,
) -> None:
    whole = started.run("whole = await session.run(train, pause_s=0.0)\nwhole[0][1]")
    assert whole.value == "90"
    started.run("await session.run(lambda ctx: ctx.forget());")
    for _ in range(2):
        ran = started.run(
            "await session.run(train, pause_s=0.05)", interrupt_at=r"batches_left|report \d"
        )
        assert ran.error == "CancelledError"
        assert "all ranks stopped between the same two steps" in ran.traceback
        assert "run the cell again to continue" in ran.traceback
        assert len(ran.traceback.splitlines()) == 1, "no frames of ours"
        assert ran.stopped_s is not None
        assert ran.only_display()[-1]["text/plain"].startswith("interrupted after ")
    ran = started.run(
        "before = (await session.run(lambda ctx: ctx.kept['both'][1].num_steps))\n"
        "after = await session.run(train, pause_s=0.0)\n"
        "before[0] == before[1], 0 < before[0] < 90, after == whole"
    )
    assert ran.value == "(True, True, True)", ran.traceback


def test_a_function_that_only_computes_is_interrupted_and_keeps_its_worker(
    started: Kernel,
) -> None:
    started.run("pids = await session.run(lambda ctx: __import__('os').getpid())")
    ran = started.run(
        "def spin(ctx):\n"
        "    ctx.kept['seen'] = ctx.rank\n"
        "    while True:\n"
        "        pass\n"
        "await session.run(spin)",
        interrupt_at="running for",
    )
    assert ran.error == "CancelledError"
    assert "the run was aborted" in ran.traceback
    ran = started.run(
        "await session.run(lambda ctx: (__import__('os').getpid(), ctx.kept['seen'])) "
        "== [(pids[0], 0), (pids[1], 1)]"
    )
    assert ran.value == "True"


# ── The live view ────────────────────────────────────────────────────────────────────────────────


class Tags(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)


def test_a_run_is_one_display_that_is_updated_and_ends_tidy(started: Kernel) -> None:
    started.run("await session.run(lambda ctx: ctx.forget());")
    ran = started.run("await session.run(train, pause_s=0.03);")
    assert ran.error is None, ran.traceback
    versions = ran.only_display()
    assert len(versions) >= 3, "drawn while it runs, and at the end"
    assert versions[0]["text/plain"].startswith("running for")
    last = versions[-1]
    assert re.match(r"90 steps in \d+\.\d s\n", last["text/plain"])
    assert "\x1b" not in last["text/plain"] + last["text/html"]
    tags = Tags()
    tags.feed(last["text/html"])
    assert not tags.open and {"table", "svg", "path"} <= tags.seen
    assert last["text/html"].count("<svg") == 2 and "tokens/s" in last["text/html"]
    shown = started.run("session").value
    assert shown == "<Session ready, 2 workers>"


def test_a_session_is_shown_with_its_ranks_from_its_start_on(started: Kernel) -> None:
    at_first, now = started.run("print(first_shown)").printed, started.run("session").html
    for html in (at_first, now):
        tags = Tags()
        tags.feed(html)
        assert not tags.open and "table" in tags.seen
        assert "session ready" in html and html.count(", pid ") == 2, "a row for each worker"


def test_a_failure_is_shown_once_as_the_rank_saw_it(started: Kernel) -> None:
    ran = started.run("def fail(ctx):\n    return 1 / ctx.rank\nawait session.run(fail)")
    assert ran.error == "ZeroDivisionError"
    assert ran.traceback.count("division by zero") == 1
    assert "in fail" in ran.traceback and "raised by rank 0 of 2" in ran.traceback
    assert not re.search(r"tracing_helper|worker\.py|program\.py|session\.py", ran.traceback)


# ── %%ranks ──────────────────────────────────────────────────────────────────────────────────────


def test_a_cell_runs_on_every_rank_and_its_variables_stay(started: Kernel) -> None:
    ran = started.run(
        "%%ranks\nimport asyncio\nx = torch.tensor([float(ctx.rank)])\n"
        "await ctx.group.all_reduce(x)\nprint('I am', ctx.rank)\nawait asyncio.sleep(0, x.item())"
    )
    assert sorted(ran.printed.splitlines()) == ["[rank 0] I am 0", "[rank 1] I am 1"]
    assert ran.value == "[1.0, 1.0]"
    assert started.run("%%ranks\ny = x + ctx.rank").value is None
    assert started.run("%%ranks session\ny.item();").value is None
    started.run("session._log_to_driver = False")  # It is of functions: a cell always prints.
    assert started.run("%%ranks\nif ctx.rank:\n    print('aloud')").printed == "[rank 1] aloud\n"
    started.run("session._log_to_driver = True")
    assert started.run("await session.run(lambda ctx: ctx.kept['y'].item())").value == "[1.0, 2.0]"
    assert (
        started.run("%%ranks\nimport threading\nthreading.Lock()").value.count("_thread.lock") == 2
    )


def test_an_error_on_a_rank_is_shown_once_after_what_was_printed(started: Kernel) -> None:
    started.run("%%ranks\nkept_on = ctx.rank")
    ran = started.run(
        "%%ranks\nprint('so far')\nif ctx.rank == 1:\n    raise LookupError('lost')\nctx.barrier()"
    )
    assert sorted(ran.printed.splitlines()) == ["[rank 0] so far", "[rank 1] so far"]
    assert ran.error == "LookupError"
    assert ran.traceback.count("LookupError: lost") == 1
    assert "raised by rank 1 of 2" in ran.traceback and ", line 3, in <module>" in ran.traceback
    assert "remote_cell.py" not in ran.traceback
    assert started.run("%%ranks\nkept_on").value == "[0, 1]"
    wrong = started.run("%%ranks\nz = (")
    assert "SyntaxError: '(' was never closed" in wrong.told and "z = (" in wrong.told
    assert len(wrong.told.splitlines()) <= 5, "no frames of ours"


def test_a_cell_on_the_ranks_prints_while_it_runs_and_shows_its_figures(started: Kernel) -> None:
    ran = started.run(
        "%%ranks\nimport time\nimport matplotlib.pyplot as plt\n"
        "print('at first')\ntime.sleep(0.5)\n"
        "if ctx.rank == 0:\n    plt.plot([1, 2, 3])\n    plt.show()\n    print('behind it')\n"
        "else:\n    plt.plot([3, 2, 1]);  # shown at the end of the cell\n"
        "ctx.barrier()\ntime.sleep(0.5)\nprint('at last')"
    )
    assert ran.error is None, ran.traceback
    of_rank_0 = [line for line in ran.printed.splitlines() if line.startswith("[rank 0]")]
    assert of_rank_0 == [
        *("[rank 0] at first", "[rank 0] a figure:", "[rank 0] behind it", "[rank 0] at last")
    ]
    assert ran.printed.endswith("[rank 1] a figure:\n")
    assert ran.pieces_printed >= 3, "not all at once"
    assert len(ran.pictures) == 2 and ran.pictures[0] != ran.pictures[1]
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in ran.pictures)


def test_the_figure_of_a_cell_that_fails_is_shown_below_that_cell(started: Kernel) -> None:
    plots = "%%ranks\nimport matplotlib.pyplot as plt\nif ctx.rank == 0:\n    plt.plot([1, 2, 3])\n"
    failed = started.run(plots + "raise LookupError('lost')")
    assert failed.error == "LookupError" and len(failed.pictures) == 1
    unreadable = started.run(plots + "    plt.title('$\\\\nothing$');")
    assert "nothing" in unreadable.traceback and not unreadable.pictures
    both = started.run(plots + "    plt.title('$\\\\nothing$')\nraise LookupError('lost')")
    assert both.error == "LookupError"
    after = started.run("%%ranks\nctx.rank")
    assert after.value == "[0, 1]" and not after.pictures


def test_any_reported_number_is_plotted(started: Kernel) -> None:
    ran = started.run(
        "import time\n"
        "def measure(ctx):\n"
        "    for n in range(30):\n"
        "        ctx.report(accuracy=n / 30, top={'five': 1 - n / 30})\n"
        "        time.sleep(0.05)\n"
        "await session.run(measure);"
    )
    html = ran.only_display()[-1]["text/html"]
    for name in ("accuracy", "top.five", "steps/s"):
        assert f'aria-label="{name}' in html
    assert 'aria-label="loss"' not in html


def test_a_magic_that_has_no_session_says_how_to_get_one(started: Kernel) -> None:
    start = "Start one: session = await cl.Session(num_workers=2).start()"
    told = started.run("%%ranks nobody\n1").told
    assert "there is no variable 'nobody'" in told and start in told
    started.run("number = 3")
    told = started.run("%%ranks number\n1").told
    assert "%%ranks number: that is an int, not a session" in told and start in told
    started.run("fresh = cl.Session()")
    assert "the session has not started" in started.run("%%ranks fresh\n1").told


@pytest.mark.slow
def test_a_cell_that_starts_a_session_can_be_run_again(kernel: Kernel) -> None:
    cell = "again = await cl.Session(num_workers=1).start()"
    assert kernel.run(cell).error is None
    kernel.run("first = again")
    assert kernel.run(cell).error is None
    assert kernel.run("first, again").value == (
        "(<Session closed, 1 workers>, <Session ready, 1 workers>)"
    )
    assert kernel.run("await again.run(lambda ctx: ctx.rank)").value == "[0]"
    kernel.run("await again.close()")
    assert "%%ranks: the session is closed; make a new Session" in kernel.run("%%ranks\n1").told
