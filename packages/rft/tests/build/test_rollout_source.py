"""What replicas and rollouts ahead do not go with is refused by its name."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from rft.build.algorithm import algorithm_record
from rft.build.rollout_source import EngineDiagnosis, require_async_support
from rft.settings import RlSettings
from rft_core.errors import OptionsError
from rft_engine.completions import EngineStats
from rft_engine.settings import EngineSettings, ReplicaSettings, TrainingSamplingSettings
from rft_models.settings import ModelSettings
from rft_trainer.settings.algorithm import AlgorithmSettings
from rft_trainer.settings.rollouts import AsyncSettings

PLAIN = RlSettings(model=ModelSettings(pretrain="model", device="cpu"))
AHEAD = replace(PLAIN, async_rollouts=AsyncSettings(max_staleness=1))
EXACT = replace(PLAIN, async_rollouts=AsyncSettings(max_staleness=1, async_deterministic=True))
TWO = replace(PLAIN, replicas=ReplicaSettings(engine_replicas=2))


def refuse(settings: RlSettings) -> None:
    require_async_support(settings, algorithm_record(settings))


@pytest.mark.parametrize("settings", [PLAIN, AHEAD, EXACT, TWO])
def test_what_goes_together_is_not_refused(settings: RlSettings) -> None:
    refuse(settings)
    # an engine in the trainer's process goes with neither replicas nor rollouts ahead
    other = replace(settings, engine=EngineSettings(engine_type="hf"))
    if settings is PLAIN:
        refuse(other)
    else:
        with pytest.raises(OptionsError, match="hf"):
            refuse(other)


@pytest.mark.parametrize(
    ("settings", "code", "do"),
    [
        (replace(AHEAD, engine=EngineSettings(engine_type="hf")), "async.engine", "--engine_type native"),
        (
            replace(AHEAD, algorithm=AlgorithmSettings(advantage_estimator="remax")),
            "async.baseline",
            "--max_staleness 0",
        ),
        (
            replace(AHEAD, sampling=TrainingSamplingSettings(use_fire=True)),
            "async.fire",
            "--async_deterministic",
        ),
    ],
)
def test_what_does_not_is_refused_by_name_with_a_way_out(settings: RlSettings, code: str, do: str) -> None:
    with pytest.raises(OptionsError) as caught:
        refuse(settings)
    assert caught.value.problem.code == code
    assert caught.value.problem.do == do


def test_the_first_token_of_its_own_goes_with_whole_samples() -> None:
    fire = TrainingSamplingSettings(use_fire=True)
    refuse(replace(EXACT, sampling=fire))
    with pytest.raises(OptionsError):
        refuse(replace(AHEAD, sampling=fire))


def test_what_limits_the_engine_is_a_metric_and_each_costly_cause_is_noted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    busy = EngineStats(num_generated_tokens=100, num_decode_steps=10, mean_occupancy=0.95, seconds=0.5, rows=4)
    idle = replace(busy, mean_occupancy=0.3)
    waiting = replace(idle, tail_ratio=5.0)
    calls = iter([EngineStats(), busy, idle, waiting, idle])
    diagnose = EngineDiagnosis(lambda: next(calls), notify=True)
    with caplog.at_level(logging.INFO):
        rows = [diagnose() for _ in range(5)]
    assert [row["time/engine_limit"] for row in rows] == ["nothing", "forward", "occupancy", "tail", "occupancy"]
    assert [row.get("time/engine_tokens_per_second") for row in rows] == [None, 200.0, 200.0, 200.0, 200.0]
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "occupancy 0.30" in texts[0]
    assert "tail ratio 5.0" in texts[1]


def test_other_ranks_note_nothing(caplog: pytest.LogCaptureFixture) -> None:
    idle = EngineStats(num_generated_tokens=100, num_decode_steps=10, mean_occupancy=0.3, seconds=1.0, rows=4)
    with caplog.at_level(logging.INFO):
        found = EngineDiagnosis(lambda: idle, notify=False)()
    assert found == {"time/engine_limit": "occupancy", "time/engine_tokens_per_second": 100.0}
    assert caplog.records == []
