"""Advantages: the advantage and the weight of every token, from all rollouts of a step at once.

Everything that compares, ranks or counts over a batch happens here, before any cut into
micro-batches, so no cut can change it.

Order: the KL penalty, where the record places it in the reward; the group's comparison; the running
scale and the clip of the scores; spreading over tokens (returns and values are computed here);
normalisation over the batch; the clip of advantages; then weights and selections of tokens.

Metrics are (total, count) pairs:

    reward/score_clipped    share of sequences whose score the clip changed, where there is one
    policy/advantage_clipped  share of tokens whose advantage the clip changed, where there is one
    policy/high_entropy     share of tokens that the surrogate learns from, where tokens are selected
    policy/covariance_selected  share of tokens that a selective surrogate took
    mismatch/correction     mean weight that the correction gives, where one is on
    mismatch/masked         share of tokens that it takes out
    mismatch/*              distance between the engine's policy and the trainer's, where a correction is on
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rft_algos import advantages, surrogates
from rft_algos.algorithms import components
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.algorithms.registry import equation_of
from rft_algos.input_checks import refuse
from rft_algos.losses import kl, off_policy
from rft_algos.objectives.policy_loss import Metrics, total_and_count
from rft_algos.packed import token_selection
from rft_algos.packed.importance_ratio import log_ratio
from rft_algos.packed.segments import all_true, segment_counts, segment_index, spread_to_tokens
from rft_algos.packed.tensor_checks import check_vectors
from rft_algos.rewards import kl_penalty
from rft_algos.rewards.shaping import RunningMoments
from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key

_BY_TOKEN = (components.Returns, components.Gae, components.ProcessGroupNorm)
"""Advantages that belong to tokens from the start; those of the others belong to sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """All rollouts of a step: N sequences, T response tokens laid end to end in the order of the sequences.

    Optional fields are None where the algorithm does not ask for them.
    """

    rewards_N: Tensor
    """[N] rewards, already shaped for length."""
    group_ids_N: Tensor
    """[N] int64, equal for the rollouts of one prompt."""
    loss_mask_T: Tensor
    """[T] bool, true at tokens that the policy sampled."""
    segment_ids_T: Tensor
    """[T] int64 in 0..N-1."""
    old_logprobs_T: Tensor
    """[T] log-probs of the policy at the start of the step, in nats."""
    behaviour_logprobs_T: Tensor | None = None
    """[T] log-probs of the engine that sampled, in nats; where there is a correction."""
    reference_logprobs_T: Tensor | None = None
    """[T] log-probs of the reference policy."""
    entropy_T: Tensor | None = None
    """[T] entropy of the policy at the start of the step, in nats."""
    values_T: Tensor | None = None
    """[T] a critic's estimate before each token."""
    greedy_rewards_N: Tensor | None = None
    """[N] reward of the greedy response to the sequence's prompt."""
    components_NK: Tensor | None = None
    """[N, K] the parts of the reward, each before its weight."""
    component_weights_K: Tensor | None = None
    """[K] their weights; None for 1 each."""
    step_rewards_T: Tensor | None = None
    """[T] reward of the step that ends at each token, where `step_mask_T`."""
    step_mask_T: Tensor | None = None
    """[T] bool, true at tokens that end a step with a reward."""
    turn_rewards_T: Tensor | None = None
    """[T] what each turn of a conversation earned, at its last token, 0 elsewhere; part of `rewards_N`. Returns and
    GAE place them there; what the rewards hold besides stands at the last token."""

    @property
    def lengths_N(self) -> Tensor:
        """[N] float64 loss tokens of each sequence."""
        counts_N = self.rewards_N.new_zeros(self.rewards_N.shape[0], dtype=torch.float64)
        places = segment_index(self.loss_mask_T, self.segment_ids_T)
        # slots may be fewer, where the last sequences have no token, or more, where they are not counted
        num_slots = min(places.spare, counts_N.shape[0])
        counts_N[:num_slots] = segment_counts(places, dtype=torch.float64)[:num_slots]
        return counts_N


@dataclass(frozen=True, slots=True)
class AdvantageOutput:
    """Advantages of the tokens of one step."""

    advantages_T: Tensor
    """[T] float64, 0 where masked."""
    returns_T: Tensor | None
    """[T] float64, what a critic should have said; None without one."""
    weights_T: Tensor | None
    """[T] float64 weight of the surrogate; None for 1 everywhere."""
    selected_T: Tensor | None
    """[T] bool of a selective surrogate; None for others."""
    running: RunningMoments | None
    """The running scale with this batch in it."""
    metrics: Metrics


@torch.no_grad()
def compute_advantages(
    record: PolicyAlgorithm,
    batch: RolloutBatch,
    *,
    score: Callable[[RolloutBatch], Tensor] | None = None,
    running: RunningMoments | None = None,
    minus_mean: bool = False,
    score_clip: float = 0.0,
    kl_coef: float | None = None,
    key: int = 0,
) -> AdvantageOutput:
    """Advantages and weights of all tokens of a step, by the record's choices.

    With `score` the record's own advantages are computed too: what a critic learns and the running scale follow
    from them.

    Args:
        record: the algorithm.
        batch: all rollouts of the step; shapes [N], [T] and [N, K] as its fields say.
        score: used in place of the record's advantage: the batch -> [N] of sequences or [T] of tokens.
        running: moments of the scores so far, by which scores are scaled; None for no scaling.
        minus_mean: whether the running mean is subtracted too.
        score_clip: largest absolute score; 0 for no bound.
        kl_coef: coefficient of a KL penalty in the reward, as a controller has it now; None for the record's.
        key: from `keyed_random.derive_key`, for selections that draw.

    Returns:
        The credit of every token.
    """
    own = algorithm_advantages(
        record, batch, running=running, minus_mean=minus_mean, score_clip=score_clip, kl_coef=kl_coef
    )
    advantages_T = own.advantages_T if score is None else _given(score, batch)
    return _finished(record, batch, advantages_T, own.returns_T, own.running, key, own.metrics)


@torch.no_grad()
def algorithm_advantages(
    record: PolicyAlgorithm,
    batch: RolloutBatch,
    *,
    running: RunningMoments | None = None,
    minus_mean: bool = False,
    score_clip: float = 0.0,
    kl_coef: float | None = None,
) -> AdvantageOutput:
    """The record's own advantages of all tokens, before they are normalised or clipped over the batch.

    Args:
        record: the algorithm.
        batch: all rollouts of the step; shapes [N], [T] and [N, K] as its fields say.
        running: moments of the scores so far, by which scores are scaled; None for no scaling.
        minus_mean: whether the running mean is subtracted too.
        score_clip: largest absolute score; 0 for no bound.
        kl_coef: coefficient of a KL penalty in the reward, as a controller has it now; None for the record's.

    Returns:
        Advantages, returns, running scale and metrics; weights and selections are not there yet.
    """
    _check(batch)
    coefficient = record.kl_coef if kl_coef is None else kl_coef
    kl_T = _penalty(record, batch)
    metrics: Metrics = {}
    scores_N = _scores(record, batch, kl_T, coefficient)
    if running is not None:
        # the batch is in the moments before it is scaled, so the first step has a scale as well
        running = running.update(scores_N)
        scores_N = running.normalise(scores_N, minus_mean=minus_mean)
    if score_clip > 0:
        scores_N, clipped_N = advantages.clip(scores_N, score_clip)
        metrics["reward/score_clipped"] = total_and_count(clipped_N, torch.ones_like(clipped_N))
    advantages_T, returns_T = _over_tokens(record, batch, scores_N, kl_T, coefficient)
    return AdvantageOutput(advantages_T, returns_T, None, None, running, metrics)


def _given(score: Callable[[RolloutBatch], Tensor], batch: RolloutBatch) -> Tensor:
    scores = score(batch).detach().to(torch.float64)
    num_sequences, num_tokens = batch.rewards_N.shape[0], batch.loss_mask_T.shape[0]
    if scores.shape not in ((num_sequences,), (num_tokens,)) or not bool(scores.isfinite().all()):
        raise OptionsError(
            code="algorithm.advantages_shape",
            what=f"advantages of shape {tuple(scores.shape)}, {int((~scores.isfinite()).sum())} of them not finite",
            where="compute_advantages",
            why=f"it must give one finite number for each of {num_sequences} sequences or {num_tokens} tokens",
            do="return a tensor as long as batch.rewards_N",
        )
    advantages_T = scores[batch.segment_ids_T] if scores.shape[0] == num_sequences else scores
    return torch.where(batch.loss_mask_T, advantages_T, 0.0)


def _finished(
    record: PolicyAlgorithm,
    batch: RolloutBatch,
    advantages_T: Tensor,
    returns_T: Tensor | None,
    running: RunningMoments | None,
    key: int,
    metrics: Metrics,
) -> AdvantageOutput:
    """Normalise and clip over the batch, then the weights and selections of tokens."""
    if record.normalise_advantages:
        moments = advantages.moments(advantages_T, batch.loss_mask_T)
        advantages_T = advantages.whiten(advantages_T, batch.loss_mask_T, moments)
    # after the normalisation: the limit is in the unit of what the loss gets
    if record.advantage_clip > 0:
        advantages_T, clipped_T = advantages.clip(advantages_T, record.advantage_clip)
        metrics["policy/advantage_clipped"] = total_and_count(clipped_T, batch.loss_mask_T)
    weights_T = _weights(record, batch, metrics)
    selected_T = _selected(record, batch, advantages_T, key, metrics)
    return AdvantageOutput(advantages_T, returns_T, weights_T, selected_T, running, metrics)


def _scores(record: PolicyAlgorithm, batch: RolloutBatch, kl_T: Tensor | None, coefficient: float) -> Tensor:
    """[N] what each sequence is worth: its reward, or where groups are compared its advantage."""
    if isinstance(record.advantage, _BY_TOKEN):
        return batch.rewards_N.to(torch.float64)
    if kl_T is not None:
        # before groups are compared, since the sequences of a group pay differently
        penalised_N = kl_penalty.kl_penalised(
            batch.rewards_N, kl_T, batch.loss_mask_T, batch.segment_ids_T, coefficient=coefficient
        )
        batch = replace(batch, rewards_N=penalised_N)
    return equation_of(record.advantage)(record.advantage, batch)


def _over_tokens(
    record: PolicyAlgorithm, batch: RolloutBatch, scores_N: Tensor, kl_T: Tensor | None, coefficient: float
) -> tuple[Tensor, Tensor | None]:
    """[T] advantages, 0 where masked, and the returns that a critic learns."""
    choice, returns_T = record.advantage, None
    if isinstance(choice, components.ProcessGroupNorm):
        advantages_T = _process(choice, batch)
    elif isinstance(choice, components.Returns | components.Gae):
        penalty_T = torch.zeros((), dtype=torch.float64).expand(batch.old_logprobs_T.shape) if kl_T is None else kl_T
        late_N, turns_T = scores_N, batch.turn_rewards_T
        if turns_T is not None:
            # the rewards hold what the turns earned, which must not be paid again at the last token
            late_N = scores_N.index_add(0, batch.segment_ids_T, turns_T.to(torch.float64), alpha=-1)
        token_rewards_T = kl_penalty.token_rewards(
            late_N, penalty_T, batch.loss_mask_T, batch.segment_ids_T, coefficient=coefficient
        )
        token_rewards_T = token_rewards_T if turns_T is None else token_rewards_T + turns_T
        advantages_T, returns_T = _over_time(choice, batch, token_rewards_T)
    else:
        advantages_T = spread_to_tokens(scores_N, batch.segment_ids_T)
    if not all_true(batch.loss_mask_T):
        advantages_T = torch.where(batch.loss_mask_T, advantages_T, 0.0)
    return advantages_T, returns_T


def _check(batch: RolloutBatch) -> None:
    check_vectors(
        loss_mask_T=batch.loss_mask_T,
        segment_ids_T=batch.segment_ids_T,
        old_logprobs_T=batch.old_logprobs_T,
        behaviour_logprobs_T=batch.behaviour_logprobs_T,
        reference_logprobs_T=batch.reference_logprobs_T,
        entropy_T=batch.entropy_T,
        values_T=batch.values_T,
        step_rewards_T=batch.step_rewards_T,
        step_mask_T=batch.step_mask_T,
        turn_rewards_T=batch.turn_rewards_T,
    )
    check_vectors(rewards_N=batch.rewards_N, group_ids_N=batch.group_ids_N, greedy_rewards_N=batch.greedy_rewards_N)


def _penalty(record: PolicyAlgorithm, batch: RolloutBatch) -> Tensor | None:
    if record.kl_place != "reward" or not record.needs_reference:
        return None
    if batch.reference_logprobs_T is None:
        refuse("a KL penalty in the reward needs reference log-probs")
    # masked before the subtraction: infinity minus infinity at a masked token would be NaN
    log_ratio_T = torch.where(batch.loss_mask_T, batch.old_logprobs_T - batch.reference_logprobs_T, 0.0)
    return kl.ON_POLICY[record.kl_estimator](log_ratio_T.to(torch.float64))


def _over_time(
    choice: components.Returns | components.Gae, batch: RolloutBatch, token_rewards_T: Tensor
) -> tuple[Tensor, Tensor | None]:
    if isinstance(choice, components.Gae):
        if batch.values_T is None:
            refuse("GAE needs the critic's values")
        steps = (token_rewards_T, batch.values_T, batch.loss_mask_T, batch.segment_ids_T)
        gamma, turn_gamma = choice.gamma, choice.turn_gamma
        if choice.lambd_value is None and choice.length_alpha is None:
            return advantages.gae(*steps, gamma=gamma, lambd=choice.lambd, turn_gamma=turn_gamma)
        lambd_policy: float | Tensor = choice.lambd
        if choice.length_alpha is not None:
            lengths_T = batch.lengths_N[batch.segment_ids_T]
            lambd_policy = advantages.length_adaptive_lambda(lengths_T, alpha=choice.length_alpha)
        lambd_value = choice.lambd if choice.lambd_value is None else choice.lambd_value
        return advantages.decoupled_gae(
            *steps, gamma=gamma, lambd_policy=lambd_policy, lambd_value=lambd_value, turn_gamma=turn_gamma
        )
    returns_T = advantages.discounted_returns(
        token_rewards_T, batch.loss_mask_T, batch.segment_ids_T, gamma=choice.gamma
    )
    return returns_T, None


def _process(choice: components.ProcessGroupNorm, batch: RolloutBatch) -> Tensor:
    if batch.step_rewards_T is None:
        refuse("process rewards need rewards of steps")
    if batch.step_mask_T is None:
        refuse("process rewards need the places of steps")
    return advantages.process_group_norm(
        batch.step_rewards_T,
        batch.step_mask_T,
        batch.loss_mask_T,
        batch.segment_ids_T,
        batch.group_ids_N,
        epsilon=choice.epsilon,
    )


def _weights(record: PolicyAlgorithm, batch: RolloutBatch, metrics: Metrics) -> Tensor | None:
    weights_T = None
    if record.correction.is_active:
        if batch.behaviour_logprobs_T is None:
            refuse("a correction needs the engine's log-probs: behaviour_logprobs_T is None")
        log_rho_T = log_ratio(batch.old_logprobs_T.to(torch.float64), batch.behaviour_logprobs_T.to(torch.float64))
        log_rho_T = torch.where(batch.loss_mask_T, log_rho_T, 0.0)
        equation = equation_of(record.correction)
        weights_T = equation(record.correction, log_rho_T, batch.loss_mask_T, batch.segment_ids_T)
        metrics |= off_policy.mismatch_metrics(
            batch.old_logprobs_T, batch.behaviour_logprobs_T, batch.loss_mask_T, batch.segment_ids_T
        )
        one = torch.ones((), dtype=torch.float64)
        maxima = off_policy.mismatch_maxima(batch.old_logprobs_T, batch.behaviour_logprobs_T, batch.loss_mask_T)
        metrics |= {name: (value, one) for name, value in maxima.items()}
        metrics["mismatch/correction"] = total_and_count(weights_T, batch.loss_mask_T)
        metrics["mismatch/masked"] = total_and_count(weights_T == 0, batch.loss_mask_T)
    if record.needs_old_entropy:
        if batch.entropy_T is None:
            refuse("selecting tokens by entropy needs the entropy at the start of the step")
        high_T = token_selection.high_entropy_tokens(
            batch.entropy_T, batch.loss_mask_T, fraction=record.high_entropy_fraction
        )
        metrics["policy/high_entropy"] = total_and_count(high_T, batch.loss_mask_T)
        # as weights of 0 and 1, because a mask would change the denominators
        chosen_T = high_T.to(torch.float64)
        weights_T = chosen_T if weights_T is None else weights_T * chosen_T
    return weights_T


def _selected(
    record: PolicyAlgorithm, batch: RolloutBatch, advantages_T: Tensor, key: int, metrics: Metrics
) -> Tensor | None:
    choice = record.surrogate
    if not choice.is_selective:
        return None
    # of the advantages as the loss gets them, after normalisation and clip
    covariances_T = surrogates.token_covariances(batch.old_logprobs_T, advantages_T, batch.loss_mask_T)
    if isinstance(choice, components.ClipCov):
        selected_T = surrogates.select_clip_cov(
            covariances_T,
            batch.loss_mask_T,
            low=choice.covariance_low,
            high=choice.covariance_high,
            fraction=choice.fraction,
            key=derive_key(key, "clip-cov"),
        )
    else:
        if not isinstance(choice, components.KlCov):
            refuse(f"{type(choice).__name__} selects tokens, but not how")
        selected_T = surrogates.select_kl_cov(covariances_T, batch.loss_mask_T, fraction=choice.fraction)
    metrics["policy/covariance_selected"] = total_and_count(selected_T, batch.loss_mask_T)
    return selected_T
