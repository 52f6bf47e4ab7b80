"""The source of rollouts: sampled while the trainer waits or ahead of it, and what is refused beside that."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rft.build import rollout_source
from rft.build.rollout_source import RolloutParts, build_rollouts, require_async_support
from rft.settings import RlSettings
from rft_core.errors import OptionsError
from rft_engine.settings import EngineSettings, ReplicaSettings, TrainingSamplingSettings
from rft_models.settings import ModelSettings
from rft_trainer.settings.rollouts import AsyncSettings

PLAIN = RlSettings(model=ModelSettings(pretrain="m", device="cpu"))
AHEAD = replace(PLAIN, async_rollouts=AsyncSettings(max_staleness=1))
TWO = replace(PLAIN, replicas=ReplicaSettings(engine_replicas=2))
BOTH = replace(AHEAD, replicas=ReplicaSettings(engine_replicas=2))
EXACT = AsyncSettings(max_staleness=1, async_deterministic=True)
FIRE = TrainingSamplingSettings(use_fire=True)
AWAKE = EngineSettings(enable_engine_sleep=False)


def refuse(calls: Any, settings: RlSettings, *, greedy: bool = False, **can: Any) -> None:
    able = {"supports_replicas": True, "supports_partial_rollouts": True} | can
    chosen = SimpleNamespace(
        name="some",
        kind=SimpleNamespace(title="Some"),
        can=SimpleNamespace(**able),
        shares_weights=can.get("shares_weights", True),
        can_sleep=can.get("can_sleep", True),
    )
    calls.put(rollout_source, choose_engine=chosen, choose_device="meta")
    record: Any = SimpleNamespace(name="remax", advantage=SimpleNamespace(needs_greedy=greedy))
    require_async_support(settings, record)


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        (PLAIN, {"supports_replicas": False, "greedy": True}),
        (TWO, {"greedy": True, "supports_partial_rollouts": False, "shares_weights": False}),
        (replace(TWO, sampling=FIRE), {}),
        (AHEAD, {}),
        (AHEAD, {"can_sleep": False, "shares_weights": False}),
        (replace(AHEAD, engine=AWAKE), {"shares_weights": False}),
        (replace(AHEAD, async_rollouts=EXACT, sampling=FIRE), {"supports_partial_rollouts": False}),
    ],
)
def test_what_goes_together_is_taken(calls: Any, settings: RlSettings, given: dict[str, Any]) -> None:
    refuse(calls, settings, **given)
    asks = settings.async_rollouts.max_staleness or settings.replicas.engine_replicas > 1
    assert calls.taken() == (["choose_device('cpu', 0)", f"choose_engine({settings.engine!r}, 'meta')"] if asks else [])


@pytest.mark.parametrize(
    ("settings", "given", "code", "do"),
    [
        (AHEAD, {"supports_replicas": False, "greedy": True}, "async.engine", "--engine_type native"),
        (TWO, {"supports_replicas": False}, "async.engine", "--engine_type native"),
        (AHEAD, {"shares_weights": False}, "async.sleep", "--disable_engine_sleep"),
        (BOTH, {"greedy": True}, "async.baseline", "--max_staleness 0"),
        (replace(AHEAD, async_rollouts=EXACT), {"greedy": True}, "async.baseline", "--max_staleness 0"),
        (AHEAD, {"supports_partial_rollouts": False}, "async.partial", "--async_deterministic"),
        (replace(AHEAD, sampling=FIRE), {}, "async.fire", "--async_deterministic"),
    ],
)
def test_what_does_not_is_refused_by_the_setting_that_asked(
    calls: Any, settings: RlSettings, given: dict[str, Any], code: str, do: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        refuse(calls, settings, **given)
    problem = caught.value.problem
    flag = "--max_staleness" if settings.async_rollouts.max_staleness else "--engine_replicas"
    assert (problem.code, problem.do, problem.where) == (code, do, flag)
    assert problem.what.startswith("max_staleness = 1" if flag == "--max_staleness" else "engine_replicas = 2")
    assert calls.taken() == ["choose_device('cpu', 0)", f"choose_engine({settings.engine!r}, 'meta')"]


def test_a_run_that_waits_asks_for_no_engine(calls: Any) -> None:
    refuse(calls, PLAIN)
    assert calls.taken() == []


def parts_of(calls: Any, environment: Any) -> RolloutParts:
    names = ("engine", "tokenizer", "reward", "ledger", "data", "sampling", "timer")
    parts = {name: calls.double(name) for name in names}
    parts["data"] = calls.double("data", plan=SimpleNamespace(rollouts_per_update=3))
    return RolloutParts(**parts, environment=environment, room=40)


def built(calls: Any, *, environment: Any, staleness: int = 0, replicas: bool = False) -> Any:
    calls.put(
        rollout_source,
        "RolloutCollector SyncRollouts AsyncRollouts engine_check EngineDiagnosis",
        wants_replicas=replicas,
    )
    settings = calls.double(
        "settings",
        reward_models=SimpleNamespace(reward_wait=60.0),
        async_rollouts=calls.double("ahead", max_staleness=staleness),
        batch=calls.double("batch", rollout_batch_size=5),
    )
    machine, record, policy = (calls.double(name) for name in ("machine", "record", "policy"))
    return build_rollouts(settings, machine, record, policy, parts_of(calls, environment))


@pytest.mark.parametrize("replicas", [True, False])
@pytest.mark.parametrize("talks", [True, False])
def test_rollouts_are_sampled_while_the_trainer_waits(calls: Any, replicas: bool, talks: bool) -> None:
    found = built(calls, environment=calls.double("environment") if talks else None, replicas=replicas)
    conversations = "environment.conversations()" if talks else None
    assert calls.taken() == [
        *(["environment.conversations(engine, 40, timer)"] if talks else []),
        f"RolloutCollector(engine, tokenizer, reward, machine.collectives, conversations={conversations}, "
        "greedy_baseline=record.advantage.needs_greedy, group_size=batch.n_samples_per_prompt, sampling=sampling, "
        "seed=settings.run.seed)",
        "wants_replicas(settings)",
        "EngineDiagnosis(engine.stats, notify=machine.is_first)",
        f"SyncRollouts(engine, RolloutCollector(), ledger, close={'engine.close' if replicas else None}, "
        "diagnose=EngineDiagnosis())",
        "engine_check(settings.engine, machine, policy, engine)",
    ]
    assert (found.source, found.conversations, found.checkpoint_parts) == ("SyncRollouts()", conversations, {})
    assert (found.check_engine, found.refresh) == ("engine_check()", "SyncRollouts().refresh")


@pytest.mark.parametrize("talks", [True, False])
def test_rollouts_run_ahead_of_the_trainer_by_their_rules(calls: Any, talks: bool) -> None:
    rules: list[Any] = []

    def config(**given: Any) -> str:
        rules.append(given)
        return "rules"

    calls.replace(rollout_source, AsyncConfig=config)
    found = built(calls, environment=calls.double("environment") if talks else None, staleness=2)
    kind = "environment.async_conversations()" if talks else None
    assert calls.taken() == [
        *(["environment.async_conversations(sampling.max_new_tokens)"] if talks else []),
        f"AsyncRollouts(engine, tokenizer, reward, ledger, data.prompts, collectives=machine.collectives, kind={kind}, "
        "rules='rules', sampling=sampling)",
        *(["environment.conversations(AsyncRollouts(), 40, timer)"] if talks else []),
    ]
    assert rules == [
        {
            "max_staleness": 2,
            "deterministic": "ahead.async_deterministic",
            "prompts_per_step": 15,
            "max_steps": "batch.max_steps",
            "group_size": "batch.n_samples_per_prompt",
            "seed": "settings.run.seed",
            "patience": 1860.0,
        }
    ]
    assert (found.source, found.checkpoint_parts) == ("AsyncRollouts()", {"rollouts_ahead": "AsyncRollouts()"})
    assert found.conversations == ("environment.conversations()" if talks else None)
    assert (found.check_engine, found.refresh) == (None, None)
