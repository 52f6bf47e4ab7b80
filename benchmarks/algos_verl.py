"""The cases of `algos.py` against verl: `verl.trainer.ppo.core_algos` and `rollout_corr_helper`, called as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import algos_verl_losses
import torch
from algos_sides import WEIGHTS, Batch, Case, Results
from torch import Tensor
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional

from rft_algos import advantages
from rft_algos.algorithms import components
from rft_algos.losses import kl, off_policy
from rft_algos.objectives.policy_loss import total_and_count
from rft_algos.rewards import kl_penalty

PEER = "verl"
PACKAGES = ("verl", "torch", "tensordict", "numpy")


def cases(batch: Batch) -> Iterator[Case]:
    """All cases, one at a time, so that each lets go of its tensors."""
    yield from _advantages(batch)
    yield from _over_time(batch)
    if batch.suffix:
        yield from algos_verl_losses.cases(batch)
        return
    yield _token_rewards(batch)
    yield from _corrections(batch)
    yield from algos_verl_losses.cases(batch)


# advantages


def _whitened(batch: Batch, values_T: Tensor) -> Tensor:
    return advantages.whiten(values_T, batch.mask_T, advantages.moments(values_T, batch.mask_T))


def _advantages(batch: Batch) -> Iterator[Case]:
    rewards_N, groups_N, ids_T = batch.rewards_N, batch.group_ids_N, batch.segment_ids_T

    def outcome(
        name: str, peer_name: str, choice: components.Advantage, bare_N: Callable[[], Tensor], **options: Any
    ) -> Case:
        whitens = options.pop("whitens", False)
        options |= {} if "reward_baselines" in options else {"index": batch.index_N}
        inputs = {"token_level_rewards": batch.rewards_BT, "response_mask": batch.mask_BT} | options

        def bare() -> Results:
            spread_T = bare_N().index_select(0, ids_T)
            return (_whitened(batch, spread_T) if whitens else spread_T,)

        return Case(
            name=name + batch.suffix,
            peer_name=peer_name,
            ours=batch.credited(choice, normalise=whitens),
            peer=lambda: (core_algos.ADV_ESTIMATOR_REGISTRY[peer_name](**inputs)[0], None),
            bare=bare,
            bytes_per_token=4,
        )

    grouped = (
        ("group_norm", "grpo", components.GroupNorm(), advantages.group_norm, {}),
        ("group_norm", "grpo_vectorized", components.GroupNorm(), advantages.group_norm, {}),
        (
            "group_centred",
            "grpo",
            components.GroupCentred(),
            advantages.group_centred,
            {"norm_adv_by_std_in_grpo": False},
        ),
        ("leave_one_out", "rloo", components.LeaveOneOut(), advantages.leave_one_out, {}),
        ("leave_one_out", "rloo_vectorized", components.LeaveOneOut(), advantages.leave_one_out, {}),
        ("gpg", "gpg", components.Gpg(), advantages.gpg, {}),
        ("best_of_group", "grpo_passk", components.BestOfGroup(), advantages.best_of_group, {"config": {}}),
        (
            "group_centred, whitened",
            "reinforce_plus_plus_baseline",
            components.GroupCentred(),
            advantages.group_centred,
            {"whitens": True},
        ),
    )
    for name, peer_name, choice, function, options in grouped:
        yield outcome(name, peer_name, choice, lambda f=function: f(rewards_N, groups_N), **options)
        if batch.suffix:
            return
    lengths_N = batch.lengths_N
    yield outcome("opo", "opo", components.Opo(), lambda: advantages.opo(rewards_N, groups_N, lengths_N))
    greedy_N = batch.greedy_rewards_N
    yield outcome(
        "remax", "remax", components.ReMax(), lambda: advantages.remax(rewards_N, greedy_N), reward_baselines=greedy_N
    )
    parts_NK, weights_K = batch.components_NK, torch.tensor(WEIGHTS)
    columns = [f"part_{k}" for k in range(len(WEIGHTS))]
    yield outcome(
        "gdpo, whitened",
        "gdpo",
        components.Gdpo(over_batch=False),
        lambda: advantages.gdpo(parts_NK, groups_N, weights_K),
        whitens=True,
        config={"gdpo_reward_keys": columns, "gdpo_reward_weights": WEIGHTS},
        non_tensor_batch={name: parts_NK[:, k].numpy() for k, name in enumerate(columns)},
        batch={
            "prompts": torch.zeros(batch.num_sequences, 1),
            "attention_mask": torch.cat([batch.mask_BT[:, :1], batch.mask_BT], 1).long(),
        },
    )


def _over_time(batch: Batch) -> Iterator[Case]:
    mask_T, ids_T, mask_BT, rewards_BT = batch.mask_T, batch.segment_ids_T, batch.mask_BT, batch.rewards_BT
    token_rewards_T, values_BT = batch.packed(rewards_BT), batch.padded(batch.old_values_T)

    def gae() -> Results:
        advantages_T, returns_T = advantages.gae(token_rewards_T, batch.old_values_T, mask_T, ids_T)
        return _whitened(batch, advantages_T), returns_T

    yield Case(
        name=f"gae, whitened{batch.suffix}",
        peer_name="gae",
        ours=batch.credited(components.Gae(), normalise=True),
        bare=gae,
        peer=lambda: core_algos.compute_gae_advantage_return(rewards_BT, values_BT, mask_BT, 1.0, 0.95),
        bytes_per_token=4 + 4 + 4,
    )
    if batch.suffix:
        return

    def returns() -> Results:
        returns_T = advantages.discounted_returns(token_rewards_T, mask_T, ids_T)
        return _whitened(batch, returns_T), returns_T

    yield Case(
        name="reinforce, whitened",
        peer_name="reinforce_plus_plus",
        ours=lambda: (*batch.credited(components.Returns(), normalise=True)()[:1], None),
        bare=returns,
        peer=lambda: core_algos.compute_reinforce_plus_plus_outcome_advantage(
            rewards_BT, mask_BT, config=SimpleNamespace(gamma=1.0)
        ),
        bytes_per_token=4,
    )
    advantages_BT = batch.padded(batch.advantages_T)
    yield Case(
        name="moments, whiten",
        peer_name="masked_whiten",
        ours=lambda: (_whitened(batch, batch.advantages_T),),
        peer=lambda: (torch_functional.masked_whiten(advantages_BT, mask_BT),),
        bytes_per_token=4 + 4,
    )


# corrections and rewards


def _corrections(batch: Batch) -> Iterator[Case]:
    old_T, behaviour_T, mask_T, ids_T = (
        batch.old_logprobs_T,
        batch.behaviour_logprobs_T,
        batch.mask_T,
        batch.segment_ids_T,
    )
    old_BT, behaviour_BT = batch.padded(old_T), batch.padded(behaviour_T)
    c, k = off_policy, 0.9998
    tokens, sequences = {"rollout_is": "token"}, {"rollout_is": "sequence"}
    geometric = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": f"{k}_{1 / k}"}
    listed: tuple[tuple[str, Callable[[Tensor], Tensor], dict[str, Any]], ...] = (
        ("truncate_tokens", lambda x: c.truncate_tokens(x, 1.02), tokens | {"rollout_is_threshold": 1.02}),
        ("truncate_sequences", lambda x: c.truncate_sequences(x, mask_T, ids_T), sequences),
        ("mask_tokens", lambda x: c.mask_tokens(x, 0.98, 1.02), tokens | {"rollout_is_threshold": "0.98_1.02"}),
        (
            "mask_sequences",
            lambda x: c.mask_sequences(x, mask_T, ids_T, 0.5, 2.0),
            sequences | {"rollout_is_threshold": "0.5_2.0"},
        ),
        (
            "mask_sequences_geometric",
            lambda x: c.mask_sequences_geometric(x, mask_T, ids_T, k, 1 / k),
            geometric,
        ),
    )

    def ours(equation: Callable[[Tensor], Tensor]) -> Results:
        weights_T = equation(old_T - behaviour_T)
        off_policy.mismatch_metrics(old_T, behaviour_T, mask_T, ids_T)
        off_policy.mismatch_maxima(old_T, behaviour_T, mask_T)
        total_and_count(weights_T, mask_T)
        total_and_count(weights_T == 0, mask_T)
        return (weights_T,)

    def peer(options: dict[str, Any]) -> Results:
        proto, kept_BT, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            old_BT, behaviour_BT, batch.mask_BT, **options
        )
        return (kept_BT if proto is None else proto.batch["rollout_is_weights"],)

    for name, equation, options in listed:
        yield Case(
            name=name,
            peer_name=f"rollout correction {next(iter(options.values()))}",
            ours=lambda e=equation: ours(e),
            bare=lambda e=equation: (e(old_T - behaviour_T),),
            peer=lambda o={"rollout_is": None, **options}: peer(o),
            bytes_per_token=4 * 3,
        )


def _token_rewards(batch: Batch) -> Case:
    old_T, reference_T = batch.old_logprobs_T, batch.reference_logprobs_T
    old_BT, reference_BT = batch.padded(old_T), batch.padded(reference_T)
    mask_T, ids_T = batch.mask_T, batch.segment_ids_T
    return Case(
        name="k1, token_rewards",
        peer_name="compute_rewards",
        ours=lambda: (
            kl_penalty.token_rewards(batch.rewards_N, kl.k1(old_T - reference_T), mask_T, ids_T, coefficient=0.05),
        ),
        peer=lambda: (core_algos.compute_rewards(batch.rewards_BT, old_BT, reference_BT, 0.05),),
        bytes_per_token=4 * 3,
    )
