"""Equations under the names that people look for; `rft_algos` itself gives them, imported at the first use.

An alias is the function itself, so `help` shows where it stands. Where two rooms have a function of one name (cpgd,
reinforce), the surrogate has it here; the advantage of REINFORCE is `discounted_returns`.
"""

from rft_algos.advantages import (
    batch_std,
    best_of_group,
    decoupled_gae,
    discounted_returns,
    gae,
    gdpo,
    gpg,
    group_centred,
    group_norm,
    leave_one_out,
    length_adaptive_lambda,
    max_rl,
    opo,
    pass_at_k,
    process_group_norm,
    remax,
    turn_level,
    whiten,
)
from rft_algos.algorithms.published import (
    Dapo,
    DecoupledPpo,
    DrGrpo,
    Grpo,
    PolicyAlgorithm,
    Ppo,
    ReinforceBaseline,
    ReinforcePlusPlus,
    Rloo,
    by_name,
)
from rft_algos.input_checks import InputError
from rft_algos.losses.aggregation import (
    fixed_length,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
    weighted_sum,
)
from rft_algos.losses.distillation import forward_kl, jensen_shannon, reverse_kl, reverse_kl_reward, top_k_forward_kl
from rft_algos.losses.kl import absolute, k1, k2, k3, straight_through, unbiased_k3
from rft_algos.losses.logits import entropy_from_logits, logprobs_from_logits
from rft_algos.losses.off_policy import (
    mask_sequences,
    mask_sequences_geometric,
    mask_tokens,
    off_policy_sequence_mask,
    truncate_sequences,
    truncate_tokens,
    veto_outliers,
)
from rft_algos.losses.preference import bradley_terry, dpo, ipo, kto, orpo, simpo
from rft_algos.losses.value import clipped_value_loss, squared_value_loss
from rft_algos.objectives import (
    AdvantageOutput,
    LossOutput,
    PaddedBatch,
    RolloutBatch,
    compute_advantages,
    padded_loss,
    policy_loss,
    supervised_loss,
)
from rft_algos.objectives.named_losses import (
    cispo_loss,
    dapo_loss,
    dr_grpo_loss,
    gmpo_loss,
    grpo_loss,
    gspo_loss,
    reinforce_loss,
    sapo_loss,
)
from rft_algos.packed.importance_ratio import log_ratio, ratio
from rft_algos.packed.padded_rows import PaddedRows
from rft_algos.packed.token_selection import high_entropy_tokens
from rft_algos.surrogates import (
    cispo,
    clip_cov,
    cpgd,
    decoupled_ppo,
    dppo_kl,
    dppo_tv,
    dro,
    dual_clip,
    gmpo,
    gspo,
    gspo_token,
    importance_weighted,
    kl_cov,
    ppo_clip,
    reinforce,
    sapo,
    two_sided,
)

# advantages
grpo = group_norm
dr_grpo = group_centred
rloo = leave_one_out
lite_ppo = batch_std
maxrl = max_rl
# corrections
tis = truncate_tokens
seq_tis = truncate_sequences
mis = icepop = mask_tokens
seq_mis = mask_sequences
geo_mis = mask_sequences_geometric
# likelihoods
selective_log_softmax = logprobs_from_logits

__all__ = [
    "AdvantageOutput",
    "Dapo",
    "DecoupledPpo",
    "DrGrpo",
    "Grpo",
    "InputError",
    "LossOutput",
    "PaddedBatch",
    "PaddedRows",
    "PolicyAlgorithm",
    "Ppo",
    "ReinforceBaseline",
    "ReinforcePlusPlus",
    "Rloo",
    "RolloutBatch",
    "absolute",
    "batch_std",
    "best_of_group",
    "bradley_terry",
    "by_name",
    "cispo",
    "cispo_loss",
    "clip_cov",
    "clipped_value_loss",
    "compute_advantages",
    "cpgd",
    "dapo_loss",
    "decoupled_gae",
    "decoupled_ppo",
    "discounted_returns",
    "dpo",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "dr_grpo_loss",
    "dro",
    "dual_clip",
    "entropy_from_logits",
    "fixed_length",
    "forward_kl",
    "gae",
    "gdpo",
    "geo_mis",
    "gmpo",
    "gmpo_loss",
    "gpg",
    "group_centred",
    "group_norm",
    "grpo",
    "grpo_loss",
    "gspo",
    "gspo_loss",
    "gspo_token",
    "high_entropy_tokens",
    "icepop",
    "importance_weighted",
    "ipo",
    "jensen_shannon",
    "k1",
    "k2",
    "k3",
    "kl_cov",
    "kto",
    "leave_one_out",
    "length_adaptive_lambda",
    "lite_ppo",
    "log_ratio",
    "logprobs_from_logits",
    "mask_sequences",
    "mask_sequences_geometric",
    "mask_tokens",
    "max_rl",
    "maxrl",
    "mis",
    "off_policy_sequence_mask",
    "opo",
    "orpo",
    "padded_loss",
    "pass_at_k",
    "policy_loss",
    "ppo_clip",
    "process_group_norm",
    "ratio",
    "reinforce",
    "reinforce_loss",
    "remax",
    "reverse_kl",
    "reverse_kl_reward",
    "rloo",
    "sapo",
    "sapo_loss",
    "selective_log_softmax",
    "seq_mis",
    "seq_tis",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "simpo",
    "squared_value_loss",
    "straight_through",
    "supervised_loss",
    "tis",
    "token_mean",
    "top_k_forward_kl",
    "truncate_sequences",
    "truncate_tokens",
    "turn_level",
    "two_sided",
    "unbiased_k3",
    "veto_outliers",
    "weighted_sum",
    "whiten",
]
