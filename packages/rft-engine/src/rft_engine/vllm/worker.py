"""vLLM's own process: `python -m rft_engine.vllm.worker READ_FD WRITE_FD` (`process.server` has the loop)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rft_engine.process import server
from rft_engine.process.settings import EngineDeadlines
from rft_engine.vllm.local import LocalVllm
from rft_engine.vllm.runtime import InstalledVllm, VllmRuntime
from rft_engine.vllm.settings import VllmSettings


def serve(read_fd: int, write_fd: int, make_runtime: Callable[[], VllmRuntime]) -> None:
    """Answer until the other side closes its pipe."""

    def start(settings: dict[str, Any]) -> LocalVllm:
        deadlines: Any = EngineDeadlines(**settings.pop("deadlines"))
        return LocalVllm(VllmSettings(**settings, deadlines=deadlines), make_runtime(), in_process=False)

    server.serve(read_fd, write_fd, start)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), InstalledVllm)
