"""The strategy's engine: it sleeps and wakes by itself, and serves the weights that it is told of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_task import TrainerTask, custom_reward_fn, same_model

from rft_cli.lightrft.trainer import SPMDPPOTrainer
from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens

pytestmark = [pytest.mark.xdist_group("lightrft_api"), pytest.mark.usefixtures("script")]


@pytest.fixture
def trainer(trainer_task: TrainerTask, tmp_path: Path) -> Iterator[SPMDPPOTrainer]:
    with SPMDPPOTrainer(**trainer_task.settings, save_path=tmp_path / "run", reward_fn=custom_reward_fn) as made:
        yield made


GREEDY = {"temperature": 0.0, "max_tokens": 5}


def test_generation_handles_sleep_by_itself(trainer: SPMDPPOTrainer) -> None:
    strategy = trainer.strategy
    prompts = ["1+1=", "12+3="]
    first = strategy.gather_and_generate(prompts, sampling_params=GREEDY, sleep_engine=True)
    awake = strategy.gather_and_generate(all_prompts=prompts, sampling_params=GREEDY, sleep_engine=False)
    ids = [trainer.actor.tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]  # type: ignore[union-attr]
    by_ids = strategy.gather_and_generate(all_prompt_token_ids=ids, sampling_params=GREEDY, sleep_engine=True)
    assert first == awake == by_ids
    assert [list(one.prompt_token_ids) for one in first] == ids
    assert all(0 < len(one.output_token_ids) == len(one.logprobs) <= 5 for one in first)
    assert first[0].text == trainer.actor.tokenizer.decode(first[0].output_token_ids, skip_special_tokens=True)  # type: ignore[union-attr]


def test_samples_differ_between_calls_and_repeat_between_scripts(
    trainer: SPMDPPOTrainer, trainer_task: TrainerTask, tmp_path: Path
) -> None:
    def draw(one: SPMDPPOTrainer) -> list[tuple[int, ...]]:
        return [
            sampled.output_token_ids
            for sampled in one.strategy.gather_and_generate(["1+1=", "2+2="], sampling_params={"n": 3, "top_p": 1.0})
        ]

    first, second = draw(trainer), draw(trainer)
    assert len(first) == 6
    assert len(set(first)) > 1
    assert first != second
    with SPMDPPOTrainer(**trainer_task.settings, save_path=tmp_path / "other", reward_fn=custom_reward_fn) as other:
        assert [draw(other), draw(other)] == [first, second]


def test_generating_between_steps_changes_no_step(trainer: SPMDPPOTrainer, plain: Path, tmp_path: Path) -> None:
    trainer.strategy.gather_and_generate(["1+1="])
    while not trainer.finished:
        trainer.ppo_train()
        trainer.strategy.gather_and_generate(["1+1="], sleep_engine=True)
    assert same_model(plain, tmp_path / "run")


def test_weights_changed_outside_of_a_step_reach_the_engine_when_it_is_told(trainer: SPMDPPOTrainer) -> None:
    strategy = trainer.strategy
    params = {"temperature": 1.0, "top_k": 1, "max_tokens": 5}

    def logprobs() -> tuple[float, ...]:
        return strategy.gather_and_generate(["1+1="], sampling_params=params)[0].logprobs

    before = logprobs()
    with torch.no_grad():
        for parameter in trainer.actor.model.parameters():
            parameter.mul_(1.5)
    strategy.update_engine_weights(trainer.actor)
    after = logprobs()
    assert after != before
    sampled = strategy.gather_and_generate(["1+1="], sampling_params=params)[0]
    tokens = torch.tensor([*sampled.prompt_token_ids, *sampled.output_token_ids])
    wanted = torch.arange(len(tokens)) >= len(sampled.prompt_token_ids)
    with torch.no_grad():
        scored, _ = trainer.actor.token_logprobs(
            PackedTokens(tokens, torch.arange(len(tokens)), torch.zeros_like(tokens), wanted), temperature=1.0
        )
    assert scored[wanted].tolist() == pytest.approx(after, abs=1e-4), "what the trainer computes with these weights"
    strategy.update_engine_weights(trainer.actor.model)
    trainer.ppo_train()
    assert logprobs() != after


def test_a_prompt_longer_than_those_of_the_run_gets_the_room_that_is_left(trainer: SPMDPPOTrainer) -> None:
    with pytest.raises(OptionsError, match="5 tokens \\+ a response of 6 = 11, the engine holds 10") as caught:
        trainer.strategy.gather_and_generate(["1", "1+1=2"])
    assert caught.value.problem.code == "lightrft.prompt_too_long"
    assert caught.value.problem.do == 'sampling_params={"max_tokens": 5}'
    found = trainer.strategy.gather_and_generate(["1", "1+1=2"], sampling_params={"max_tokens": 5})
    assert max(len(one.output_token_ids) for one in found) <= 5


def test_another_actor_is_refused(trainer: SPMDPPOTrainer) -> None:
    with pytest.raises(OptionsError) as caught:
        trainer.strategy.update_engine_weights(torch.nn.Linear(1, 1))
    assert caught.value.problem.code == "lightrft.other_actor"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({}, "lightrft.prompts"),
        ({"all_prompts": ["1"], "all_prompt_token_ids": [[3]]}, "lightrft.prompts"),
        ({"prompts": ["1"], "sampling_params": {"temprature": 0.0}}, "lightrft.sampling_params"),
        ({"prompts": ["1"], "all_images": ["cat.png"]}, "lightrft.media"),
        ({"prompts": ["1"], "sleep": True}, "lightrft.argument"),
        ({"prompts": ["1", "1+1=2"]}, "lightrft.prompt_too_long"),
        ({"prompts": ["1" * 10], "sampling_params": {"max_tokens": 1}}, "lightrft.prompt_too_long"),
    ],
)
def test_what_cannot_be_generated_is_refused(trainer: SPMDPPOTrainer, arguments: dict[str, Any], code: str) -> None:
    with pytest.raises(OptionsError) as caught:
        trainer.strategy.gather_and_generate(**arguments)
    assert caught.value.problem.code == code
    assert trainer.strategy.gather_and_generate(["1"], all_images=None)
    assert trainer.strategy.gather_and_generate([]) == []
