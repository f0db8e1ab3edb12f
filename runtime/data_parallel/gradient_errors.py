"""What errors of gradients say: of those that cannot be sent, or were changed when they were."""

from __future__ import annotations


def why_not_sharded(hook: str) -> str:
    return (
        f"the communication hook {hook} gives every rank the whole gradient, but with a "
        "ZeroRedundancyOptimizer each rank receives the sum for its own shard only, so that "
        "gradients travel once. Use a plain optimizer with the hook, or leave the hook out. To "
        "send half as much, keep the parameters in bfloat16: the optimizer steps float32 copies"
    )


def why_not_twice(name: str, shape: tuple[int, ...]) -> str:
    """name, shape: of a parameter."""
    return (
        f"parameter {name} of shape {shape} got another gradient in the same backward pass after "
        "its bucket was sent: it is used in several checkpointed segments. Checkpoint with "
        "use_reentrant=False, or pass static_graph=True, which waits for all gradients of a "
        "parameter"
    )


def why_not_changed(changed: str) -> str:
    """changed: names of parameters."""
    return (
        f"the gradient of a parameter ({changed}) was changed after the backward pass. With a "
        "ZeroRedundancyOptimizer the gradients are sent to their shards by then, so the change "
        "would have no effect. To clip by norm, write ZeroRedundancyOptimizer(..., max_norm=...); "
        "to change single gradients, use parameter.register_hook; for anything else take a plain "
        "optimizer"
    )
