"""Completions of prompts: the room of a response, the share of each rank, and keys that no rank changes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rft.stages.generate import generate
from rft_core.keyed_random import derive_key


def run(calls: Any, module: Any, *, rank: int = 0, ranks: int = 1, positions: int = 100, **given: Any) -> Any:
    """The rows of a command over three prompts of 3, 7 and 5 tokens."""
    found = [SimpleNamespace(token_ids=(number,) * length) for number, length in enumerate((3, 7, 5))]
    policy = calls.double("policy")
    calls.replace(module, constraint_of=lambda *given: None)
    # it reads the fields of settings, which a double lacks
    calls.replace(module, with_model_directories=lambda settings: settings)
    if hasattr(module, "within"):
        calls.replace(module, within=lambda engine, trie, beams: engine)
    calls.put(
        module,
        "make_engine sampling_options gather_rows",
        tokenizer_with_images=calls.double("tokenizer"),
        given_prompts=found,
        load_policy=calls.double("loaded", eval=calls.double("eval", returns=policy)),
        decoder_for=SimpleNamespace(max_positions=positions),
    )
    sampled: list[Any] = []

    def sample(engine: Any, tokenizer: Any, chosen: Any, keys: Any, options: Any) -> Any:
        sampled.append((engine, tokenizer, [len(prompt.token_ids) for prompt in chosen], keys, options))
        return [["first", "second"] for _ in chosen]

    calls.replace(module, sample_responses=sample, rollout_row=lambda prompt, rollout: (len(prompt.token_ids), rollout))
    drawn = calls.double(
        "drawn", **{"generate_max_len": 20, "max_len": None, "prompt_max_len": 30, "num_beams": 0} | given
    )
    settings = calls.double(
        "settings",
        sampling=drawn,
        model=calls.double("model", bf16=False),
        data=calls.double("data", n_samples_per_prompt=2),
        output=SimpleNamespace(seed=5),
    )
    machine = calls.double("machine", ranks=SimpleNamespace(rank=rank, world_size=ranks))
    rows = generate(settings, machine)
    return rows, sampled


@pytest.fixture
def module() -> Any:
    """The module, whose name in the package is that of its function."""

    return sys.modules["rft.stages.generate"]


def keys(*numbers: int) -> list[list[int]]:
    return [[derive_key(5, "sample", 0, i, j) for j in range(2)] for i in numbers]


def test_a_command_gives_its_settings_to_the_parts_that_they_belong_to(calls: Any, module: Any) -> None:
    rows, sampled = run(calls, module)
    assert rows == "gather_rows()"
    assert calls.taken() == [
        "tokenizer_with_images(model, settings.images)",
        "given_prompts(data, tokenizer, 30, settings.images)",
        "load_policy(model.pretrain, device=machine.device, dtype=torch.float32)",
        "eval()",
        "decoder_for(policy)",
        "make_engine(settings.engine, machine, policy, model.pretrain, 27)",
        "sampling_options(drawn, 20, tokenizer.eos_ids)",
        "gather_rows(machine.collectives, [[(3, 'first'), (3, 'second')], [(7, 'first'), (7, 'second')], "
        "[(5, 'first'), (5, 'second')]])",
    ]
    assert sampled == [("make_engine()", "tokenizer", [3, 7, 5], keys(0, 1, 2), "sampling_options()")]


@pytest.mark.parametrize(
    ("given", "response"),
    [
        ({"max_len": 45}, 15),
        ({"max_len": 90}, 20),
        ({"positions": 20}, 13),
        ({"positions": 20, "max_len": 35}, 5),
    ],
)
def test_a_response_has_the_room_that_the_longest_prompt_and_the_model_leave(
    calls: Any, module: Any, given: dict[str, int], response: int
) -> None:
    run(calls, module, **given)
    made = calls.taken()
    assert f"sampling_options(drawn, {response}, tokenizer.eos_ids)" in made
    assert f"make_engine(settings.engine, machine, policy, model.pretrain, {7 + response})" in made


def test_a_sample_has_the_key_of_its_prompt_whichever_rank_draws_it(calls: Any, module: Any) -> None:
    _, first = run(calls, module, rank=0, ranks=2)
    _, second = run(calls, module, rank=1, ranks=2)
    assert (first[0][2:4], second[0][2:4]) == (([3, 5], keys(0, 2)), ([7], keys(1)))
    _, none = run(calls, module, rank=3, ranks=4)
    assert none == []
    assert calls.taken()[-1] == "gather_rows(machine.collectives, [])"
