"""A loop on a tiny model: it goes on from its checkpoint to the bit, samples what was published, refuses mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rft
from rft.custom_loop.open_loop import CustomLoop
from rft_algos.advantages.group_relative import group_norm
from rft_core.errors import CheckpointError, OptionsError, ServiceError
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_model

PROMPTS = ["1+1=", "2+2=", "13+4="]
CONSTANT: dict[str, Any] = {
    "device": "cpu",
    "lr_schedule": "constant",
    "lr_warmup_ratio": 0.0,
    "actor_learning_rate": 0.01,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "ffn": 16, "max_positions": 32}
    folder = tmp_path_factory.mktemp("model") / "model"
    return build_character_model(folder, alphabet="0123456789+=", seed=0, init_std=0.4, **sizes)


@pytest.fixture
def opened(model: Path, request: pytest.FixtureRequest) -> Callable[..., CustomLoop]:
    """Opens loops that are closed at the end of the test."""

    def start(**settings: Any) -> CustomLoop:
        options: dict[str, Any] = {**CONSTANT, "generate_max_len": 5, **settings}
        loop = rft.open_loop(model, **options)
        request.addfinalizer(loop.close)
        return loop

    return start


def weights(loop: CustomLoop) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in loop.policy.model.named_parameters()}


def take_step(loop: CustomLoop) -> None:
    sampled = loop.policy.sample(PROMPTS, n=4)
    rewards = torch.tensor([float(len(set(one.response_text))) for one in sampled.completions], dtype=torch.float64)
    loop.trainer.forward_backward(sampled.batch(group_norm(rewards, sampled.group_ids)), rft.objective("gspo"))
    loop.trainer.step()
    loop.trainer.publish()


@pytest.mark.parametrize("more", [{}, {"lora_rank": 2}, {"enable_ema": True, "lr_schedule": "cosine", "max_steps": 4}])
def test_a_loop_goes_on_from_its_checkpoint_to_the_bit(
    more: dict[str, Any], opened: Callable[..., CustomLoop], tmp_path: Path
) -> None:
    whole = opened(**more)
    for _ in range(4):
        take_step(whole)
    expected = weights(whole)
    whole.close()
    first = opened(**more)
    for _ in range(2):
        take_step(first)
    assert first.trainer.save(tmp_path) == tmp_path / "step_000002"
    first.close()
    second = opened(**more, checkpoint=tmp_path)
    assert second.trainer.updates == 2
    for _ in range(2):
        take_step(second)
    found = weights(second)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_a_checkpoint_is_a_hugging_face_directory_of_the_weights(
    opened: Callable[..., CustomLoop], tmp_path: Path
) -> None:
    loop = opened()
    take_step(loop)
    saved = load_policy(loop.trainer.save(tmp_path / "new") / "model")
    assert all(torch.equal(value, weights(loop)[name]) for name, value in saved.model.named_parameters())


def test_samples_are_those_of_the_published_weights_and_of_their_prompts_numbers(
    opened: Callable[..., CustomLoop],
) -> None:
    loop = opened()
    first = loop.policy.sample(PROMPTS, n=2)
    assert [one.weight_version for one in first.completions] == [0] * 6
    again = loop.policy.sample(PROMPTS, n=2)
    assert again.texts != first.texts, "a later call draws others"
    loop.close()
    apart = opened()
    assert [apart.policy.sample([prompt], n=2).texts[0] for prompt in PROMPTS] == first.texts
    batch = first.batch([1.0] * 6)
    logprobs = apart.policy.logprobs(batch)
    drawn = [torch.tensor(one.behaviour_logprobs) for one in first.completions]
    torch.testing.assert_close(torch.cat(batch.rows(logprobs)), torch.cat(drawn), rtol=0, atol=1e-5)
    apart.trainer.forward_backward(batch, rft.objective("gspo"))
    apart.trainer.step()
    with pytest.raises(ServiceError) as caught:
        apart.policy.sample(PROMPTS)
    assert caught.value.problem.code == "policy.not_published"
    apart.trainer.publish()
    assert apart.policy.sample(PROMPTS).completions[0].weight_version == 1


def test_log_probs_and_entropies_are_those_of_the_model(opened: Callable[..., CustomLoop], model: Path) -> None:
    loop = opened(reference=True, micro_rollout_batch_size=2)
    batch = loop.policy.demonstrations([("1+1=", "2"), ("13+4=", "17"), ([3, 4], "5")])
    assert [one.prompt_length for one in batch] == [4, 5, 2]
    assert batch.temperature == 1.0
    plain = load_policy(model).model
    expected, entropies = [], []
    for one in batch:
        logits = plain(torch.tensor([one.token_ids])).logits[0].log_softmax(-1).detach()
        rows = logits[one.prompt_length - 1 : -1]
        expected.append(rows.gather(-1, torch.tensor(one.token_ids[one.prompt_length :])[:, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1))
    for found, wanted in ((loop.policy.logprobs, expected), (loop.policy.entropies, entropies)):
        torch.testing.assert_close(torch.cat(batch.rows(found(batch))), torch.cat(wanted), rtol=0, atol=1e-5)
    loop.trainer.forward_backward(batch, rft.objective("sft"))
    loop.trainer.step()
    reference = torch.cat(batch.rows(loop.policy.reference_logprobs(batch)))
    torch.testing.assert_close(reference, torch.cat(expected), rtol=0, atol=1e-5)
    assert not torch.allclose(torch.cat(batch.rows(loop.policy.logprobs(batch))), reference, atol=1e-3)


@pytest.mark.parametrize(
    ("mistake", "code"),
    [
        (lambda loop: loop.policy.sample([]), "policy.nothing_to_sample"),
        (lambda loop: loop.policy.sample(PROMPTS, n=0), "policy.nothing_to_sample"),
        (lambda loop: loop.policy.sample(PROMPTS, temperature=-1.0), "engine.sampling_option"),
        (lambda loop: loop.policy.sample([[{"role": "user"}]]), "policy.message"),
        (lambda loop: loop.policy.reference_logprobs(loop.policy.pairs([("1", "2", "3")])), "policy.no_reference"),
        (lambda loop: loop.policy.demonstrations([]), "policy.no_rows"),
        (lambda loop: loop.policy.pairs([]), "policy.no_rows"),
        # what Python takes for a row: the letters of a text, the keys of a dict
        (lambda loop: loop.policy.sample("1+1="), "policy.one_text"),
        (lambda loop: loop.policy.demonstrations([{"input": "1+1=", "output": "2"}]), "policy.row"),
        (lambda loop: loop.policy.demonstrations([("1+1=",)]), "policy.row"),
        (lambda loop: loop.policy.demonstrations(["12"]), "policy.row"),
        (lambda loop: loop.policy.pairs([{"prompt": "1", "chosen": "2", "rejected": "3"}]), "policy.row"),
        (lambda loop: loop.policy.pairs([("1", "2")]), "policy.row"),
    ],
)
def test_a_mistake_is_refused_by_name(
    mistake: Callable[[CustomLoop], object], code: str, opened: Callable[..., CustomLoop]
) -> None:
    with pytest.raises(OptionsError) as caught:
        mistake(opened())
    assert caught.value.problem.code == code


@pytest.mark.parametrize(
    ("rows", "do"),
    [
        ([{"input": "1+1=", "output": "2"}], "policy.demonstrations([(row['input'], row['output']) for row in rows])"),
        (
            [{"response": "2", "prompt": "1+1="}],
            "policy.demonstrations([(row['prompt'], row['response']) for row in rows])",
        ),
        ([{"a": "1+1=", "b": "2"}], "policy.demonstrations([(prompt, response)])"),
    ],
)
def test_rows_that_are_dicts_are_answered_with_their_columns(
    rows: list[Any], do: str, opened: Callable[..., CustomLoop]
) -> None:
    policy = opened().policy
    with pytest.raises(OptionsError) as caught:
        policy.demonstrations(rows)
    assert caught.value.problem.do == do


def test_completions_in_the_place_of_a_batch_are_answered_with_the_call_that_makes_one(
    opened: Callable[..., CustomLoop],
) -> None:
    loop = opened()
    for given, do in (
        (loop.policy.sample(["1+1="]), "trainer.forward_backward(sampled.batch(advantages), loss)"),
        ([1.0], "trainer.forward_backward(policy.demonstrations([(prompt, response)]), loss)"),
    ):
        no_batch: Any = given
        with pytest.raises(OptionsError) as caught:
            loop.trainer.forward_backward(no_batch, rft.objective("sft"))
        assert caught.value.problem.do == do


def test_the_name_of_a_loss_is_answered_with_the_loss(opened: Callable[..., CustomLoop]) -> None:
    loop = opened()
    name: Any = "grpo"
    with pytest.raises(OptionsError) as caught:
        loop.trainer.forward_backward(loop.policy.demonstrations([("1+1=", "2")]), name)
    assert caught.value.problem.do == "rft.objective('grpo')"
    with pytest.raises(OptionsError) as caught:
        rft.objective("gpro")
    assert (caught.value.problem.where, caught.value.problem.do) == ("rft.objective", 'rft.objective("grpo")')
    with pytest.raises(OptionsError) as caught:
        rft.objective("qwertz")
    assert caught.value.problem.do == "rft.objective with one of these names"


def test_a_loss_without_its_log_probs_is_answered_with_the_call_that_adds_them(
    opened: Callable[..., CustomLoop],
) -> None:
    loop = opened(reference=True)
    batch = loop.policy.demonstrations([("1+1=", "2")]).with_advantages([1.0])
    for added in ("old=policy.logprobs(batch)", "reference=policy.reference_logprobs(batch)"):
        with pytest.raises(OptionsError) as caught:
            loop.trainer.forward_backward(batch, rft.objective("grpo"))
        assert caught.value.problem.do == f"batch = batch.with_logprobs({added})"
        found = loop.policy.logprobs(batch)
        batch = batch.with_logprobs(**{added.partition("=")[0]: found})
    loop.trainer.forward_backward(batch, rft.objective("grpo"))
    assert loop.trainer.step().applied


def test_a_schedule_without_an_end_is_refused(opened: Callable[..., CustomLoop]) -> None:
    for settings in ({"lr_schedule": "cosine"}, {"lr_warmup_ratio": 0.1}):
        with pytest.raises(OptionsError) as caught:
            opened(**settings)
        assert caught.value.problem.code == "loop.schedule_without_end"
    assert opened(lr_schedule="cosine", lr_warmup_ratio=0.5, max_steps=4).trainer.updates == 0


def test_a_warm_up_counted_in_steps_needs_no_end(opened: Callable[..., CustomLoop]) -> None:
    assert opened(lr_warmup_ratio=0.03, lr_warmup_steps=3).trainer.updates == 0


def test_a_checkpoint_that_is_not_there_is_refused(opened: Callable[..., CustomLoop], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        opened(checkpoint=tmp_path)
