"""What an SGLang engine is started with: the settings of a build request, its process, and the engine within."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_sglang import FakeSglang
from fake_vllm import fake_tensors, write_fake_model

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError
from rft_engine.build_request import EngineBuildRequest
from rft_engine.process.settings import EngineDeadlines
from rft_engine.settings import EngineSettings
from rft_engine.sglang import engine as module
from rft_engine.sglang import worker
from rft_engine.sglang.engine import SglangEngine, build
from rft_engine.sglang.local import LocalSglang
from rft_engine.sglang.settings import SglangSettings


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake") / "model")


def test_a_build_request_becomes_an_engine_with_its_settings_environment_and_log(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        module, "SglangEngine", lambda *given, **options: made.append(SimpleNamespace(given=given, **options))
    )
    weights: Any = object()
    request = EngineBuildRequest(
        settings=EngineSettings(engine_max_rows=3, engine_tp_size=2, engine_mem_util=0.25),
        model_dir=model_dir,
        max_len=24,
        device=torch.device("cuda", 1),
        dtype="bfloat16",
        weights=weights,
        enable_sleep=True,
        environment={"CUDA_VISIBLE_DEVICES": "1"},
        log_path=tmp_path / "logs" / "engine.log",
    )
    build(request)
    [engine] = made
    settings, given = engine.given
    assert given is weights
    assert settings == SglangSettings(
        model_dir=model_dir,
        max_rows=3,
        max_len=24,
        tensor_parallel_size=2,
        memory_utilization=0.25,
        dtype="bfloat16",
        enable_sleep=True,
    )
    assert engine.environment == {"CUDA_VISIBLE_DEVICES": "1"}
    assert engine.log_path == tmp_path / "logs" / "engine.log"
    assert (tmp_path / "logs").is_dir(), "the process opens its log in it"


def test_the_process_makes_the_engine_of_the_settings(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(worker.server, "serve", lambda *given: served.append(given))
    runtime = FakeSglang()
    worker.serve(3, 4, lambda: runtime)
    [(read_fd, write_fd, start)] = served
    assert (read_fd, write_fd) == (3, 4)
    deadlines = {"start": 1.0, "generate": 2.0, "load_weights": 3.0, "other": 4.0}
    local = start({"model_dir": str(model_dir), "max_rows": 2, "max_len": 16, "deadlines": deadlines})
    assert isinstance(local, LocalSglang)
    assert local._settings.deadlines == EngineDeadlines(**deadlines)  # pyright: ignore[reportPrivateUsage]
    assert runtime.engine is not None
    assert runtime.engine.arguments["max_running_requests"] == 2
    local.close()


class InThisProcess(SglangEngine):
    """`SglangEngine` without its process."""

    def _start(self) -> Any:
        return LocalSglang(self._settings, FakeSglang())  # pyright: ignore[reportArgumentType]


def test_prompts_with_images_are_refused_and_an_entry_without_any_is_not(model_dir: Path) -> None:
    settings = SglangSettings(model_dir=model_dir, max_rows=2, max_len=16)
    engine = InThisProcess(settings, lambda: list(fake_tensors(0).items()))
    engine.load_weights(1)
    options = SamplingOptions(temperature=1.0, max_new_tokens=2)
    assert engine.generate([[1], [2]], [[5], [6]], options, media=[None, None])
    with pytest.raises(OptionsError) as caught:
        engine.generate([[1], [2]], [[5], [6]], options, media=[None, object()])
    assert caught.value.problem.code == "engine.sglang.images"
    engine.close()
