"""The losses of `algos.py` against verl, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from algos_sides import Batch, Case, Results, Run, with_gradient
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from rft_algos import objectives, surrogates
from rft_algos.algorithms import components
from rft_algos.algorithms.published import Aggregation, PolicyAlgorithm
from rft_algos.losses import aggregation as reductions
from rft_algos.losses import kl, value
from rft_algos.objectives.policy_loss import total_and_count
from rft_core.keyed_random import derive_key

AGGREGATIONS: dict[Aggregation, str] = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "fixed_length": "seq-mean-token-sum-norm",
}
KEY = derive_key(7, "clip-cov")


def cases(batch: Batch) -> Iterator[Case]:
    """All cases, one at a time."""
    yield from _policy_losses(batch)
    if batch.suffix:
        return
    yield from _selective_losses(batch)
    yield from _divergences(batch)
    yield from _aggregations(batch)
    yield _value_loss(batch)


def bounds(low: float, high: float) -> dict[str, float]:
    """The clip in verl's settings."""
    return {"clip_ratio": high, "clip_ratio_low": low, "clip_ratio_high": high}


class _Losses:
    """A micro-batch of the size of the batch, and the loss of either side on it."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.logprobs_BT, self.old_BT = batch.padded(batch.logprobs_T), batch.padded(batch.old_logprobs_T)
        self.advantages_BT = batch.padded(batch.advantages_T)
        self.counts = {
            "dp_size": 1,
            "batch_num_tokens": batch.num_loss_tokens,
            "global_batch_size": batch.num_sequences,
            "loss_scale_factor": None,
        }

    def ours(
        self, surrogate: components.Surrogate, aggregation: Aggregation, select: Callable[[], Tensor] | None = None
    ) -> Run:
        """The loss by a record, with all that it gives back."""
        record = PolicyAlgorithm(surrogate=surrogate, aggregation=aggregation)
        batch = self.batch
        return lambda: with_gradient(
            lambda logprobs_T: (
                objectives.policy_loss(
                    record,
                    logprobs_T=logprobs_T,
                    old_logprobs_T=batch.old_logprobs_T,
                    reference_logprobs_T=None,
                    advantages_T=batch.advantages_T,
                    loss_mask_T=batch.mask_T,
                    segment_ids_T=batch.segment_ids_T,
                    entropy_T=None,
                    num_loss_tokens=batch.num_loss_tokens,
                    num_sequences=batch.num_sequences,
                    selected_T=None if select is None else select(),
                ).loss
            ),
            batch.logprobs_T,
        )

    def bare(self, equation: Callable[[Tensor], Tensor], aggregation: Aggregation) -> Run:
        """The surrogate and its reduction."""
        batch = self.batch

        def loss_of(logprobs_T: Tensor) -> Tensor:
            weights_T = weights(batch, aggregation)
            return reductions.weighted_sum(weights_T, equation(logprobs_T))

        return lambda: with_gradient(loss_of, batch.logprobs_T)

    def peer(self, name: str, aggregation: Aggregation, **options: Any) -> Run:
        """The registered loss of that name, with all that it gives back."""
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_torch_compile=False, **options
        )
        config.global_batch_info.update(self.counts)
        function = core_algos.get_policy_loss_fn(name)
        given = (self.advantages_BT, self.batch.mask_BT, AGGREGATIONS[aggregation], config)
        return lambda: with_gradient(
            lambda logprobs_BT: function(self.old_BT, logprobs_BT, *given)[0], self.logprobs_BT
        )


def weights(batch: Batch, aggregation: Aggregation) -> Tensor:
    """[T] weights of one aggregation."""
    match aggregation:
        case "token_mean":
            return reductions.token_mean(batch.mask_T, batch.num_loss_tokens)
        case "sequence_mean_token_mean":
            return reductions.sequence_mean_token_mean(batch.mask_T, batch.segment_ids_T, batch.num_sequences)
        case "sequence_mean_token_sum":
            return reductions.sequence_mean_token_sum(batch.mask_T, batch.num_sequences)
        case "fixed_length":
            return reductions.fixed_length(batch.mask_T, batch.num_sequences, batch.width)


def _policy_losses(batch: Batch) -> Iterator[Case]:
    both = _Losses(batch)
    old_T, advantages_T, mask_T, ids_T = batch.old_logprobs_T, batch.advantages_T, batch.mask_T, batch.segment_ids_T
    s, mean = surrogates, "token_mean"
    by_sequence = "sequence_mean_token_mean"
    moved = bounds(0.05, 0.05) | {"clip_ratio_c": 20.0}
    dro = {"policy_loss": PolicyLossConfig(loss_mode="dro", dro_beta=0.1)}

    def case(
        name: str,
        choice: components.Surrogate,
        aggregation: Aggregation,
        equation: Callable[[Tensor], Tensor],
        options: dict[str, Any],
    ) -> Case:
        peer_name, whole, bare = name, both.ours(choice, aggregation), both.bare(equation, aggregation)
        if ", " in name:
            name, peer_name = name.split(", ")
        alone = peer_name == "gpg"  # returns no metrics, so ours is measured without them
        return Case(
            name=name + batch.suffix,
            peer_name=peer_name,
            ours=bare if alone else whole,
            bare=None if alone else bare,
            peer=both.peer(peer_name, aggregation, **options),
            bytes_per_token=4 * 3 if alone else 4 * 4,
        )

    yield case(
        "dual_clip, vanilla",
        components.DualClip(),
        mean,
        lambda x: s.dual_clip(x - old_T, advantages_T, 0.2, 0.2),
        bounds(0.2, 0.2),
    )
    yield case(
        "gspo",
        components.Gspo(),
        by_sequence,
        lambda x: s.gspo(x - old_T, advantages_T, mask_T, ids_T),
        bounds(3e-4, 4e-4),
    )
    if batch.suffix:
        return
    yield case(
        "gspo_token, gspo",
        components.GspoToken(),
        by_sequence,
        lambda x: s.gspo_token(x - old_T, advantages_T, mask_T, ids_T),
        bounds(3e-4, 4e-4),
    )
    yield case(
        "gmpo, geo_mean",
        components.Gmpo(),
        by_sequence,
        lambda x: s.gmpo(x - old_T, advantages_T, mask_T, ids_T),
        bounds(0.4, 0.4),
    )
    yield case(
        "cispo",
        components.Cispo(low=0.2, high=0.2),
        mean,
        lambda x: s.cispo(x, x - old_T, advantages_T, 0.2, 0.2),
        bounds(0.2, 0.2),
    )
    yield case("sapo", components.Sapo(), by_sequence, lambda x: s.sapo(x - old_T, advantages_T), {})
    yield case(
        "dppo_tv",
        components.Dppo(divergence="tv", low=0.05, high=0.05),
        mean,
        lambda x: s.dppo_tv(x, old_T, advantages_T, 0.05, 0.05),
        moved,
    )
    yield case(
        "dppo_kl",
        components.Dppo(divergence="kl", low=0.05, high=0.05),
        mean,
        lambda x: s.dppo_kl(x, old_T, advantages_T, 0.05, 0.05),
        moved,
    )
    yield case("reinforce, gpg", components.Reinforce(), mean, lambda x: s.reinforce(x, advantages_T), {})
    yield case("dro", components.Dro(tau=0.1), mean, lambda x: s.dro(x, x - old_T, advantages_T, 0.1), dro)


def _selective_losses(batch: Batch) -> Iterator[Case]:
    both = _Losses(batch)
    logprobs_T, mask_T, advantages_T = batch.logprobs_T, batch.mask_T, batch.advantages_T

    def select(choice: components.ClipCov | components.KlCov) -> Tensor:
        cov_T = surrogates.token_covariances(logprobs_T, advantages_T, mask_T)
        if isinstance(choice, components.KlCov):
            return surrogates.select_kl_cov(cov_T, mask_T, fraction=choice.fraction)
        return surrogates.select_clip_cov(cov_T, mask_T, fraction=choice.fraction, key=KEY)

    def ours(choice: components.ClipCov | components.KlCov) -> Run:
        return both.ours(choice, "token_mean", lambda: select(choice))

    def clip_cov_peer(fraction: float) -> Run:
        options = PolicyLossConfig(loss_mode="clip_cov", clip_cov_ratio=fraction, clip_cov_lb=1.0, clip_cov_ub=5.0)
        return both.peer("clip_cov", "token_mean", policy_loss=options, **bounds(0.2, 0.2))

    all_candidates = components.ClipCov(fraction=0.9)
    yield Case(
        name="clip_cov, selection",
        peer_name="clip_cov",
        ours=ours(components.ClipCov()),
        peer=clip_cov_peer(2e-4),
        gate=(lambda: (None, ours(all_candidates)()[1]), clip_cov_peer(0.9)),
        departure="draws with the global generator, and never a clipped token: gradients with all candidates drawn",
        bytes_per_token=4 * 4,
    )
    options = PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=2e-3, ppo_kl_coef=1.0)
    yield Case(
        name="kl_cov, selection",
        peer_name="kl_cov",
        ours=ours(components.KlCov()),
        peer=both.peer("kl_cov", "token_mean", policy_loss=options),
        bytes_per_token=4 * 4,
    )


def _divergences(batch: Batch) -> Iterator[Case]:
    reference_T = batch.reference_logprobs_T
    logprobs_BT, reference_BT = batch.padded(batch.logprobs_T), batch.padded(reference_T)
    estimators: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("k1", "k1", kl.k1),
        ("k2", "k2", kl.k2),
        ("k3", "k3", kl.k3),
        ("absolute", "abs", kl.absolute),
        ("straight_through k3, k2", "k3+", lambda x: kl.straight_through(kl.k3(x), kl.k2(x))),
    )

    def ours(estimator: Callable[[Tensor], Tensor]) -> Results:
        return with_gradient(
            lambda x: reductions.weighted_sum(weights(batch, "token_mean"), estimator(x - reference_T)),
            batch.logprobs_T,
        )

    def peer(name: str) -> Results:
        def loss_of(x: Tensor) -> Tensor:
            values_BT = core_algos.kl_penalty(x, reference_BT, name)
            return core_algos.agg_loss(values_BT, batch.mask_BT, "token-mean", batch_num_tokens=batch.num_loss_tokens)

        return with_gradient(loss_of, logprobs_BT)

    for name, peer_name, estimator in estimators:
        yield Case(
            name=f"kl {name}",
            peer_name=f"kl_penalty {peer_name}",
            ours=lambda e=estimator: ours(e),
            peer=lambda n=peer_name: peer(n),
            bytes_per_token=4 * 3,
        )


def _aggregations(batch: Batch) -> Iterator[Case]:
    values_BT = batch.padded(batch.returns_T)

    def ours(name: Aggregation) -> Results:
        return with_gradient(lambda x: reductions.weighted_sum(weights(batch, name), x), batch.returns_T)

    def peer(name: Aggregation) -> Results:
        counts = {"batch_num_tokens": batch.num_loss_tokens, "global_batch_size": batch.num_sequences}
        return with_gradient(
            lambda x: core_algos.agg_loss(
                x, batch.mask_BT, AGGREGATIONS[name], loss_scale_factor=batch.width, **counts
            ),
            values_BT,
        )

    for name, peer_name in AGGREGATIONS.items():
        yield Case(
            name=f"{name}, weighted_sum",
            peer_name=f"agg_loss {peer_name}",
            ours=lambda n=name: ours(n),
            peer=lambda n=name: peer(n),
            bytes_per_token=4 * 2,
        )


def _value_loss(batch: Batch) -> Case:
    values_T, old_T, returns_T = batch.values_T, batch.old_values_T, batch.returns_T
    values_BT, old_BT, returns_BT = (batch.padded(x_T) for x_T in (values_T, old_T, returns_T))

    def bare() -> Results:
        return with_gradient(
            lambda x: reductions.weighted_sum(
                weights(batch, "token_mean"), value.clipped_value_loss(x, old_T, returns_T, 0.2)
            ),
            values_T,
        )

    def ours() -> Results:
        total, count = total_and_count(value.value_clipped(values_T, old_T, returns_T, 0.2), batch.mask_T)
        return *bare(), total / count

    def peer() -> Results:
        share: list[Tensor] = []

        def loss_of(x: Tensor) -> Tensor:
            loss, clipped = core_algos.compute_value_loss(
                x, returns_BT, old_BT, batch.mask_BT, 0.2, batch_num_tokens=batch.num_loss_tokens
            )
            share.append(clipped.detach())
            return loss

        return *with_gradient(loss_of, values_BT), share[0]

    return Case(
        name="clipped_value_loss",
        peer_name="compute_value_loss",
        ours=ours,
        bare=bare,
        peer=peer,
        bytes_per_token=4 * 4,
    )
