"""Chorusline: data-parallel training on Ray that keeps going. `import chorusline as cl`.

Begin with `cl.run(train, num_workers=2)`, and see Session, Context, DistributedDataParallel,
ZeroRedundancyOptimizer and Join.

This package hands on names of `chorusline.collectives` (groups of ranks, no Ray),
`chorusline.actors` (Ray actors) and `chorusline.runtime` (sessions and training), each when it is
used first: together they take a second to import, and a program and its workers need other parts.
`__init__.pyi` lists the names, for Python and for type checkers.
"""

from __future__ import annotations

import ast as _ast
import importlib as _importlib
import importlib.abc as _abc
import importlib.machinery as _machinery
import logging as _logging
import sys as _sys
import warnings as _warnings
from collections.abc import Sequence as _Sequence
from pathlib import Path as _Path
from types import ModuleType as _ModuleType

__version__ = "0.1.0"

_modules = {
    name.name: f".{node.module}"
    for node in _ast.parse(_Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, _ast.ImportFrom)
    for name in node.names
}
__all__ = sorted(_modules)

# Lightning and IPython find these; `from chorusline import *` must not import Lightning.
for _name in ("ChoruslineStrategy", "load_ipython_extension", "unload_ipython_extension"):
    __all__.remove(_name)


def __getattr__(name: str) -> object:
    if name in _modules:
        value = getattr(_importlib.import_module(_modules[name], __name__), name)
        return globals().setdefault(name, value)
    instead = ""
    # Python itself asks for these names, even where torch is not to be imported or just now is.
    if not name.startswith("_") and name not in ("actors", "collectives", "runtime"):
        from .collectives.contract.torch_hints import instead_of_function
        from .collectives.group import Group

        instead = instead_of_function(name, is_method=name in dir(Group))
    raise AttributeError(f"module 'chorusline' has no attribute {name!r}{instead}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_backend() -> None:
    from .collectives.torch_backend.registration import register

    register()


class _AfterTorch(_abc.MetaPathFinder):
    """Registers the backend "chorusline" of torch.distributed once a program imports torch."""

    def find_spec(
        self, name: str, path: _Sequence[str] | None, target: _ModuleType | None = None
    ) -> _machinery.ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in list(_sys.meta_path) if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: _ModuleType) -> None:
                _sys.meta_path.remove(self)
                run(module)
                _register_backend()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


# Ray advises to install ipywidgets when it is imported: a notebook would show that first, in red.
_logging.getLogger("ray.widgets.util").setLevel(_logging.ERROR)
_warnings.filterwarnings("ignore", message="IProgress not found")

if "torch" in _sys.modules:
    _register_backend()
else:
    # The driver's process never imports torch, so this package must not import it either.
    _sys.meta_path.insert(0, _AfterTorch())
