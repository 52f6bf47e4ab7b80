"""A run looked over before it starts: its data are read as the start would, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rft import check
from rft_trainer.records.rollouts import TrainingSample


def test_the_tools_of_an_environment_are_there_before_prompts_are_rendered(calls: Any) -> None:
    prompts = [SimpleNamespace(prompt_id=name, label="7", token_ids=ids) for name, ids in (("p", (4, 5)), ("q", (6,)))]
    data = SimpleNamespace(prompts=prompts)
    tokenizer = calls.double("tokenizer", decode=lambda ids: f"<{ids}>")
    calls.put(
        check,
        "model_facts enter_environment check_reward",
        constraint_of=None,
        tokenizer_with_images=tokenizer,
        rl_data=data,
        ExitStack=calls.double("stack"),
    )
    settings = calls.double("settings")
    found = check.check_rl(settings, 4)
    assert calls.taken() == [
        "tokenizer_with_images(settings.model, settings.images)",
        "model_facts(settings.model.pretrain)",
        "ExitStack()",
        "stack begins",
        "enter_environment(settings.conversation, tokenizer, stack)",
        "rl_data(settings, tokenizer, 4)",
        "stack ends",
        "constraint_of(settings, tokenizer)",
    ]
    assert (found.settings, found.tokenizer, found.data) == (settings, tokenizer, data)
    example = found.first_example()
    assert example.title == "prompt p as the model sees it (2 tokens; label '7'):"
    assert (example.pieces, example.learned) == (["<[4]>", "<[5]>", "<response>"], [False, False, True])
    found.check_reward()
    assert calls.taken() == ["check_reward(settings)"]


def test_the_first_demonstration_is_shown_with_what_is_learned_of_it(calls: Any) -> None:
    sample = TrainingSample("s:0", (4, 5, 6, 7), 2, 0.0)
    tokenizer = calls.double("tokenizer", decode=lambda ids: f"<{ids}>")
    calls.put(
        check, "model_facts", tokenizer_with_images=tokenizer, sft_data=SimpleNamespace(samples=[sample, "other"])
    )
    found = check.check_sft(calls.double("settings"), 4)
    assert calls.taken() == [
        "tokenizer_with_images(settings.model, settings.images)",
        "model_facts(settings.model.pretrain)",
        "sft_data(settings, tokenizer, model_facts().max_positions)",
    ]
    example = found.first_example()
    assert example.title == "demonstration s:0 as the model sees it (4 tokens):"
    assert (example.pieces, example.learned) == (["<[4]>", "<[5]>", "<[6]>", "<[7]>"], [False, False, True, True])
    found.check_reward()
    assert calls.taken() == []
