"""What this process has open: descriptors, sockets with a name, ports where somebody may call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

LISTENS = "0A"


def descriptors() -> dict[int, str]:
    """Of this process, and what they lead to."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:
            continue  # The one that read the folder.
    return found


def sockets(kind: str) -> Iterator[tuple[str, str]]:
    """(state, local address) of this process's. kind: tcp, tcp6, udp, udp6."""
    mine = set(descriptors().values())
    for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in mine:
            yield fields[3], fields[1]


def ports() -> list[str]:
    """Where somebody may call: TCP that listens, and all UDP."""
    tcp = [at for kind in ("tcp", "tcp6") for state, at in sockets(kind) if state == LISTENS]
    return tcp + [at for kind in ("udp", "udp6") for _, at in sockets(kind)]


def names_of_sockets() -> list[str]:
    """Of the Unix sockets of this process that have one, in the file system or abstract."""
    mine = set(descriptors().values())
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [fields[7] for fields in lines if len(fields) > 7 and f"socket:[{fields[6]}]" in mine]
