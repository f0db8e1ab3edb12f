"""Every public constructor and function, with arguments that are none.

What is public, and which parameters it has, is read from the package, so a new one is tested
without a line here; only a new name needs valid arguments in VALID.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.collectives.transports import backends
from chorusline.runtime.data.fetching.options import FetchOptions

NUMBERS = itertools.count()
LONG = "x" * 10**6
HOSTILE: list[object] = [
    *(float("nan"), float("inf"), -1, 0, 10**9, 2**80, 10**400, 0.5, True),
    *("no", "", "a\0b", "\ud800", LONG, b"", None, [], {}, object()),
]

MADE_HERE = {
    *("Context", "Report", "Step", "Steps", "GradBucket", "Work", "Saving", "SavingTimes"),
    *("SessionSnapshot", "TrackedEvent", "TrackedRun", "Statistics", "GroupDescription"),
    *("FlightRecording", "RecordedCollective", "Rendezvous", "DebugLevel", "ReduceOp", "Group"),
    *("SessionState", "StepStatistics", "StreamShard"),
}
"""Records, and objects that only Chorusline makes; of a class, its class methods are tested."""


class _Averaging(cl.ModelAverager):
    def average_parameters(self, params: Any) -> None: ...


def _run(train: Any, /, **arguments: Any) -> None:
    """`run` as far as it goes without a cluster: a lock cannot be sent to the ranks."""
    try:
        cl.run(train, lock=threading.Lock(), **arguments)
    except TypeError as error:
        if "argument lock" not in str(error):
            raise
    else:
        pytest.fail("the lock was sent")


def _train(ctx: cl.Context, lock: Any) -> None: ...


def _wrapped(group: cl.Group) -> list[Any]:
    model = cl.DistributedDataParallel(torch.nn.Linear(2, 2), group)
    return [model, cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)]


def _local_sgd(group: cl.Group) -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.ones(2))
    bucket = cl.GradBucket(0, torch.ones(2), [(0, 0, 2)], [parameter], is_last=True)
    return {"state": cl.PostLocalSGDState(group, group, 1), "bucket": bucket}


def _sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters())


VALID: dict[str, Callable[[cl.Group, str], dict[str, Any]]] = {
    "ActorStore": lambda group, path: {"actor": object()},
    "CheckpointConfig": lambda group, path: {"storage_path": path},
    "DistributedDataParallel": lambda group, path: {
        "module": torch.nn.Linear(2, 2),
        "group": group,
    },
    "FetchOptions": lambda group, path: {"num_workers": 1},
    "FileStore": lambda group, path: {"path": path},
    "GradScaler": lambda group, path: {"optimizer": _wrapped(group)[1]},
    "Group.create": lambda group, path: {"store": cl.HashStore(), "rank": 0, "size": 1},
    "Group.from_url": lambda group, path: {"url": f"file://{path}", "rank": 0, "size": 1},
    "HierarchicalModelAverager": lambda group, path: {
        "period_group_size_dict": {2: 1},
        "process_group": group,
    },
    "Join": lambda group, path: {"joinables": _wrapped(group)},
    "Join.notify_join_context": lambda group, path: {"joinable": _wrapped(group)[0]},
    "ModelAverager": lambda group, path: {"process_group": group},
    "PeriodicModelAverager": lambda group, path: {"period": 2, "process_group": group},
    "PostLocalSGDOptimizer": lambda group, path: {"optim": _sgd(), "averager": _Averaging(group)},
    "PostLocalSGDState": lambda group, path: {
        "process_group": group,
        "subgroup": group,
        "start_localSGD_iter": 1,
    },
    "PrefixStore": lambda group, path: {"prefix": "p", "store": cl.HashStore()},
    "PureDistributedDataParallel": lambda group, path: {
        "module": torch.nn.Linear(2, 2),
        "group": group,
    },
    "Session": lambda group, path: {"name": "night", "detached": True},
    "Shard": lambda group, path: {
        "dataset": [1, 2, 3],
        "batch_size": 2,
        "rank": 0,
        "world_size": 1,
    },
    "SignedStore": lambda group, path: {"store": cl.HashStore(), "secret": "s" * 16},
    "StoreFromTorch": lambda group, path: {"torch_store": torch.distributed.HashStore()},
    "Stream": lambda group, path: {"source": [1, 2]},
    # On a device without memory: torch would take what 10**9 features need.
    "SyncBatchNorm": lambda group, path: {"num_features": 2, "device": "meta"},
    "SyncBatchNorm.convert_sync_batchnorm": lambda group, path: {"module": torch.nn.Linear(2, 2)},
    "TorchStore": lambda group, path: {"store": cl.HashStore()},
    "ZeroRedundancyOptimizer": lambda group, path: {
        "params": torch.nn.Linear(2, 2).parameters(),
        "optimizer_class": torch.optim.SGD,
        "group": group,
    },
    "attach": lambda group, path: {"name": "night"},
    "deal": lambda group, path: {"num_samples": 3, "world_size": 2},
    "post_localSGD_hook": lambda group, path: _local_sgd(group),
    "register_backend": lambda group, path: {
        "name": "own",
        "factory": _train,
        "devices": ("cpu",),
    },
    "run": lambda group, path: {"train": _train},
    "set_debug_level": lambda group, path: {"level": cl.get_debug_level()},
    "store_from_url": lambda group, path: {"url": f"file://{path}", "rank": 0, "size": 1},
}
"""By the name of what is called, arguments for it; none for those that need none."""

CALLED_AS: dict[str, Callable[..., Any]] = {"run": _run, "ModelAverager": _Averaging}


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """What users call that takes arguments: functions, classes, and methods of classes."""
    for name in cl.__all__:
        one = getattr(cl, name)
        if isinstance(one, type) and issubclass(one, BaseException):
            continue
        if name not in MADE_HERE:
            yield name, one
        for method, of in vars(one).items() if isinstance(one, type) else ():
            if isinstance(of, classmethod | staticmethod) and not method.startswith("_"):
                yield f"{name}.{method}", getattr(one, method)
    yield "FetchOptions", FetchOptions


VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
PUBLIC = dict(_public())
PARAMETERS = {
    name: [p for p in inspect.signature(one).parameters.values() if p.kind not in VARIABLE]
    for name, one in PUBLIC.items()
}
CALLS = [name for name, parameters in PARAMETERS.items() if parameters]


def _may_be(value: object, annotation: str) -> bool:
    """Whether a parameter with that annotation may take `value`: read from its words alone."""
    words = set(re.findall(r"\w+", re.sub(r"\[.*\]", "", annotation)))
    if words & {"object", "Any", "Actor"}:
        return True
    kinds: dict[type, set[str]] = {
        bool: {"bool"},
        int: {"int", "float", "Seconds"},
        float: {"float", "Seconds"},
        str: {"str", "Data", "MapStyleDataset"},
        bytes: {"bytes", "Data"},
        type(None): {"None"},
        list: {"Sequence", "Iterable", "MapStyleDataset"},
        dict: {"Mapping", "Iterable", "MapStyleDataset"},
        object: set(),
    }
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if value in ("a\0b", "\ud800"):
        kinds[str] -= {"str"}  # A path, a name or a URL has no such character.
    return bool(words & kinds[type(value)])


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_is_none_is_refused_by_its_name_or_works(
    name: str, alone: cl.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backends, "_backends", {**backends._backends})
    called, wrong = CALLED_AS.get(name, PUBLIC[name]), []
    for parameter in PARAMETERS[name]:
        for value in HOSTILE:
            arguments = VALID.get(name, lambda *_: {})(alone, f"{tmp_path}/{next(NUMBERS)}")
            if value is parameter.default:
                continue
            arguments[parameter.name] = value
            positional = [
                arguments.pop(p.name) for p in PARAMETERS[name] if p.kind is p.POSITIONAL_ONLY
            ]
            began_at = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    made = called(*positional, **arguments)
                    ended = "" if _may_be(value, str(parameter.annotation)) else "was taken"
                    if isinstance(made, cl.Group | cl.FileStore):
                        made.close()
                except (TypeError, ValueError) as error:
                    is_named = parameter.name.removesuffix("s") in str(error)
                    ended = "" if is_named else f"{error!r:.200}"
                except ImportError as error:  # torch 2.11 takes 0 for a GPU, and does not look.
                    ended = "" if "need CuPy" in str(error) else f"raised {error!r:.200}"
                except RuntimeError as error:
                    is_of_a_run = value is None and "there is no default group" in str(error)
                    ended = "" if is_of_a_run else f"raised {error!r:.200}"
                except Exception as error:
                    ended = f"raised {error!r:.200}"
            if time.process_time() - began_at > 10:  # One that builds all that it was told to.
                ended += ", after ten seconds of work"
            if ended:
                wrong.append(f"{name}({parameter.name}={value!r:.20}): {ended}")
    assert not wrong, f"{len(wrong)} arguments:\n" + "\n".join(wrong)
