"""The options of a session, checked before anything starts: a wrong one is a sentence at once."""

from __future__ import annotations

import enum
import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ray.runtime_env import RuntimeEnv

from chorusline.actors.fault_plan import Order, ordered
from chorusline.actors.worker.devices import narrowed_by
from chorusline.collectives.contract.argument_kinds import MOST_RANKS, check_text
from chorusline.collectives.contract.deadlines import checked_seconds
from chorusline.collectives.contract.plain_numbers import whole

from ...checkpoint.config import CheckpointConfig
from ...process.random_state import checked_seed
from ..placing.placement import NODE_ID
from ..showing.progress import Progress


class Default(enum.Enum):
    """The value of an argument that was left out, where None has a meaning of its own."""

    DEFAULT = "default"


DEFAULT = Default.DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What a session starts its workers with, and runs functions with: checked (`Session` says what
    each means). The session host of a detached session gets it.

    A field with the name of an argument of `Session` holds that argument.

    max_failures: None: any number.
    labels: of the nodes; empty for all.
    environment: Ray's, of the workers and the driver; empty for none of their own.
    resources_per_worker, accelerator_type, checkpoint, seed: None where the user has given none.
    fault_plan: faults that a person orders.
    """

    fewest: int
    most: int
    max_failures: int | None
    spares: int
    replaces_stragglers: bool
    replica_size: int
    use_gpu: bool
    accelerator_type: str | None
    resources_per_worker: Mapping[str, float] | None
    placement_strategy: str
    labels: dict[str, str]
    environment: dict[str, Any]
    timeout_s: float
    startup_timeout_s: float
    pause_s: float
    checkpoint: CheckpointConfig | None
    seed: int | None
    fault_plan: tuple[Order, ...]

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> SessionOptions:
        """Of the arguments of `Session`, by name. Raises for a wrong one, and for two that do not
        go together; `Session` checks the kinds of those that nothing here looks at."""
        workers, strategy = given["num_workers"], given["placement_strategy"]
        fewest, most = _checked_range(workers)
        failures = _checked_failures(given["max_failures"], isinstance(workers, tuple))
        environment = _checked_environment(given["runtime_env"], given["env_vars"])
        _check_accelerator(given["accelerator_type"], given["use_gpu"])
        if given["use_gpu"] and (narrowed := narrowed_by(environment)) is not None:
            raise ValueError(narrowed)
        _check_objects(given["checkpoint"], given["seed"])
        size = _checked_replica_size(given["replica_size"], (fewest, most), given["checkpoint"])
        times = ("timeout_s", "pause_s", "startup_timeout_s")
        made: dict[str, Any] = {name: checked_seconds(given[name], name) for name in times}
        made |= {
            "fewest": fewest,
            "most": most,
            "max_failures": failures,
            "spares": _checked_spares(given["spares"], given["max_failures"], failures, strategy),
            "replaces_stragglers": _checked_replacing(given["replace_stragglers"], failures),
            "replica_size": size,
            "labels": _checked_labels(given["label_selector"], strategy),
            "environment": environment,
            "fault_plan": ordered(most),
        }
        kept = {one.name: given[one.name] for one in fields(cls) if one.name in given}
        return cls(**kept | made)


def _checked_range(num_workers: int | tuple[int, int]) -> tuple[int, int]:
    both = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    counts = [count for one in both if (count := whole(one)) is not None]
    if len(both) != 2 or len(counts) != 2:
        raise TypeError(
            "num_workers must be a number of workers, or a pair (fewest, most) of them, got "
            f"{num_workers!r}"
        )
    fewest, most = counts
    if fewest < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers!r}")
    if most > MOST_RANKS:
        raise ValueError(f"num_workers must be at most {MOST_RANKS}, got {num_workers!r}")
    if most < fewest:
        raise ValueError(f"num_workers=(fewest, most) must be in order, got {num_workers!r}")
    return fewest, most


def _checked_failures(max_failures: int | None | Default, is_pair: bool) -> int | None:
    if isinstance(max_failures, Default):
        return None if is_pair else 0
    if max_failures is None:
        return None
    count = whole(max_failures)
    if count is None or count < 0:
        raise ValueError(
            "max_failures must be a number of workers that may be lost, at least 0, or None for "
            f"any number, got {max_failures!r}"
        )
    return count


def _checked_spares(
    spares: int, given_failures: int | None | Default, max_failures: int | None, strategy: str
) -> int:
    count = whole(spares)
    if count is None or not 0 <= count <= MOST_RANKS:
        raise ValueError(
            f"spares must be a number of workers, 0 to {MOST_RANKS}, got {reprlib.repr(spares)}"
        )
    spares = count
    # With a 0 that was written a spare worker takes the place of a lost one in the next run.
    if spares and max_failures == 0 and isinstance(given_failures, Default):
        raise ValueError(
            f"spares={spares} workers would wait for nothing: max_failures is 0 by default, so the "
            "first lost worker ends the run; set max_failures to None, or to the number of workers "
            "that a run may lose"
        )
    if spares and strategy == "STRICT_PACK":
        raise ValueError(
            f"spares={spares} asks for room beside the workers, but "
            "placement_strategy='STRICT_PACK' gives the workers one whole node; use 'PACK'"
        )
    return spares


def _checked_replacing(replace_stragglers: bool, max_failures: int | None) -> bool:
    if type(replace_stragglers) is not bool:
        raise TypeError(f"replace_stragglers must be True or False, got {replace_stragglers!r}")
    if replace_stragglers and max_failures == 0:
        raise ValueError(
            "replace_stragglers=True lets a run continue without a worker, but max_failures is "
            "0, so the first lost worker ends a run; set max_failures to None, or to the number "
            "of workers that a run may lose"
        )
    return replace_stragglers


def _checked_replica_size(
    replica_size: int, workers: tuple[int, int], checkpoint: CheckpointConfig | None
) -> int:
    size = whole(replica_size)
    if size is None or size < 1:
        raise ValueError(
            f"replica_size must be a number of workers, at least 1, got {replica_size!r}"
        )
    if any(count % size for count in workers):
        raise ValueError(
            f"num_workers must be a multiple of replica_size={size}, as each replica of the model "
            f"has that many workers; got {workers[0] if workers[0] == workers[1] else workers}"
        )
    if size > 1 and checkpoint is not None:
        raise ValueError(
            f"replica_size={size} with checkpoint=: a checkpoint has no shards of fully_shard; "
            "leave checkpoint out, and save with torch.distributed.checkpoint"
        )
    return size


def _check_objects(checkpoint: object, seed: object) -> None:
    if checkpoint is not None and not isinstance(checkpoint, CheckpointConfig):
        raise TypeError(
            f"checkpoint must be a CheckpointConfig, got {type(checkpoint).__name__}; write "
            "checkpoint=CheckpointConfig(storage_path=...)"
        )
    if seed is not None:
        checked_seed(seed)


def checked_progress(progress: bool | Progress, on_report: object) -> bool | Progress:
    if not isinstance(progress, bool | Progress):
        raise TypeError(
            f"progress must be True, False or a Progress, got {type(progress).__name__}; write "
            "progress=Progress(num_steps=...)"
        )
    is_shown_already = isinstance(getattr(on_report, "__self__", None), Progress)
    return False if is_shown_already else progress


_VARIABLES = 'env_vars={"NCCL_DEBUG": "INFO"}'
_PLUGINS = "RAY_RUNTIME_ENV_PLUGINS"


def _checked_environment(
    runtime_env: Mapping[str, Any] | None, env_vars: Mapping[str, str] | None
) -> dict[str, Any]:
    """Both in one, as Ray takes them; empty if there are none."""
    _check_texts("env_vars", env_vars, _VARIABLES)
    if runtime_env is None:
        environment: dict[str, Any] = {}
    elif isinstance(runtime_env, Mapping):
        environment = dict(runtime_env)
    else:
        raise TypeError(
            f"runtime_env must be a dictionary as Ray takes it, got {type(runtime_env).__name__}; "
            'write runtime_env={"pip": [...]}'
        )
    _check_texts("runtime_env['env_vars']", environment.get("env_vars"), _VARIABLES)
    both = dict(environment.get("env_vars") or {})
    for name, value in (env_vars or {}).items():
        if both.setdefault(name, value) != value:
            raise ValueError(
                f"env_vars sets {name} to {value!r}, and runtime_env['env_vars'] to "
                f"{both[name]!r}; give it once"
            )
    if both:
        environment["env_vars"] = both
    for name in ("working_dir", "py_modules"):
        paths = environment.get(name) or []
        for path in [paths] if isinstance(paths, str) else paths:
            if "://" not in str(path):
                raise ValueError(
                    f"runtime_env[{name!r}] names the local path {path!r}, and Ray uploads local "
                    "paths for whole jobs only; give it to the job (ray job submit --working-dir, "
                    "or ray.init(runtime_env=...) before the session), or name a URI"
                )
    try:
        made = RuntimeEnv(**environment)
        text = json.dumps(made, ensure_ascii=False, default=str)
    except (TypeError, ValueError) as error:
        raise type(error)(f"runtime_env cannot be used: {error}") from None
    # Ray starts workers without what it does not know, and hangs with a text that is not UTF-8.
    if (unknown := made.keys() - RuntimeEnv.known_fields) and not os.environ.get(_PLUGINS):
        raise ValueError(
            f"runtime_env has {min(unknown)!r}, which Ray does not know; if a plugin takes it, set "
            f"{_PLUGINS} here, too, as on the nodes"
        )
    check_text("runtime_env", text)
    return environment


def _checked_labels(
    label_selector: Mapping[str, str] | None, placement_strategy: str
) -> dict[str, str]:
    _check_texts("label_selector", label_selector, 'label_selector={"ray.io/market-type": "spot"}')
    labels = dict(label_selector or {})
    if NODE_ID in labels and placement_strategy == "STRICT_SPREAD":
        raise ValueError(
            f"label_selector names {NODE_ID}, which placement_strategy='STRICT_SPREAD' needs for "
            "itself; choose nodes by another label, or use 'SPREAD'"
        )
    return labels


def _check_accelerator(accelerator_type: str | None, use_gpu: bool) -> None:
    if accelerator_type is None:
        return
    if not isinstance(accelerator_type, str) or not accelerator_type:
        raise ValueError(
            "accelerator_type must be a name as in ray.util.accelerators, such as 'A100', got "
            f"{accelerator_type!r}"
        )
    check_text("accelerator_type", accelerator_type)
    if not use_gpu:
        raise ValueError(
            f"accelerator_type={accelerator_type!r} asks for nodes with that GPU, but use_gpu is "
            "False; set use_gpu=True, or choose nodes with label_selector"
        )


def _check_texts(name: str, texts: Mapping[str, str] | None, example: str) -> None:
    if texts is None:
        return
    if not isinstance(texts, Mapping):
        raise TypeError(
            f"{name} must be a dictionary of strings, got {type(texts).__name__}; write {example}"
        )
    for key, value in texts.items():
        if not isinstance(key, str) or not key:
            raise TypeError(f"the names in {name} must be strings, got {key!r}; write {example}")
        if "=" in key:
            raise ValueError(
                f"{name}[{key!r}] has an = in its name, which the environment of no process can "
                f"hold; write {example}"
            )
        check_text(name, key)
        if not isinstance(value, str):
            raise TypeError(
                f"{name}[{key!r}] must be a string, got {value!r}; write {str(value)!r}"
            )
        check_text(f"{name}[{key!r}]", value)
