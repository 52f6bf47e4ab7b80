"""An environment from its settings: its episodes, the room of its conversations, and where their prompts end."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from rft.build import environment
from rft_core.errors import DataError
from rft_trainer.records.rollouts import Prompt
from rft_trainer.settings.environment import EvalEnvironmentSettings
from rft_trainer.workers.limits import ProcessLimits

SETTINGS = EvalEnvironmentSettings(
    environment="own.py:Game",
    environment_workers=3,
    max_turns=5,
    turn_max_len=7,
    tool_timeout=2.0,
    rollout_timeout=4.0,
    environment_memory=2.0,
    environment_variables="A_KEY, B_*",
    tool_call_pattern="(?P<name>a)(?P<arguments>b)",
)
LIMITS = ProcessLimits(data_bytes=2 << 30, variables=("A_KEY", "B_*"))
EPISODES = (
    f"environment_by_name('own.py:Game', limits={LIMITS!r}, num_workers={{}}, rollout_timeout=4.0, tool_timeout=2.0)"
)


@pytest.fixture
def made(calls: Any) -> Any:
    """The parts of an environment as doubles."""
    calls.put(
        environment,
        "ToolCallFormat ChatTurnTemplate Conversations ConversationSamples ConversationStepper",
        environment_by_name=calls.double("episodes"),
        has_processes=True,
    )
    return calls


def opened(calls: Any, **settings: Any) -> Any:
    found = environment.open_environment(replace(SETTINGS, **settings), calls.double("tokenizer"))
    calls.taken()
    return found


def test_without_a_name_there_is_no_environment(made: Any) -> None:
    nothing = EvalEnvironmentSettings()
    assert environment.open_environment(nothing, made.double("tokenizer")) is None
    with ExitStack() as stack:
        assert environment.enter_environment(nothing, made.double("tokenizer"), stack) is None
    assert made.taken() == []


def test_an_environment_has_the_numbers_of_its_settings_and_gives_its_tools_first(made: Any) -> None:
    tokenizer = made.double("tokenizer")
    made.replace(environment, ChatTurnTemplate=lambda given: f"template with {given.tools}")
    found: Any = environment.open_environment(SETTINGS, tokenizer)
    assert made.taken() == [f"ToolCallFormat({SETTINGS.tool_call_pattern!r})", EPISODES.format(3)]
    assert found.text == "template with episodes.tools"
    assert (found.settings, found.episodes, found.calls) == (SETTINGS, "episodes", "ToolCallFormat()")
    assert found.tokenizer is tokenizer


def test_a_template_that_cannot_be_used_ends_the_processes(made: Any) -> None:
    def fails(tokenizer: Any) -> Any:
        raise DataError(code="chat.template", what="w", where="h", why="y")

    made.replace(environment, ChatTurnTemplate=fails)
    with pytest.raises(DataError):
        environment.open_environment(SETTINGS, made.double("tokenizer"))
    assert made.taken()[-1] == "episodes.close()"


def test_an_environment_is_closed_with_its_block_and_all_of_its_runners_are(made: Any) -> None:
    with ExitStack() as stack:
        found: Any = environment.enter_environment(SETTINGS, made.double("tokenizer"), stack)
        found.async_conversations(20)
        made.taken()
    assert made.taken() == ["episodes.close()"] * 4


@pytest.mark.parametrize(("turn", "positions", "room"), [(7, 100, 37), (None, 100, 50), (7, 33, 33)])
def test_the_engine_has_room_for_a_turn_more_as_far_as_the_model_goes(
    made: Any, turn: int | None, positions: int, room: int
) -> None:
    made.put(environment, model_facts=SimpleNamespace(max_positions=positions))
    assert opened(made, turn_max_len=turn).room("dir", 30, 20) == room
    assert made.taken() == ["model_facts('dir')"]


def test_conversations_have_the_limits_of_the_settings(made: Any) -> None:
    found = opened(made)
    assert found.conversations("engine", 40, "timer") == "Conversations()"
    assert made.taken() == [
        "Conversations('engine', tokenizer, episodes, ChatTurnTemplate(), ToolCallFormat(), "
        "ConversationLimits(max_turns=5, turn_max_len=7, room=40), timer='timer')"
    ]


@pytest.mark.parametrize(("processes", "runners"), [(True, 3), (False, 1)])
def test_conversations_that_run_ahead_have_a_thread_for_each_process(made: Any, processes: bool, runners: int) -> None:
    made.put(environment, has_processes=processes)
    found = opened(made)
    assert found.async_conversations(20) == "ConversationSamples()"
    assert made.taken() == [
        "has_processes('own.py:Game')",
        *[EPISODES.format(1)] * runners,
        "ConversationStepper(ChatTurnTemplate(), ToolCallFormat(), "
        "ConversationLimits(max_turns=5, turn_max_len=7, room=None))",
        f"ConversationSamples(tokenizer, {['episodes'] * runners}, ConversationStepper(), 20)".replace("'", ""),
    ]
    assert environment.runs_in_processes(SETTINGS) is processes


def with_opening(calls: Any, *opening: int) -> Any:
    calls.put(environment, ChatTurnTemplate=SimpleNamespace(generation_ids=opening))
    found = opened(calls)
    found.tokenizer.decode = lambda ids: "".join(chr(token) for token in ids)
    return found


def prompt(text: str) -> Prompt:
    return Prompt("p:0", tuple(map(ord, text)), text, "label", "p")


def test_a_prompt_ends_before_the_tokens_that_open_a_turn(made: Any) -> None:
    found = with_opening(made, *map(ord, "me:"))
    assert found.opened([prompt("hi me:"), prompt("me:me:")]) == [prompt("hi "), prompt("me:")]
    for text in ("hi you:", "me:", "e:"):
        with pytest.raises(DataError) as caught:
            found.opened([prompt(text)])
        assert caught.value.problem.code == "environment.prompt_end"


@dataclass(frozen=True)
class Rows:
    """Data of a run."""

    prompts: list[str]
    held_out: list[str]


def test_training_and_held_out_prompts_are_opened() -> None:
    rows: Any = Rows(["a"], ["b"])
    chosen: Any = SimpleNamespace(opened=lambda prompts: [f"{name}!" for name in prompts])
    assert environment.opened_data(rows, chosen) == Rows(["a!"], ["b!"])
    assert environment.opened_data(rows, None) is rows
