"""Arguments under other trainers' names: the name here, and the value where it is a text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import rft
from rft_core.errors import OptionsError

ROWS = [{"input": "1+1=", "label": "2"}]


@pytest.mark.parametrize(
    ("call", "arguments", "do"),
    [
        (rft.grpo, {"train_dataset": ROWS}, "write data= in place of train_dataset="),
        (rft.grpo, {"train_dataset": "train.jsonl"}, "data='train.jsonl'"),
        (rft.rl, {"prompt_data": "train.jsonl"}, "data='train.jsonl'"),
        (rft.sft, {"data": ROWS, "eval_dataset": ROWS}, "write eval_data= in place of eval_dataset="),
        (rft.sft, {"data": ROWS, "processing_class": object()}, "write tokenizer= in place of processing_class="),
        (rft.sft, {}, 'data=[{"input": "2+3=", "label": "5"}]'),
        (rft.evaluate, {"eval_data": "held.jsonl"}, "data='held.jsonl'"),
        (rft.evaluate, {"eval_dataset": ROWS}, "write data= in place of eval_dataset="),
        (rft.generate, {"prompt_data": "p.jsonl"}, "prompts=pathlib.Path('p.jsonl')"),
        (rft.generate, {"prompt": "1+1="}, "prompts='1+1='"),
        (rft.generate, {}, 'prompts=["2+3="]'),
    ],
)
def test_an_argument_of_another_trainer_is_answered_with_its_name_here(
    call: Any, arguments: dict[str, Any], do: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        call("model", **arguments)
    assert caught.value.problem.do == do


def test_a_model_under_another_name_is_answered_too() -> None:
    call: Any = rft.grpo
    with pytest.raises(OptionsError) as caught:
        call(model_name="Qwen/Qwen3-0.6B", data=ROWS)
    assert caught.value.problem.do == "model='Qwen/Qwen3-0.6B'"
    assert rft.grpo.__name__ == "grpo"


def test_a_text_under_another_name_of_an_optional_argument_is_a_setting_among_others() -> None:
    call: Any = rft.sft
    with pytest.raises(OptionsError) as caught:
        call("model", ROWS, eval_dataset="held.jsonl", max_steps="many")
    assert len(caught.value.problems) == 2


def test_objects_of_settings_are_answered_with_a_keyword() -> None:
    calls: list[tuple[Any, dict[str, Any], str]] = [
        (rft.grpo, {"peft_config": SimpleNamespace(r=16)}, "lora_rank=16"),
        (rft.grpo, {"args": SimpleNamespace(learning_rate=2e-6)}, "actor_learning_rate=2e-06"),
        (rft.sft, {"args": SimpleNamespace(learning_rate=2e-5)}, "learning_rate=2e-05"),
    ]
    for call, given, do in calls:
        with pytest.raises(OptionsError) as caught:
            call("model", ROWS, **given)
        assert caught.value.problem.do == do


def test_the_model_of_a_loop_is_called_as_its_setting() -> None:
    call: Any = rft.open_loop
    with pytest.raises(OptionsError) as caught:
        call(model="some/where")
    assert caught.value.problem.do == "pretrain='some/where'"


def test_names_of_other_libraries_are_answered_with_a_call() -> None:
    for name, instead in (("GRPOTrainer", "rft.grpo"), ("SFTTrainer", "rft.sft"), ("DPOTrainer", "rft.dpo")):
        with pytest.raises(AttributeError, match=f"; use {instead}"):
            getattr(rft, name)
    with pytest.raises(AttributeError, match=r"'nothing'$"):
        getattr(rft, "nothing")  # noqa: B009
