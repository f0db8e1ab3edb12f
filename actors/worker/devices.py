"""Which GPU is a worker's own: a pure decision, from what Ray has assigned and what CUDA shows.

A worker sees all GPUs of its node, and uses one of them. Ray would hide the others, by
CUDA_VISIBLE_DEVICES, and NCCL then cannot tell how the GPUs of a node are connected: on machines
with NVSwitch its first operation takes seconds, or hangs (github.com/NVIDIA/nccl/issues/1749 and
1906, github.com/ray-project/ray/issues/61073). So workers are started with a variable that stops
Ray from hiding them, which Ray 2.50 and 2.60 both know. Where they are hidden nevertheless, the
worker finds its own among those that are left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chorusline.collectives.transports.shared_gpus import MAY_SHARE

VISIBLE = "CUDA_VISIBLE_DEVICES"
RAY_HIDES_NONE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
_MIG = "MIG-"
_OF_THE_NODE = (
    f"Set {VISIBLE} where the node is started, before `ray start`, or not at all: Ray assigns the "
    "GPUs that the node has at its start"
)


class NoGpu(RuntimeError):
    """The worker has no GPU that it may use; the text says why, and the remedy."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """index: of the device, as torch counts them in this process. environment: variables to set
    before the first use of CUDA."""

    index: int
    environment: Mapping[str, str] = field(default_factory=dict)


def environment_of_workers(environment: Mapping[str, Any], use_gpu: bool) -> dict[str, Any]:
    """Ray's runtime environment of workers: `environment`, and with GPUs all of them visible.

    A value that the user gives stays: "0" hides the other GPUs, as Ray does for other actors.
    """
    if not use_gpu:
        return dict(environment)
    variables = {RAY_HIDES_NONE: "1", **(environment.get("env_vars") or {})}
    return {**environment, "env_vars": variables}


def narrowed_by(runtime_env: Mapping[str, Any]) -> str | None:
    """The sentence for a runtime environment that itself says which GPUs processes see."""
    visible = (runtime_env.get("env_vars") or {}).get(VISIBLE)
    if visible is None:
        return None
    return (
        f"the runtime environment sets {VISIBLE}={visible!r} in all workers, and Ray does not "
        f"know of it when it assigns GPUs: two workers may get the same one. {_OF_THE_NODE}"
    )


def choose_gpu(assigned: Sequence[int | str], share: float, environment: Mapping[str, str]) -> Gpu:
    """The GPU of a worker. Raises NoGpu; so may `check_gpu`, once its variables are set.

    assigned: as `ray.get_gpu_ids()` has them: numbers of the node's GPUs, or entries of the
        node's CUDA_VISIBLE_DEVICES. share: how much of GPUs Ray has assigned; of several it is the
        first. environment: of this process.
    """
    visible, says = environment.get(VISIBLE), _says(environment)
    if not assigned:
        raise NoGpu(
            "Ray has assigned this worker no GPU; ask for one with use_gpu=True, or for a part of "
            "one with resources_per_worker={'GPU': 0.5}"
        )
    wanted = max(1, math.ceil(share))
    # By another list than the node's, Ray's numbers would name other GPUs.
    if len(assigned) != wanted:
        raise NoGpu(
            f"Ray has assigned {share:g} GPU to this worker, and names {_names(assigned)}: "
            f"{says}, which differs from what the node was started with. {_OF_THE_NODE}"
        )
    if visible is None:
        places = {int(one): str(one) for one in assigned}
    else:
        listed = [entry.strip() for entry in visible.split(",")]
        # Only then is the place of a GPU in the list its number in CUDA.
        lacking = [one for one in assigned if str(one) not in listed]
        if lacking:
            raise NoGpu(
                f"Ray has assigned GPU {_names(lacking)} to this worker, and {says} in it, which "
                f"does not contain that GPU. {_OF_THE_NODE}"
            )
        places = {listed.index(str(one)): str(one) for one in assigned}
    own = [places[place] for place in sorted(places)]
    # Ranks that share a GPU cannot use NCCL as it is (transports/shared_gpus.py).
    shares = {MAY_SHARE: "1"} if share < 1 else {}
    # CUDA shows a process one part of a GPU (MIG), whatever the list says.
    # And the user may want the other GPUs hidden. Ray 2.50 takes any value for a no.
    hides = environment.get(RAY_HIDES_NONE, "").lower() in ("0", "false")
    hidden = own[:1] if own[0].startswith(_MIG) else own if hides else []
    if hidden:
        return Gpu(0, {VISIBLE: ",".join(hidden), **shares})
    # Of several, CUDA's first; `own` has the same order.
    return Gpu(min(places), shares)


def check_gpu(
    gpu: Gpu, assigned: Sequence[int | str], environment: Mapping[str, str], num_visible: int
) -> None:
    """Raise NoGpu if `gpu` is not there. environment: with that of `gpu`. num_visible: how many
    GPUs torch sees in it."""
    says = _says(environment)
    if num_visible == 0:
        raise NoGpu(
            f"Ray has assigned GPU {_names(assigned)} to this worker, and torch sees no CUDA "
            f"device ({says}). Install a CUDA build of torch on the node, check that `nvidia-smi` "
            "works there, and run `chorusline doctor` on it"
        )
    if gpu.index >= num_visible:
        raise NoGpu(
            f"Ray has assigned GPU {_names(assigned)} to this worker, which would be number "
            f"{gpu.index} here, and torch sees only {num_visible} ({says}). Start the node with "
            "`ray start --num-gpus` and the number that it has (`nvidia-smi -L` lists them); parts "
            f"of a GPU (MIG) must be listed in {VISIBLE} before `ray start`"
        )


def _says(environment: Mapping[str, str]) -> str:
    visible = environment.get(VISIBLE)
    return f"{VISIBLE} is {visible!r}" if visible is not None else f"{VISIBLE} is not set"


def _names(assigned: Sequence[int | str]) -> str:
    return ", ".join(str(one) for one in sorted(assigned, key=str))
