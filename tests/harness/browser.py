"""JupyterLab in a real browser, without a library: Chromium is driven through its own chromedriver,
which speaks W3C's WebDriver protocol, JSON over HTTP.

It needs `jupyter-lab` (extra "notebook"), and `chromium` and `chromedriver` (on Debian: `apt-get
install chromium chromium-driver`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEEDS = ("jupyter-lab", "chromium", "chromedriver")
_PATIENCE_S = 60.0
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # W3C's name for the reference to an element


def missing() -> list[str]:
    """What this machine lacks of what is needed."""
    return [name for name in NEEDS if shutil.which(name) is None]


@contextlib.contextmanager
def jupyterlab(folder: Path, **environment: str) -> Iterator[str]:
    """A server of JupyterLab over a folder; gives its address. Its kernels are this Python, with
    these variables, and find the packages that the tests find. The server may be of another one."""
    kernel = folder / ".jupyter/kernels/python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
    spec = {"argv": argv, "display_name": "Python 3", "language": "python", "env": variables}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    settings = folder / ".jupyter/labconfig"
    settings.mkdir()
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "default_setting_overrides.json").write_text(
        json.dumps({"@jupyterlab/apputils-extension:notification": quiet})
    )
    port = _free_port()
    command = [
        *("jupyter-lab", "--no-browser", "--allow-root", "--expose-app-in-browser"),
        *(f"--port={port}", f"--ServerApp.root_dir={folder}", "--ServerApp.port_retries=0"),
        "--IdentityProvider.token=",
    ]
    places = {
        name: str(folder / ".jupyter") for name in ("JUPYTER_PATH", "JUPYTER_CONFIG_DIR", "HOME")
    }
    with (folder / ".jupyter/log").open("w") as log:
        server = subprocess.Popen(
            command, env={**os.environ, **places}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/api")
            yield address
        finally:
            server.terminate()
            server.wait(_PATIENCE_S)


class Browser:
    """Chromium without a window. width, height: of its page, in pixels."""

    def __init__(self, width: int = 1100, height: int = 1700) -> None:
        port = _free_port()
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        self._address = f"http://127.0.0.1:{port}"
        try:
            _wait_for(f"{self._address}/status")
            arguments = [
                *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"),
                *("--hide-scrollbars", f"--window-size={width},{height}"),
            ]
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")},
                "timeouts": {"script": 180_000},
            }
            said = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._driver.terminate()
            raise
        self._address += f"/session/{said['sessionId']}"

    def resize(self, width: int, height: int = 1700) -> None:
        self._ask("POST", "/window/rect", {"width": width, "height": height})

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a function's body in JavaScript; a promise is waited for."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait_until(self, script: str, timeout_s: float = _PATIENCE_S) -> Any:
        """The value of the script once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never came true: {script}"
            time.sleep(0.2)
        return value

    def picture(self, element_of: str | None = None) -> bytes:
        """The page as PNG, or the element that a script gives."""
        if element_of is None:
            return base64.b64decode(self._ask("GET", "/screenshot"))
        element = self.run(element_of)[_ELEMENT]
        return base64.b64decode(self._ask("GET", f"/element/{element}/screenshot"))

    def close(self) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(_PATIENCE_S)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self._address + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nobody answers at {address}"
            time.sleep(0.2)
