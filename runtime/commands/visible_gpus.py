"""What `chorusline doctor` says of CUDA_VISIBLE_DEVICES. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from chorusline.actors.worker.devices import VISIBLE

_SHOW_ALL = f"unset {VISIBLE} before `ray start`, and in runtime environments"


def traps(environment: Mapping[str, str], on_machine: int) -> Iterator[tuple[str, str]]:
    """What is hidden from processes with this environment, and the remedy, in words.

    on_machine: the number of GPUs of this machine.
    """
    visible = environment.get(VISIBLE)
    if visible is None or not on_machine:
        return
    listed = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if not listed or listed == ["NoDevFiles"]:  # Slurm's word for none.
        yield f"{visible!r} hides all {on_machine} GPUs from CUDA", _SHOW_ALL
        return
    # CUDA ignores the first entry that it cannot use, and all that follow, without a word.
    for at, entry in enumerate(listed):
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))) or entry in listed[:at]:
            yield (
                f"{visible!r}: CUDA stops reading at {entry!r}, and shows {at} GPUs",
                "write each GPU once, by number or by UUID as in `nvidia-smi -L`",
            )
            return
    parts = [entry for entry in listed if entry.startswith("MIG-")]
    if parts:
        yield (
            f"lists parts of GPUs ({', '.join(parts)}): CUDA shows each process one of them, and "
            "NCCL has to go through the host between them",
            "take whole GPUs for training on several ranks; a part is enough for one",
        )
    elif len(listed) < on_machine:
        yield (
            f"{visible!r} shows {len(listed)} of the {on_machine} GPUs here: NCCL's first "
            "operation may take seconds, or hang, where the hidden ones are on the same NVSwitch",
            f"{_SHOW_ALL}: a session's workers share all GPUs of a node by Ray's numbers",
        )
