"""Mistakes that trainers have made where engine and trainer meet, by the number of the list they are kept in."""

from __future__ import annotations

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.native.engine import NativeEngine
from rft_models.decode.fast_decoder import decoder_for
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_model
from rft_trainer.batches.packing import pack
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.scoring.samples import build_samples


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> CausalPolicy:
    path = tmp_path_factory.mktemp("model") / "model"
    build_character_model(path, hidden=32, layers=1, heads=2, ffn=64, seed=3, init_std=0.3)
    return load_policy(path)


def sampled(policy: CausalPolicy, temperature: float, top_p: float = 1.0) -> list[RolloutGroup]:
    """Two prompts of different lengths with three rollouts each."""
    prompts = [Prompt(f"p{i}", ids, "", None, "p") for i, ids in enumerate([(3, 4, 5), (6, 7, 8, 9, 3)])]
    engine = NativeEngine(decoder_for(policy), max_rows=6, max_len=32)
    completions = engine.generate(
        [p.token_ids for p in prompts],
        [[1, 2, 3], [4, 5, 6]],
        SamplingOptions(temperature=temperature, top_p=top_p, max_new_tokens=12),
    )
    return [
        RolloutGroup(
            prompt,
            0,
            place,
            tuple(
                Rollout(
                    prompt.prompt_id,
                    i,
                    c.token_ids,
                    c.logprobs,
                    c.log_kept_mass,
                    c.finish_reason,
                    0,
                    "",
                    0.0,
                    RewardStatus.OK,
                )
                for i, c in enumerate(group)
            ),
        )
        for place, (prompt, group) in enumerate(zip(prompts, completions, strict=True))
    ]


def trained(policy: CausalPolicy, groups: list[RolloutGroup], temperature: float) -> torch.Tensor:
    """The trainer's log-probs of the sampled tokens."""
    rows = [rollout.behaviour_logprobs for group in groups for rollout in group.rollouts]
    batch = pack(build_samples(groups, [0.0] * len(rows), rows, []))
    with torch.no_grad():
        logprobs_T, _ = policy.token_logprobs(
            batch.tokens,
            temperature=temperature,
        )
    return logprobs_T[batch.loss_mask_T]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_pitfall_16_engine_and_trainer_divide_by_the_temperature_before_the_softmax(
    policy: CausalPolicy, temperature: float, top_p: float
) -> None:
    groups = sampled(policy, temperature, top_p)
    recorded = torch.tensor([x for group in groups for rollout in group.rollouts for x in rollout.behaviour_logprobs])
    torch.testing.assert_close(trained(policy, groups, temperature), recorded, rtol=0, atol=1e-4)
    assert float((trained(policy, groups, 2 * temperature) - recorded).abs().max()) > 0.1


def test_pitfall_16_what_a_nucleus_took_away_is_recorded_beside_the_whole_distribution(policy: CausalPolicy) -> None:
    groups = sampled(policy, 1.0, top_p=0.6)
    masses = [x for group in groups for rollout in group.rollouts for x in rollout.log_kept_mass]
    assert all(-0.6 < mass <= 0.0 for mass in masses), "at least 0.6 of the mass is kept"
    assert min(masses) < -0.01


def test_pitfall_20_advantages_belong_to_sampled_ids_never_to_text_that_is_encoded_again(policy: CausalPolicy) -> None:
    groups = sampled(policy, 1.5)
    rows = [rollout.behaviour_logprobs for group in groups for rollout in group.rollouts]
    batch = pack(build_samples(groups, [float(i) for i in range(len(rows))], rows, []))
    expected = [t for group in groups for rollout in group.rollouts for t in rollout.completion_ids]
    assert batch.token_ids_T[batch.loss_mask_T].tolist() == expected
    lengths = [len(rollout.completion_ids) for group in groups for rollout in group.rollouts]
    wanted = [float(i) for i, length in enumerate(lengths) for _ in range(length)]
    assert batch.advantages_T[batch.loss_mask_T].tolist() == wanted
