"""LightRFT's calls of the engine, with a double of it: what it is asked for, in which order, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rft_cli.config.resolve import resolve
from rft_cli.lightrft import strategy as lightrft_strategy
from rft_cli.lightrft.strategy import Generation, Strategy
from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key

LONGEST, ROOM = 6, 10
EOS = (2,)


class Engine:
    """Answers with the ids of the prompt backwards, and keeps every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def refresh(self) -> None:
        self.calls.append(("refresh",))

    def wake(self) -> None:
        self.calls.append(("wake",))

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def generate(self, prompts: Any, keys: Any, options: Any) -> Any:
        self.calls.append(("generate", prompts, keys, options))
        return [[answer(ids, key) for key in row] for ids, row in zip(prompts, keys, strict=True)]

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


def answer(ids: list[int], key: int) -> SimpleNamespace:
    return SimpleNamespace(token_ids=[*reversed(ids)], logprobs=[float(key % 7)], finish_reason="stop")


class Letters:
    """Token 0 is `a`; special tokens are a leading 99."""

    eos_ids = EOS

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [*([99] if add_special_tokens else []), *(ord(letter) - 97 for letter in text)]

    def decode_batch(self, rows: list[list[int]]) -> list[str]:
        return ["".join(chr(97 + token) for token in row if token != 99) for row in rows]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    limits = {17: (LONGEST, ROOM)}
    monkeypatch.setattr(lightrft_strategy, "response_limits", lambda settings, longest: limits[longest])
    return Engine()


def strategy(engine: Engine, *words: str, rank: int = 0, can_sleep: bool = True, check: Any = None) -> Strategy:
    settings = resolve("rl", ["--pretrain", "m", "--seed", "3", *words]).settings
    policy = SimpleNamespace(model=object())
    training = SimpleNamespace(
        rollouts=engine,
        updater=SimpleNamespace(model=policy),
        check_engine=check,
        progress=SimpleNamespace(step=5),
    )
    ready: Any = SimpleNamespace(
        training=training,
        tokenizer=Letters(),
        data=SimpleNamespace(longest_prompt=17),
        machine=SimpleNamespace(device="cpu", ranks=SimpleNamespace(rank=rank)),
    )
    return Strategy(ready, settings)


@pytest.fixture(autouse=True)
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the chosen engine can sleep; the one entry may be changed."""
    can = [True]
    monkeypatch.setattr(
        lightrft_strategy,
        "choose_engine",
        lambda settings, device: SimpleNamespace(can_sleep=can[0] and device == "cpu"),
    )
    return can


def keys(call: int, prompts: int, number: int, rank: int = 0) -> list[list[int]]:
    return [[derive_key(3, "gather_and_generate", rank, call, i, j) for j in range(number)] for i in range(prompts)]


def test_every_prompt_has_its_responses_in_order(engine: Engine) -> None:
    found = strategy(engine).gather_and_generate([[0, 1], [2, 3, 4]], sampling_params={"n": 2})
    assert engine.names() == ["wake", "generate", "sleep"]
    assert engine.calls[1][1:3] == ([[0, 1], [2, 3, 4]], keys(0, 2, 2))
    assert engine.calls[2] == ("sleep", 1)
    prompts = ((0, 1), (0, 1), (2, 3, 4), (2, 3, 4))
    drawn = [key for row in keys(0, 2, 2) for key in row]
    assert found == [
        Generation(ids, ids[::-1], "".join(chr(97 + one) for one in ids[::-1]), (float(key % 7),), "stop")
        for ids, key in zip(prompts, drawn, strict=True)
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_call_and_every_rank_draws_under_keys_of_its_own(engine: Engine, rank: int) -> None:
    made = strategy(engine, rank=rank)
    for _ in range(2):
        made.gather_and_generate([[0]])
    asked = [call[2] for call in engine.calls if call[0] == "generate"]
    assert asked == [keys(0, 1, 1, rank), keys(1, 1, 1, rank)]


@pytest.mark.parametrize(("asked", "can", "slept"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_the_engine_sleeps_where_it_is_asked_to_and_can(
    engine: Engine, sleeps: list[bool], asked: bool, can: bool, slept: int
) -> None:
    sleeps[0] = can
    strategy(engine).gather_and_generate([[0]], sleep_engine=asked)
    assert engine.names().count("sleep") == slept


@pytest.mark.parametrize(("words", "special"), [([], [99]), (["--apply_chat_template"], [])])
@pytest.mark.parametrize("name", ["prompts", "all_prompts"])
def test_texts_are_encoded_with_special_tokens_unless_a_template_brings_them(
    engine: Engine, words: list[str], special: list[int], name: str
) -> None:
    found = strategy(engine, *words).gather_and_generate(**{name: ["ab", "c"]})  # type: ignore[arg-type]
    assert engine.calls[1][1] == [[*special, 0, 1], [*special, 2]]
    assert [one.text for one in found] == ["ba", "c"]


def test_token_ids_have_a_name_of_their_own_and_no_prompts_are_no_responses(engine: Engine) -> None:
    made = strategy(engine)
    assert made.gather_and_generate(all_prompt_token_ids=[(0, 1)])[0].prompt_token_ids == (0, 1)
    assert made.gather_and_generate([], all_images=None) == []


@pytest.mark.parametrize(
    ("asked", "changed"),
    [
        ({}, {}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"top_p": 0.5, "min_p": 0.25}, {"top_p": 0.5, "min_p": 0.25}),
        ({"top_k": 4.0}, {"top_k": 4}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"max_tokens": 3.0, "min_tokens": 2}, {"max_new_tokens": 3, "min_new_tokens": 2}),
    ],
)
def test_parameters_that_are_absent_are_those_of_the_run(
    engine: Engine, asked: dict[str, float], changed: dict[str, Any]
) -> None:
    words = ["--temperature", "0.7", "--top_p", "0.9", "--top_k", "30", "--min_p", "0.1"]
    strategy(engine, *words).gather_and_generate([[0]], sampling_params=asked)
    options = engine.calls[1][3]
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "min_p": 0.1, "max_new_tokens": LONGEST}
    wanted |= {"min_new_tokens": 0, "stop_token_ids": EOS, **changed}
    assert {name: getattr(options, name) for name in wanted} == wanted


def test_a_prompt_and_its_response_fill_the_engine_and_no_more(engine: Engine) -> None:
    made = strategy(engine)
    made.gather_and_generate([[0] * 4])
    made.gather_and_generate([[0] * 9], sampling_params={"max_tokens": 1})
    for prompts, asked, do in (
        ([[0], [0] * 5, [1] * 5], {}, 'sampling_params={"max_tokens": 5}'),
        ([[0] * 10], {"max_tokens": 1}, "a prompt of at most 9 tokens"),
        ([[0] * 9], {"max_tokens": 2}, 'sampling_params={"max_tokens": 1}'),
    ):
        with pytest.raises(OptionsError) as caught:
            made.gather_and_generate(prompts, sampling_params=asked)
        assert (caught.value.problem.code, caught.value.problem.do) == ("lightrft.prompt_too_long", do)
    with pytest.raises(OptionsError, match="prompt 1: 5 tokens"):
        made.gather_and_generate([[0], [0] * 5, [1] * 5])
    assert engine.names().count("generate") == 2


@pytest.mark.parametrize(
    ("arguments", "code", "do"),
    [
        ({}, "lightrft.prompts", 'gather_and_generate(["1+1="])'),
        ({"prompts": [], "all_prompts": []}, "lightrft.prompts", 'gather_and_generate(["1+1="])'),
        ({"sampling_params": {"temprature": 0.5}}, "lightrft.sampling_params", 'sampling_params={"temperature": 0.5}'),
        ({"sampling_params": {"qqqq": 1}}, "lightrft.sampling_params", 'sampling_params={"n": 1}'),
        ({"all_images": ["a.png"]}, "lightrft.media", "leave all_images out"),
        ({"videos_num": 0}, "lightrft.media", "leave videos_num out"),
        ({"sleep": None}, "lightrft.argument", "leave sleep out"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(engine: Engine, arguments: dict[str, Any], code: str, do: str) -> None:
    given = arguments if code == "lightrft.prompts" else {"prompts": [[0]], **arguments}
    with pytest.raises(OptionsError) as caught:
        strategy(engine).gather_and_generate(**given)
    assert (caught.value.problem.code, caught.value.problem.do) == (code, do)
    assert engine.calls == []


def test_changed_weights_reach_the_engine_and_are_checked_awake(engine: Engine) -> None:
    made = strategy(engine, check=lambda step: engine.calls.append(("check", step)))
    policy: Any = made._ready.training.updater.model
    for actor in (policy, policy.model):
        engine.calls.clear()
        made.update_engine_weights(actor)
        assert engine.calls == [("refresh",), ("wake",), ("check", 5)]
    engine.calls.clear()
    with pytest.raises(OptionsError) as caught:
        made.update_engine_weights(object())
    assert caught.value.problem.code == "lightrft.other_actor"
    assert engine.calls == []


def test_an_engine_without_a_check_is_refreshed_alone(engine: Engine) -> None:
    made = strategy(engine)
    made.update_engine_weights(made._ready.training.updater.model)
    assert engine.calls == [("refresh",)]
