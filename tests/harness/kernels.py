"""A real Jupyter kernel, driven by a real client: cells, their outputs, interrupts."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from typing import Any

from jupyter_client import BlockingKernelClient
from jupyter_client.manager import KernelManager

_PATIENCE_S = 60.0


@dataclass
class Ran:
    """What one cell has put out. displays: by display id, each version of it in order."""

    printed: str = ""
    told: str = ""  # on stderr
    value: str | None = None  # of the last expression, as text
    html: str = ""  # the same, as a front end that can show it does
    displays: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)  # PNG, in base64
    pieces_printed: int = 0  # in how many parts `printed` came
    error: str | None = None  # its name
    traceback: str = ""
    stopped_s: float | None = None  # from the interrupt to the end of the cell

    def only_display(self) -> list[dict[str, Any]]:
        (versions,) = self.displays.values()
        return versions


class Kernel:
    """environment: over this process's own."""

    def __init__(self, **environment: str) -> None:
        for attempt in range(3):
            try:
                self._start(environment)
                return
            except RuntimeError:  # Another process may take a port between its choice and its use.
                self._client.stop_channels()
                self.manager.shutdown_kernel(now=True)
                if attempt == 2:
                    raise

    def _start(self, environment: dict[str, str]) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env={**os.environ, **environment})
        # Not the manager's own client: nbclient, which borrows the manager, ends its context.
        # With the manager as its parent it asks whether the process lives, not whether the heart
        # beats, which it does not while a busy machine imports.
        self._client = BlockingKernelClient(
            connection_file=self.manager.connection_file, parent=self.manager
        )
        self._client.load_connection_file()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_PATIENCE_S)

    def run(self, code: str, *, interrupt_at: str | None = None) -> Ran:
        """Run a cell to its end. interrupt_at: a pattern; once a display or a line matches it, the
        kernel is interrupted as a user would, with a signal."""
        request = self._client.execute(code)
        ran = Ran()
        interrupted_at: float | None = None
        while True:
            message = self._client.get_iopub_msg(timeout=_PATIENCE_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            shown = self._note(ran, message["msg_type"], message["content"])
            if interrupt_at and interrupted_at is None and re.search(interrupt_at, shown):
                interrupted_at = time.monotonic()
                self.manager.interrupt_kernel()
            if message["content"].get("execution_state") == "idle":
                break
        if interrupted_at is not None:
            ran.stopped_s = time.monotonic() - interrupted_at
        assert interrupt_at is None or interrupted_at is not None, f"never showed {interrupt_at}"
        return ran

    def stop(self) -> None:
        self._client.stop_channels()
        self.manager.shutdown_kernel()

    def _note(self, ran: Ran, kind: str, content: dict[str, Any]) -> str:
        match kind:
            case "stream" if content["name"] == "stdout":
                ran.printed += content["text"]
                ran.pieces_printed += 1
                return str(content["text"])
            case "stream":
                ran.told += content["text"]
            case "execute_result":
                ran.value = content["data"]["text/plain"]
                ran.html = content["data"].get("text/html", "")
            case "error":
                ran.error, ran.traceback = content["ename"], "\n".join(content["traceback"])
            case "display_data" if "image/png" in content["data"]:
                ran.pictures.append(content["data"]["image/png"])
            case "display_data" | "update_display_data":
                name = content["transient"]["display_id"]
                ran.displays.setdefault(name, []).append(content["data"])
                return str(content["data"].get("text/plain", ""))
        return ""
