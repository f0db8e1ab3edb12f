"""`%%ranks`: a cell that runs on every rank of a session.

    %load_ext chorusline
    %%ranks
    print(ctx.rank)

The variables of such cells stay on the ranks, together with the objects of `ctx.keep`: `model` in a
cell is `ctx.kept["model"]` in a train function.
"""

from __future__ import annotations

import itertools
import traceback
from typing import Any

from chorusline.collectives.contract.errors import with_article

from ..program.packing import packed_program
from .cells import latest_session
from .interrupt import shell
from .remote_cell import check_source, run_cell

_START = "Start one: session = await cl.Session(num_workers=2).start()"
_cell_numbers = itertools.count(1)


def load_ipython_extension(ipython: Any) -> None:
    """Called by `%load_ext chorusline`: register the magic `%%ranks`."""
    ipython.register_magic_function(ranks, magic_kind="cell", magic_name="ranks")
    if _await_ranks not in ipython.input_transformers_post:
        ipython.input_transformers_post.append(_await_ranks)


def unload_ipython_extension(ipython: Any) -> None:
    ipython.magics_manager.magics["cell"].pop("ranks", None)
    if _await_ranks in ipython.input_transformers_post:
        ipython.input_transformers_post.remove(_await_ranks)


def _await_ranks(lines: list[str]) -> list[str]:
    """Await the call of the magic, which IPython calls as a plain function."""
    if lines and lines[0].startswith("get_ipython().run_cell_magic('ranks'"):
        return ["await " + lines[0], *lines[1:]]
    return lines


async def ranks(line: str, cell: str) -> list[Any] | None:
    """Run the cell on every rank; return the last values by rank. What the ranks print, and the
    figures that they show, appear while the cell runs.

        %%ranks [session]

    session: the name of the session's variable; default: the session that was started last.

    The cell can use `ctx`, `torch`, `cl` and `await`. Its variables stay for the next cell and in
    `ctx.kept`. A last value that cannot be pickled comes back as its text. Returns None if no rank
    has a last value.
    """
    from IPython.core.error import UsageError

    session = _named(line.strip())
    name = f"<ranks cell {next(_cell_numbers)}>"
    try:
        check_source(cell, name)
    except SyntaxError as error:
        # A UsageError is shown as one text; a SyntaxError would be shown with our frames.
        text = "".join(traceback.format_exception_only(error)).rstrip()
        raise UsageError(f"%%ranks: the cell was not sent:\n{text}") from None
    program = packed_program(run_cell, {"source": cell, "name": name})
    values = await session._run(program, session._audience(always_prints=True))
    return None if all(value is None for value in values) else values


def _named(name: str) -> Any:
    """The session to run on. Raises IPython's UsageError, which a notebook shows as one line."""
    from IPython.core.error import UsageError

    if name:
        if name not in shell().user_ns:
            raise UsageError(f"%%ranks {name}: there is no variable {name!r}. {_START}")
        session = shell().user_ns[name]
        if not hasattr(session, "run") or not hasattr(session, "num_workers"):
            kind = with_article(type(session))
            raise UsageError(f"%%ranks {name}: that is {kind}, not a session. {_START}")
    else:
        session = latest_session()
    if session is None:
        raise UsageError(
            f"%%ranks runs a cell on the ranks of a session, and there is none. {_START}"
        )
    why_not = session._why_not_ready()
    if why_not:
        raise UsageError(f"%%ranks: {why_not}")
    return session
