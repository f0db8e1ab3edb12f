"""Telling many workers by a tree of messages: how long it takes.

Node 0 is the driver. Each node hands a message on to up to `fan_out` nodes, one after the other, as
`send_s` of its time each; a message travels for `hop_s`, and its receiver takes `receive_s`. The
nodes are numbered level by level, as in a heap. This is a model: the driver of this package calls
each worker itself.
"""

from __future__ import annotations

import math


def children(node: int, fan_out: int, count: int) -> range:
    """The nodes that `node` tells; `count` nodes in all, the root included."""
    first = node * fan_out + 1
    return range(min(first, count), min(first + fan_out, count))


def depth(count: int, fan_out: int) -> int:
    """The number of hops to the last of `count` nodes."""
    levels, held, width = 0, 1, 1
    while held < count:
        width *= fan_out
        held += width
        levels += 1
    return levels


def down_s(count: int, fan_out: int, send_s: float, hop_s: float, receive_s: float) -> float:
    """Seconds until the last of `count` nodes has been told, where every node begins to hand on
    when it has received."""
    # The last node is told last, or the last one of the full level above it. Their chains are
    # walked upward: a node's place among its siblings is how many sends precede its message.
    if count <= 1:
        return 0.0
    told = [0.0] * count
    for node in range(count):
        for place, child in enumerate(children(node, fan_out, count)):
            told[child] = told[node] + (place + 1) * send_s + hop_s + receive_s
    return max(told)


def up_s(count: int, fan_out: int, send_s: float, hop_s: float, receive_s: float) -> float:
    """Seconds until the root has the report of the last node, where a node reports when it has the
    reports of all its children, and receives one after the other."""
    ready = [0.0] * count
    for node in range(count - 1, -1, -1):
        arrivals = sorted(ready[child] + send_s + hop_s for child in children(node, fan_out, count))
        at = 0.0
        for arrival in arrivals:
            at = max(at, arrival) + receive_s
        ready[node] = at
    return ready[0] if count else 0.0


def best_fan_out(count: int, send_s: float, hop_s: float, receive_s: float) -> int:
    """The fan-out with which the last node is told first."""
    most = max(2, min(count, 4 * math.isqrt(count) + 4, 512))
    return min(range(2, most + 1), key=lambda k: depth(count, k) * (k * send_s + hop_s + receive_s))
