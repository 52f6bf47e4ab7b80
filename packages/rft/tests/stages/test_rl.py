"""Start and end of an RL run: what is read before what is built, and what closes what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.stages import rl
from rft_trainer.runs.rollback import RollbackRequested


@pytest.fixture
def start(calls: Any) -> Any:
    """The parts of a start as doubles."""
    calls.put(
        rl,
        requested_run="request",
        open_machine=calls.double("machine", is_first=True, ranks=SimpleNamespace(rank=3, world_size=4)),
        tokenizer_with_images="tokenizer",
        enter_environment="environment",
        rl_data="rows",
        opened_data=calls.double("data", all_prompts=lambda: ["p", "q"]),
        reward_columns="columns",
        start=calls.double("started", directory=SimpleNamespace(logs_directory=Path("logs"))),
        build_reward=calls.double("reward"),
        build_rl=calls.double("training"),
        ExitStack=calls.double("stack"),
        StopSignals=calls.double("signals"),
    )
    calls.put(rl, "execute")
    resolved = calls.double("resolved")
    # what is recorded has names with commits, what is read has directories
    local = calls.double("local", settings=calls.double("settings", teacher=SimpleNamespace(teacher_pretrain="")))
    at = calls.double("at", resolved=calls.double("fixed"))
    calls.put(rl, continuation=calls.double("begun"), with_commits=at, with_local_models=local)
    calls.put(rl, RL_START=local, require_gpus=None)
    calls.put(rl, rl_contents="contents", compared_facts="facts")
    return SimpleNamespace(resolved=resolved, front=calls.double("front"))


GIVEN = "{'reward': REWARD, 'compute_advantages': ADVANTAGES}"


def begins(reward: str, advantages: str) -> list[str]:
    """Return the calls up to the plan, with these functions of a script."""
    return [call.replace("REWARD", reward).replace("ADVANTAGES", advantages) for call in BEGINS]


def built(reward: str) -> list[str]:
    """Return the calls that build the reward, with this function of a script."""
    log = Path("logs/reward-3.log")
    options = f"columns='columns', function={reward}, log={log!r}"
    return ["reward_columns(settings, ['p', 'q'])", f"build_reward(settings, machine, {options})"]


BEGINS = [
    "open_machine(settings.model.device, 'request', settings.watch, command=['rft-train'], debug=settings.run.debug, "
    "show_error=front.show_error)",
    "machine begins",
    "ExitStack()",
    "stack begins",
    "RL_START(local, machine)",
    "require_gpus(settings, machine)",
    "tokenizer_with_images(settings.model, settings.images)",
    "enter_environment(settings.conversation, 'tokenizer', stack)",
    "rl_data(settings, 'tokenizer', 4)",
    "opened_data('rows', 'environment')",
    f"rl_contents(local, data, {GIVEN})",
    "compared_facts(at, machine, 'contents')",
    "front.show_plan(local, data, machine)",
]
ENDS = ["training.rollouts.close()", "reward.close()", "stack ends", "machine ends"]


def test_a_run_is_planned_before_its_reward_and_model_are_built_and_closed_in_turn(calls: Any, start: Any) -> None:
    with rl.prepared(
        start.resolved,
        ["rft-train"],
        reward="own reward",  # type: ignore[arg-type]
        compute_advantages="own advantages",  # type: ignore[arg-type]
        script="train.py",
        front=start.front,
    ) as ready:
        assert calls.taken() == [
            "continuation(resolved, None)",
            "with_commits(begun)",
            "with_local_models(fixed)",
            "requested_run(local, None)",
            *begins("'own reward'", "'own advantages'"),
            "start(at, ['rft-train'], machine, data.num_steps, 'facts', front=front, in_place=None, script='train.py')",
            *built("'own reward'"),
            "build_rl(settings, started, 'tokenizer', data, reward, compute_advantages='own advantages', "
            "environment='environment')",
        ]
        parts = (ready.machine, ready.tokenizer, ready.data, ready.started, ready.training)
        assert tuple(map(str, parts)) == ("machine", "tokenizer", "data", "started", "training")
    assert calls.taken() == ENDS


def test_an_error_closes_rollouts_and_then_the_reward(calls: Any, start: Any) -> None:
    with pytest.raises(ZeroDivisionError), rl.prepared(start.resolved, [], front=start.front):
        raise ZeroDivisionError
    assert calls.taken()[-len(ENDS) :] == ENDS

    def fails(*parts: Any, **more: Any) -> Any:
        raise LookupError

    calls.replace(rl, build_rl=fails)
    with pytest.raises(LookupError), rl.prepared(start.resolved, [], front=start.front):
        pass
    assert calls.taken()[-3:] == ENDS[1:]


def test_other_ranks_show_no_plan(calls: Any, start: Any) -> None:
    ranks = SimpleNamespace(rank=1, world_size=2)
    calls.put(rl, open_machine=calls.double("machine", is_first=False, ranks=ranks))
    with rl.prepared(start.resolved, [], front=start.front):
        assert not [call for call in calls.taken() if "show_plan" in call]


def test_a_run_is_executed_while_signals_are_watched(calls: Any, start: Any) -> None:
    place = calls.double("place")
    ended: Any = rl.train(start.resolved, ["rft-train"], in_place=place, front=start.front)
    assert ended == "execute()"
    assert calls.taken() == [
        "StopSignals()",
        "signals begins",
        "continuation(resolved, place)",
        "with_commits(begun)",
        "with_local_models(fixed)",
        "requested_run(local, place)",
        *(call.replace(GIVEN, "{'reward': None}") for call in BEGINS),
        "start(at, ['rft-train'], machine, data.num_steps, 'facts', front=front, in_place=place, script='')",
        *built("None"),
        "build_rl(settings, started, 'tokenizer', data, reward, compute_advantages=None, environment='environment')",
        "execute(training, started, signals, None)",
        *ENDS,
        "signals ends",
    ]


def test_a_run_that_goes_back_is_built_again_from_its_directory_on_the_same_ranks(calls: Any, start: Any) -> None:
    rollback = calls.double("rollback", run="directory")
    asked: list[Any] = []

    def execute(training: Any, started: Any, signals: Any, rollback_now: Any) -> str:
        asked.append(rollback_now)
        if rollback_now is None:
            raise RollbackRequested(rollback)
        return "ended"

    rollback.failed_step = 3
    calls.replace(rl, execute=execute)
    assert rl.train(start.resolved, [], front=start.front) == "ended"
    assert asked == [None, rollback]
    calls_made = [call for call in calls.taken() if call not in ("signals begins", "StopSignals()")]
    again = calls_made.index("continuation(fixed, 'directory')")
    assert calls_made[again - 2 : again] == ENDS[:2], "the rollouts and the reward are closed, the ranks stay together"
    assert calls_made[again + 1 :] == [
        "start(begun, [], machine, data.num_steps, 'facts', front=front, in_place='directory', script='')",
        *built("None"),
        "build_rl(settings, started, 'tokenizer', data, reward, compute_advantages=None, environment='environment')",
        *ENDS,
        "signals ends",
    ]
