"""The process of vLLM: the engine that it makes of settings that come as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVllm, write_fake_model

from rft_engine.process.settings import EngineDeadlines
from rft_engine.vllm import worker


def test_a_start_makes_the_engine_of_the_settings_for_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(worker.server, "serve", lambda *given: served.append(given))
    runtime = FakeVllm(is_cpu=False)
    worker.serve(3, 4, lambda: runtime)
    [(read_fd, write_fd, start)] = served
    assert (read_fd, write_fd) == (3, 4)
    deadlines = {"start": 1.0, "generate": 2.0, "load_weights": 3.0, "other": 4.0}
    fields = {"model_dir": str(write_fake_model(tmp_path / "model")), "max_rows": 2, "max_len": 16}
    local = start(fields | {"deadlines": deadlines})
    assert local.facts.transport == "ipc"
    assert local._settings.deadlines == EngineDeadlines(**deadlines)
    assert runtime.llm is not None
    assert runtime.llm.arguments["max_num_seqs"] == 2
