"""Parts that an algorithm needs: its shaping of rewards, controllers, scorers and critic, from the settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.build import algorithm_parts
from rft.settings import RlSettings
from rft_core.errors import OptionsError
from rft_models.settings import ModelSettings
from rft_trainer.scoring.advantages import RewardShapingConfig
from rft_trainer.settings.algorithm import AlgorithmSettings
from rft_trainer.settings.rewards import RlRewardSettings

PLAIN = RlSettings(model=ModelSettings(pretrain="m", device="cpu"))


def with_algorithm(**chosen: Any) -> RlSettings:
    return replace(PLAIN, algorithm=AlgorithmSettings(**chosen))


@pytest.mark.parametrize(
    ("chosen", "share", "changes"),
    [
        ({}, 0.0, {}),
        ({"overlong_buffer_len": 7}, 0.0, {}),
        ({}, 0.25, {"overlong_buffer": 25}),
        ({}, 0.001, {"overlong_buffer": 1}),
        ({"overlong_buffer_len": 100, "overlong_buffer_penalty_factor": 0.5}, 0.25, {"overlong_buffer": 100}),
        ({"length_penalty": True}, 0.0, {"length_penalty": True}),
        ({"mask_truncated_completions": True}, 0.0, {"mask_truncated": True}),
        ({"reward_running_norm": True}, 0.0, {"running_norm": True}),
        ({"reward_running_norm_minus_mean": True}, 0.0, {"running_norm": True, "minus_mean": True}),
        ({"reward_clip": 3.0}, 0.0, {"clip": 3.0}),
    ],
)
def test_rewards_are_shaped_as_the_settings_say(chosen: dict[str, Any], share: float, changes: dict[str, Any]) -> None:
    settings, record = with_algorithm(**chosen), SimpleNamespace(overlong_buffer_share=share)
    factor = settings.algorithm.overlong_buffer_penalty_factor
    expected = replace(RewardShapingConfig(longest_response=100, overlong_factor=factor), **changes)
    assert algorithm_parts.score_rules(settings, record, 100) == expected  # type: ignore[arg-type]


def test_the_weights_of_parts_belong_to_the_shaping() -> None:
    settings = replace(PLAIN, reward=RlRewardSettings(reward_weights="a=2"))
    record: Any = SimpleNamespace(overlong_buffer_share=0.0)
    assert algorithm_parts.score_rules(settings, record, 9).component_weights == {"a": 2.0}


@pytest.mark.parametrize(("longest", "do"), [(50, "10"), (4, "1")])
def test_a_penalty_over_more_than_the_longest_response_is_refused(longest: int, do: str) -> None:
    record: Any = SimpleNamespace(overlong_buffer_share=0.2)
    settings = with_algorithm(overlong_buffer_len=longest + 1)
    with pytest.raises(OptionsError) as caught:
        algorithm_parts.score_rules(settings, record, longest)
    assert caught.value.problem.code == "reward.overlong_buffer"
    assert caught.value.problem.do == f"--overlong_buffer_len {do}"


@pytest.mark.parametrize(
    ("chosen", "drift", "kl", "entropy"),
    [
        ({}, 0.0, None, None),
        ({"kl_target": 6.0, "kl_horizon": 50}, 0.0, (0.3, 6.0, 50), None),
        ({"kl_target": 6.0, "kl_horizon": 50}, 0.2, (0.2, 6.0, 50), None),
        ({"entropy_target": 1.5}, 0.0, None, (0.01, 1.5)),
        ({"kl_target": 0.0, "entropy_target": 0.0, "kl_horizon": 5}, 0.0, (0.3, 0.0, 5), (0.01, 0.0)),
    ],
)
def test_a_target_has_a_controller_of_the_term_that_is_there(
    calls: Any, chosen: dict[str, Any], drift: float, kl: Any, entropy: Any
) -> None:
    calls.put(algorithm_parts, "AdvantageEstimator AdaptiveKl EntropyTarget", score_rules="rules")
    record = calls.double("record", drift_coef=drift, kl_coef=0.3, entropy_coef=0.01)
    settings = replace(with_algorithm(**chosen), run=replace(PLAIN.run, seed=5))
    algorithm_parts.credit_assigner(settings, record, 20, "own")  # type: ignore[arg-type]
    made = calls.taken()
    expected = []
    if kl:
        expected.append(f"AdaptiveKl(coefficient={kl[0]}, horizon={kl[2]}, target={kl[1]})")
    if entropy:
        expected.append(f"EntropyTarget(coefficient={entropy[0]}, target={entropy[1]})")
    assert made == [
        *expected,
        f"score_rules({settings!r}, record, 20)",
        "AdvantageEstimator(record, 'rules', compute_advantages='own', "
        f"entropy_controller={'EntropyTarget()' if entropy else None}, "
        f"kl_controller={'AdaptiveKl()' if kl else None}, seed=5, teacher_coef=1.0)",
    ]


ANNOTATOR = (
    "LogprobScorer(policy, {}, collective_forward={}, device=machine.device, "
    "max_sequences=settings.batch.micro_rollout_batch_size, max_tokens=settings.batch.max_tokens_per_micro_batch, "
    "temperature=settings.sampling.temperature)"
)


def test_log_probabilities_are_shared_out_among_the_ranks_that_are_given(calls: Any) -> None:
    calls.put(algorithm_parts, "LogprobScorer")
    settings, machine, policy = (calls.double(name) for name in ("settings", "machine", "policy"))
    algorithm_parts.annotator(settings, machine, policy)
    algorithm_parts.annotator(settings, machine, policy, calls.double("ranks"), collective_forward=True)
    assert calls.taken() == [ANNOTATOR.format("machine.collectives", False), ANNOTATOR.format("ranks", True)]


@pytest.mark.parametrize(("logprobs", "entropy"), [(True, False), (False, True), (True, True), (False, False)])
def test_the_policy_of_the_start_of_a_step_scores_what_the_algorithm_needs(
    calls: Any, logprobs: bool, entropy: bool
) -> None:
    calls.put(algorithm_parts, "LogprobScorer OldPolicyScorer")
    record = calls.double("record", needs_old_logprobs=logprobs, needs_old_entropy=entropy)
    settings, machine, policy, ranks = (calls.double(name) for name in ("settings", "machine", "policy", "ranks"))
    parallel: Any = SimpleNamespace(data=ranks, collective_forward=True)
    found = algorithm_parts.old_policy(settings, record, machine, policy, parallel)
    if not (logprobs or entropy):
        assert found is None
        assert calls.taken() == []
        return
    assert calls.taken() == [
        ANNOTATOR.format("ranks", True),
        f"OldPolicyScorer(LogprobScorer(), {logprobs}, {entropy})",
    ]


class Model:
    """A model with one tensor, whose snapshot copies it when it is asked for."""

    def __init__(self, name: str, value: float, saved: list[Any]) -> None:
        self.name, self.tensor, self._saved = name, torch.tensor([value]), saved

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [("w", self.tensor)]

    def save_pretrained(self, directory: Path) -> None:
        self._saved.append((self.name, directory))

    def snapshot(self, copy: Any) -> Any:
        kept = copy("w", self.tensor)
        return lambda directory: self._saved.append((self.name, directory, float(kept)))

    def token_logprobs(self, tokens: Any, **options: Any) -> Any:
        return self.name, tokens, options


def test_a_critic_stands_below_the_policy_in_a_model_directory() -> None:
    saved: list[Any] = []
    policy, critic = Model("policy", 1.0, saved), Model("critic", 2.0, saved)
    both: Any = algorithm_parts.PolicyWithCritic(policy, critic)  # type: ignore[arg-type]
    both.save_pretrained(Path("dir"))
    assert saved == [("policy", Path("dir")), ("critic", Path("dir/critic"))]
    saved.clear()
    copies: dict[str, torch.Tensor] = {}
    write = both.snapshot(lambda name, tensor: copies.setdefault(name, tensor.clone()))
    policy.tensor += 10.0
    write(Path("dir"))
    assert saved == [("policy", Path("dir"), 1.0), ("critic", Path("dir/critic"), 2.0)]
    assert set(copies) == {"w", "critic/w"}
    assert [name for name, _ in both.named_parameters()] == ["w", "critic.w"]
    assert both.token_logprobs("tokens", temperature=2.0) == ("policy", "tokens", {"temperature": 2.0})


def critic_of(calls: Any, *, own: str, restored: Any, bf16: bool, clip: float) -> tuple[Any, list[str]]:
    critic = calls.double("critic")
    parallel = calls.double("parallel", model=calls.double("model"))
    loaded = calls.double("loaded", train=calls.double("train", returns=critic))
    strategy = calls.double("strategy", critic=calls.double("for_critics", returns="strategy of critics"))
    calls.put(
        algorithm_parts,
        "adapt_critic checkpointing_of ShardedWeights ShardableCritic ValueAnnotator ValueLoss Updater "
        "ValueObjective "
        "make_tracer",
        load_critic=loaded,
        choose_strategy=strategy,
        parallelize=parallel,
    )
    calls.replace(algorithm_parts, CriticTrainer=lambda *parts: parts)
    settings = calls.double(
        "settings",
        critic=calls.double("chosen", critic_pretrain=own, value_clip=clip),
        model=calls.double("weights", bf16=bf16),
    )
    record = SimpleNamespace(advantage=SimpleNamespace(needs_values=True))
    arguments = [calls.double(name) for name in ("tokenizer", "micro_batching", "learning_rate")]
    built = algorithm_parts.build_critic(
        settings,
        calls.double("machine"),
        record,  # type: ignore[arg-type]
        arguments[0],
        restored,
        *arguments[1:],
        {"critic": "guard"},  # type: ignore[dict-item]
    )
    return built, calls.taken()


@pytest.mark.parametrize(("own", "bf16", "clip"), [("", False, 0.0), ("critic_dir", True, 0.25)])
def test_a_critic_is_loaded_adapted_distributed_and_trained_with_its_settings(
    calls: Any, own: str, bf16: bool, clip: float
) -> None:
    built, made = critic_of(calls, own=own, restored=None, bf16=bf16, clip=clip)
    source = repr(own) if own else "weights.pretrain"
    assert made == [
        "checkpointing_of(weights)",
        f"load_critic({source}, device=machine.device, dtype=torch.{'bfloat16' if bf16 else 'float32'}, "
        "flash_attn=weights.flash_attn, gradient_checkpointing=checkpointing_of(), "
        f"head_prefix=chosen.value_head_prefix, seed=settings.run.seed, tokenizer={None if own else 'tokenizer'})",
        "train()",
        "adapt_critic(critic, settings.adapter, seed=settings.run.seed)",
        "choose_strategy(settings.strategy)",
        "for_critics(settings.strategy)",
        "ShardableCritic(critic)",
        "parallelize(ShardableCritic(), 'strategy of critics', settings.optimizer, machine, None, "
        "component='critic_optimizer')",
        "ValueAnnotator(model, machine.collectives, collective_forward=parallel.collective_forward, "
        "device=machine.device, max_sequences=settings.batch.micro_rollout_batch_size, "
        "max_tokens=settings.batch.max_tokens_per_micro_batch)",
        f"ValueObjective(aggregation='token_mean', clip={clip or None})",
        "ValueLoss(model, ValueObjective())",
        "make_tracer(parallel, machine)",
        "Updater(ValueLoss(), parallel.optimizer, machine.collectives, "
        "collective_forward=parallel.collective_forward, device=machine.device, guard='guard', "
        "learning_rate=learning_rate, micro_batching=micro_batching, "
        "pin_memory=settings.data.dataloader_pin_memory, sample=parallel.sample, trace=make_tracer())",
    ]
    assert (built.critic, built.parallel) == ("critic", "parallel")
    assert built.part == ("ValueAnnotator()", "Updater()")
    assert built.tensor_parts == {"critic": "parallel.weights", "critic_optimizer": "parallel.optimizer"}


def test_a_critic_that_continues_reads_its_weights_before_it_is_distributed(calls: Any) -> None:
    _, made = critic_of(calls, own="", restored=calls.double("restored"), bf16=False, clip=0.0)
    order = [
        "adapt_critic(critic, settings.adapter, seed=settings.run.seed)",
        "ShardedWeights(critic.named_parameters, machine.ranks.rank)",
        "restored.checkpoint.load('critic', ShardedWeights())",
        "parallelize(ShardableCritic(), 'strategy of critics', settings.optimizer, machine, restored, "
        "component='critic_optimizer')",
    ]
    assert [call for call in made if call in order] == order


def test_without_values_there_is_no_critic(calls: Any) -> None:
    record: Any = SimpleNamespace(advantage=SimpleNamespace(needs_values=False))
    settings, rest = calls.double("settings"), calls.double("rest")
    assert algorithm_parts.build_critic(settings, rest, record, rest, None, rest, rest, rest) is None
