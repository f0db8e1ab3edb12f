"""A script without a train function, run on every rank as torchrun would run it.

The script makes its own process group, or a library does it for the script: both get the group of
the run (runtime/process/torch_distributed.py). It runs in the worker's process, in the training
thread, as the module `__main__`.

When another rank is lost, the script begins again in the processes of the ranks that are left,
where torch and the libraries stay loaded. So what it has changed in its process is undone when it
ends (`_undone`), as far as Python, torch and accelerate keep it: threads of its own, and what other
libraries remember, stay.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import linecache
import logging
import multiprocessing.context
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from ..process.random_state import RandomState
from ..process.torch_distributed import like_torchrun, set_environment
from .context import Context, call_of
from .last_step import LastStep

_INSTALLED = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib")}
"""Where Python's own modules are."""

LEADS_TO_USERS_CODE = True  # Tracebacks leave out the frames of this file (outcomes.py).


@dataclass(frozen=True, slots=True)
class PlainScript:
    """A script as it is sent to the workers.

    path: of its file where it was read; the nodes need not have it.
    source: its text.
    arguments: sys.argv of the script.
    folder: the current folder of the command; a worker goes there if its node has it.
    run_id: TORCHELASTIC_RUN_ID, the same in all restarts.
    """

    path: str
    source: bytes
    arguments: tuple[str, ...]
    folder: str
    run_id: str

    @classmethod
    def read(cls, path: Path, arguments: tuple[str, ...], run_id: str) -> PlainScript:
        whole = path.resolve()
        words = (str(path), *arguments)
        return cls(str(whole), whole.read_bytes(), words, str(Path.cwd()), run_id)


def run_plain_script(ctx: Context, script: PlainScript, num_restarts: int = 0) -> None:
    """Run the script on this rank: a train function.

    num_restarts: how often the ranks have begun the script before.

    If it ends because another rank is lost, the last step is written down first (last_step.py).

    Raises what the script raises; RuntimeError for an exit code other than 0.
    """
    # Not with the __future__ statements of this file, which make texts of annotations.
    code = compile(script.source, script.path, "exec", dont_inherit=True)
    call = call_of(ctx)
    last_step = call.last_step = LastStep(ctx.group)
    with (
        _undone(script),
        like_torchrun(call, script.run_id, num_restarts),
        _as_main(script) as main,
        last_step.watched(),
    ):
        try:
            exec(code, main.__dict__)
        except SystemExit as left:
            if left.code not in (None, 0):
                last_step.write(left)
                raise RuntimeError(
                    f"{script.path} has called sys.exit({left.code!r}) on rank {ctx.rank}"
                ) from left
        except BaseException as error:
            last_step.write(error)
            raise


@contextlib.contextmanager
def _as_main(script: PlainScript) -> Iterator[ModuleType]:
    """The module `__main__` of the process, with the arguments and the folder of a script, inside a
    with-block."""
    main = ModuleType("__main__")
    main.__file__ = script.path
    if not Path(script.path).exists():  # Tracebacks quote the text.
        lines = script.source.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[script.path] = len(script.source), None, lines, script.path
    before = sys.modules["__main__"], sys.argv, sys.path[:], Path.cwd()
    # Pickles of the script's classes name __main__.
    sys.modules["__main__"] = main
    sys.argv = [*script.arguments]
    sys.path.insert(0, str(Path(script.path).parent))
    with contextlib.suppress(OSError):
        os.chdir(script.folder)
    try:
        yield main
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:], folder = before
        os.chdir(folder)


@contextlib.contextmanager
def _undone(script: PlainScript) -> Iterator[None]:
    """What a script changes in its process inside a with-block is undone after it."""
    modules, environment = {*sys.modules}, dict(os.environ)
    handlers = {one: one.handlers[:] for one in _loggers()}
    generators, dtype = RandomState().state_dict(), torch.get_default_dtype()
    precision = _matmul_precision()
    precisions = [(one, one.fp32_precision) for one in _with_precision()]
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    hooks = [(found, dict(found)) for found in _hooks_of_all()]
    # Scripts like torchvision's put a print() there that prints on rank 0 only.
    names, streams = dict(vars(builtins)), (sys.stdout, sys.stderr)
    starts: Any = multiprocessing.context._default_context
    start_method = starts._actual_context
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            yield
    finally:
        starts._actual_context = start_method
        vars(builtins).update(names)
        sys.stdout, sys.stderr = streams
        for found, before in hooks:
            found.clear()
            found.update(before)
        torch.use_deterministic_algorithms(is_deterministic)
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        for place, value in precisions:  # The line above has set some that follow others.
            place.fp32_precision = value
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
        RandomState().load_state_dict(generators)
        set_environment({name: environment.get(name) for name in {*os.environ, *environment}})
        if accelerate := sys.modules.get("accelerate.state"):
            # All Accelerators of a process have one state, with the process group in it.
            accelerate.AcceleratorState._reset_state(reset_partial_state=True)
            accelerate.GradientState._reset_state()
        # Those of the script itself: their variables are as the script has left them.
        folders = {Path(script.path).parent, Path(script.folder).resolve()}
        for name in sys.modules.keys() - modules:
            if _is_in(folders, name):
                del sys.modules[name]
        librarys = {name.lower() for name in sys.modules} - {"__main__"}  # DeepSpeed of deepspeed.
        for one in _loggers():
            # A library that the script has imported stays, with what it has given its own logger.
            is_librarys = one.name.partition(".")[0].lower() in librarys
            if one in handlers or not is_librarys:
                one.handlers[:] = handlers.get(one, [])
        gc.collect()  # A model is in circles, and the script makes another one.


def _loggers() -> list[logging.Logger]:
    known = [*logging.root.manager.loggerDict.values()]  # Other threads make some meanwhile.
    return [logging.root, *(one for one in known if isinstance(one, logging.Logger))]


def _matmul_precision() -> str | None:
    """None: it was set in torch's newer way, and the older one raises."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _with_precision() -> list[Any]:
    """The places at which torch 2.9 and newer keep the precision of products in float32."""
    mkldnn: Any = torch.backends.mkldnn
    places = (torch.backends, torch.backends.cuda.matmul, getattr(mkldnn, "matmul", None))
    return [one for one in places if hasattr(one, "fp32_precision")]


def _hooks_of_all() -> Iterator[MutableMapping[int, object]]:
    """Of torch: the hooks on all modules and on all optimizers."""
    for module in (torch_module, torch_optimizer):
        for name, value in vars(module).items():
            if name.startswith("_global_") and isinstance(value, dict):
                yield value


def _is_in(folders: set[Path], name: str) -> bool:
    """Whether the module `name` was read from one of these folders, and is not an installed one,
    which may be below such a folder: the current one may be / or the user's own."""
    file = getattr(sys.modules[name], "__file__", None)
    if file is None or name.partition(".")[0] == "chorusline":
        return False
    parents = Path(file).resolve().parents
    # Those of a distribution's own Python are in dist-packages.
    names = {"dist-packages", "site-packages"}.intersection(Path(file).parts)
    is_installed = bool(names) or not _INSTALLED.isdisjoint(parents)
    return not folders.isdisjoint(parents) and not is_installed
