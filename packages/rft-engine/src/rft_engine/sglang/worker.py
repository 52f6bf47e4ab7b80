"""SGLang's own process: `python -m rft_engine.sglang.worker READ_FD WRITE_FD` (`process.server` has the loop).

SGLang starts its schedulers as children of this process and ends the whole tree when one of them dies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rft_engine.process import server
from rft_engine.process.settings import EngineDeadlines
from rft_engine.sglang.local import LocalSglang
from rft_engine.sglang.runtime import InstalledSglang, SglangRuntime
from rft_engine.sglang.settings import SglangSettings


def serve(read_fd: int, write_fd: int, make_runtime: Callable[[], SglangRuntime]) -> None:
    """Answer until the other side closes its pipe."""

    def start(settings: dict[str, Any]) -> LocalSglang:
        deadlines: Any = EngineDeadlines(**settings.pop("deadlines"))
        return LocalSglang(SglangSettings(**settings, deadlines=deadlines), make_runtime())

    server.serve(read_fd, write_fd, start)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), InstalledSglang)
