"""A browser that a test drives: its debugging protocol over two pipes, without a further package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SECONDS = 60.0


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._rest = b""
        self._number = 0
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, url: str, *, width: int = 1200, height: int = 900) -> None:
        """Show a page, in a window of this size."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        # from another page: a change of what is behind # alone loads nothing
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript is."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + _SECONDS
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < until, f"{condition}: {self.value('document.body.innerText')}"
            time.sleep(0.05)

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._answers, 1 << 16)
            assert read, "the browser has ended"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with its files in a folder, and end it behind the block."""
    program = shutil.which("chromium")
    assert program, "apt-get install chromium"
    child_in, commands = os.pipe()
    answers, child_out = os.pipe()
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    # the browser reads commands from 3 and writes answers to 4
    shell = f'exec "$@" 3<&{child_in} 4>&{child_out}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "browser", program, *words, "about:blank"],
        pass_fds=(child_in, child_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_in)
    os.close(child_out)
    try:
        yield Browser(commands, answers)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
