"""Surrogates: losses of tokens, differentiated with respect to the log-probabilities.

Each is a function of one sequence's sampled tokens: `x.now` are the log-probabilities that are
varied, `x.fixed` the same numbers behind a stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.twins.aggregation import weighted
from conformance.twins.numbers import (
    LIMIT,
    ONE,
    ZERO,
    Decimal,
    Row,
    clip,
    dec,
    gradient,
    kept,
    mean,
    placed,
    ratio,
    sigmoid,
    total,
)

Inputs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sequence:
    """The sampled tokens of one sequence."""

    now: Row
    fixed: Row
    old: Row
    advantages: Row
    extra: Row
    """Whatever else the surrogate takes a number a token of: a selection, weights of behaviour."""
    params: Inputs

    def number(self, name: str) -> Decimal:
        """A parameter."""
        return dec(self.params[name])

    @property
    def log_ratios(self) -> Row:
        """log pi - log pi_old, varied."""
        return [n - o for n, o in zip(self.now, self.old, strict=True)]

    @property
    def fixed_log_ratios(self) -> Row:
        """The same behind a stop-gradient."""
        return [f - o for f, o in zip(self.fixed, self.old, strict=True)]

    @property
    def advantage(self) -> Decimal:
        """The advantage of the sequence."""
        return mean(self.advantages)

    def each(self, *columns: Row) -> Any:
        """Columns side by side."""
        return zip(*columns, strict=True)


Surrogate = Callable[[Sequence], Row]


def clipped(r: Decimal, a: Decimal, x: Sequence) -> Decimal:
    """max(-A r, -A clip(r, 1 - low, 1 + high))."""
    return max(-a * r, -a * clip(r, 1 - x.number("clip_low"), 1 + x.number("clip_high")))


def ppo_clip(x: Sequence) -> Row:
    """PPO's clipped surrogate; with unequal bounds, clip-higher."""
    return [clipped(ratio(d), a, x) for d, a in x.each(x.log_ratios, x.advantages)]


def dual_clip(x: Sequence) -> Row:
    """At most dual |A| where the advantage is negative."""
    bound = x.number("dual")
    losses = ppo_clip(x)
    return [min(loss, bound * abs(a)) if a < 0 else loss for loss, a in x.each(losses, x.advantages)]


def two_sided(x: Sequence) -> Row:
    """INTELLECT-2: the unclipped term has an upper bound too."""
    delta, low, high = x.number("delta"), 1 - x.number("clip_low"), 1 + x.number("clip_high")
    ratios = [ratio(d) for d in x.log_ratios]
    return [max(-a * min(r, delta), -a * clip(r, low, high)) for r, a in x.each(ratios, x.advantages)]


def cispo(x: Sequence) -> Row:
    """-sg[clip(r)] A log pi; no lower bound unless one is given."""
    low = 1 - x.number("clip_low") if x.params.get("clip_low") is not None else ZERO
    weights = [clip(ratio(d), low, 1 + x.number("clip_high")) for d in x.fixed_log_ratios]
    return [-w * a * n for w, a, n in x.each(weights, x.advantages, x.now)]


def sapo(x: Sequence) -> Row:
    """A smooth gate in place of the clip."""

    def loss(d: Decimal, a: Decimal) -> Decimal:
        tau = x.number("tau_positive" if a > 0 else "tau_negative")
        return -a * 4 / tau * sigmoid(tau * (ratio(d) - 1))

    return [loss(d, a) for d, a in x.each(x.log_ratios, x.advantages)]


def gspo(x: Sequence) -> Row:
    """One ratio a sequence, the geometric mean of its tokens'."""
    return [clipped(ratio(mean(x.log_ratios)), x.advantage, x)] * len(x.now)


def gspo_token(x: Sequence) -> Row:
    """The same ratio with the gradient of the token's own log-probability."""
    log_s = mean(x.fixed_log_ratios)
    own = [log_s + n - f for n, f in x.each(x.now, x.fixed)]
    return [clipped(ratio(d), a, x) for d, a in x.each(own, x.advantages)]


def gmpo(x: Sequence) -> Row:
    """Tokens are clipped one by one in log space, then their geometric mean is the ratio."""
    low, high, a = -x.number("clip_low"), x.number("clip_high"), x.advantage
    bounded = [max(d, low) if a < 0 else min(d, high) for d in x.log_ratios]
    return [-a * ratio(mean(bounded))] * len(x.now)


def cpgd(x: Sequence) -> Row:
    """The clip acts on the log-probability."""
    low, high = (1 - x.number("clip_low")).ln(), (1 + x.number("clip_high")).ln()
    bounded = [min(n, o + high) if a > 0 else max(n, o + low) for n, o, a in x.each(x.now, x.old, x.advantages)]
    return [-a * b for a, b in x.each(x.advantages, bounded)]


def policy_drift(x: Sequence) -> Row:
    """r - 1 - log r, with the tangent beyond r = 1 + limit: the gradient is min(r - 1, limit)."""
    limit = x.number("limit")

    def drift(d: Decimal) -> Decimal:
        edge = (1 + limit).ln()
        return d.exp() - 1 - d if d <= edge else limit - edge + limit * (d - edge)

    return [drift(d) for d in x.log_ratios]


def weighted_gradient(x: Sequence, keep: Callable[[Decimal, Decimal, Decimal], bool]) -> Row:
    """-m A sg[min(r, max_ratio)] log pi, m by probabilities and advantage."""
    cap = x.number("max_ratio")

    def loss(n: Decimal, f: Decimal, o: Decimal, a: Decimal) -> Decimal:
        return -a * min(ratio(f - o), cap) * n if keep(f.exp(), o.exp(), a) else ZERO

    return [loss(n, f, o, a) for n, f, o, a in x.each(x.now, x.fixed, x.old, x.advantages)]


def dppo_tv(x: Sequence) -> Row:
    """Kept while the probability has moved by no more than the limit, or moves back."""
    low, high = x.number("limit_low"), x.number("limit_high")
    return weighted_gradient(x, lambda q, p, a: q - p <= high if a > 0 else q - p >= -low)


def binary_kl(p: Decimal, q: Decimal) -> Decimal:
    """p log(p / q) + (1 - p) log((1 - p) / (1 - q)), which is infinite where q is 1 and p is not."""
    others = (1 - p) * ((1 - p) / (1 - q)).ln() if p < 1 else ZERO
    return p * (p / q).ln() + others


def dppo_kl(x: Sequence) -> Row:
    """The same by the binary KL divergence."""
    low, high = x.number("limit_low"), x.number("limit_high")

    def keep(q: Decimal, p: Decimal, a: Decimal) -> bool:
        divergence = binary_kl(p, q)
        return not (divergence > high and q > p) if a > 0 else not (divergence > low and q < p)

    return weighted_gradient(x, keep)


def clip_cov(x: Sequence) -> Row:
    """PPO's, without the selected tokens (`extra`)."""
    return [ZERO if chosen else loss for loss, chosen in x.each(ppo_clip(x), x.extra)]


def kl_cov(x: Sequence) -> Row:
    """-A r, and the penalty |log r| at the selected tokens (`extra`)."""
    weight = x.number("coefficient")
    penalties = [weight * abs(d) if chosen else ZERO for d, chosen in x.each(x.log_ratios, x.extra)]
    return [loss + penalty for loss, penalty in x.each(importance_weighted(x), penalties)]


def reinforce(x: Sequence) -> Row:
    """-A log pi."""
    return [-a * n for a, n in x.each(x.advantages, x.now)]


def importance_weighted(x: Sequence) -> Row:
    """-A r."""
    return [-a * ratio(d) for a, d in x.each(x.advantages, x.log_ratios)]


def dro(x: Sequence) -> Row:
    """-A log pi + tau (log r)^2 / 2."""
    tau = x.number("tau")
    return [-a * n + tau * d * d / 2 for a, n, d in x.each(x.advantages, x.now, x.log_ratios)]


def dro_sequence(x: Sequence) -> Row:
    """-A log pi, and tau / 2 of the squared log-ratio of the whole response, a part of it at each of its tokens."""
    penalty = x.number("tau") * total(x.log_ratios) ** 2 / (2 * len(x.now))
    return [-a * n + penalty for a, n in x.each(x.advantages, x.now)]


def vespo(x: Sequence) -> Row:
    """-sg[w^k exp(lambda (1 - w))] A log pi, w the product of the ratios of the sequence."""
    log_w = clip(total(x.fixed_log_ratios), -LIMIT, LIMIT)
    k, strength = (dec(number) for number in x.params["positive" if x.advantage > 0 else "negative"])
    weight = (k * log_w + strength * (1 - log_w.exp())).exp()
    return [-weight * a * n for a, n in x.each(x.advantages, x.now)]


def topr(x: Sequence) -> Row:
    """-A log pi of good sequences; of the others weighed by the product of their ratios, at most 1."""
    weight = ONE if x.advantage > 0 else clip(total(x.fixed_log_ratios), -LIMIT, ZERO).exp()
    return [-weight * a * n for a, n in x.each(x.advantages, x.now)]


def dppo_top_k(x: Sequence) -> Row:
    """DPPO by divergences that are given (`extra`)."""
    low, high, cap = x.number("limit_low"), x.number("limit_high"), x.number("max_ratio")

    def loss(n: Decimal, f: Decimal, o: Decimal, a: Decimal, divergence: Decimal) -> Decimal:
        out = (a > 0 and f > o and divergence > high) or (a < 0 and f < o and divergence > low)
        return ZERO if out else -a * min(ratio(f - o), cap) * n

    return [loss(*token) for token in x.each(x.now, x.fixed, x.old, x.advantages, x.extra)]


def squared_log_ratio(x: Sequence) -> Row:
    """(log r)^2 / 2."""
    return [d * d / 2 for d in x.log_ratios]


def decoupled_ppo(x: Sequence) -> Row:
    """PPO around the proximal policy (`old`), weighted by its ratio to the one that sampled (`extra`)."""
    return [w * loss for w, loss in x.each(x.extra, ppo_clip(x))]


def with_loss(surrogate: Surrogate) -> Any:
    """The twin of a surrogate: losses of tokens, the aggregated loss and its gradient."""

    def twin(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        mask = inputs["mask"]
        rows = range(len(mask))
        fixed = [kept(inputs["logprobs"][i], mask[i]) for i in rows]

        def losses(now: Row, i: int) -> Row:
            columns = [kept(inputs[key][i], mask[i]) for key in ("old_logprobs", "advantages")]
            extra = kept(inputs["extra"][i], mask[i]) if "extra" in inputs else []
            return surrogate(Sequence(now, fixed[i], *columns, extra, params))

        found = [losses(fixed[i], i) for i in rows]

        def varied(i: int) -> Callable[[Row], Decimal]:
            def aggregated(now: Row) -> Decimal:
                return weighted(params["aggregation"], [*found[:i], losses(now, i), *found[i + 1 :]], mask, params)

            return aggregated

        return {
            "loss": [placed(found[i], mask[i]) for i in rows],
            "total": weighted(params["aggregation"], found, mask, params),
            "gradient": [placed(gradient(varied(i), fixed[i]), mask[i]) for i in rows],
        }

    return twin


def token_covariances(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """(log pi - mean) (A - mean) over the sampled tokens of the batch."""
    columns = [
        [v for values, mask in zip(inputs[key], inputs["mask"], strict=True) for v in kept(values, mask)]
        for key in ("logprobs", "advantages")
    ]
    centres = [mean(column) for column in columns]
    products = iter([(n - centres[0]) * (a - centres[1]) for n, a in zip(*columns, strict=True)])
    rows = [[next(products) if m else ZERO for m in mask] for mask in inputs["mask"]]
    if "fraction" not in params:
        return {"covariances": rows}
    num = max(1, int(dec(params["fraction"]) * len(columns[0])))
    lowest = sorted((v for row, mask in zip(rows, inputs["mask"], strict=True) for v in kept(row, mask)))[-num]
    marks = [
        [ONE if m and v >= lowest else ZERO for v, m in zip(row, mask, strict=True)]
        for row, mask in zip(rows, inputs["mask"], strict=True)
    ]
    return {"covariances": rows, "selected": marks}


def top_k_divergence(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Divergence of two distributions over K tokens and one remainder; epsilon is added to both remainders of KL."""

    def of_token(old: list[Any], new: list[Any]) -> Decimal:
        p, q = ([dec(value).exp() for value in row] for row in (old, new))
        rests = [max(ONE - total(row), ZERO) for row in (p, q)]
        if params["divergence"] == "tv":
            return total(abs(a - b) for a, b in zip([*p, rests[0]], [*q, rests[1]], strict=True)) / 2
        epsilon = dec(params["epsilon"])
        kept_tokens = total(a * (a / b).ln() for a, b in zip(p, q, strict=True))
        return kept_tokens + rests[0] * ((rests[0] + epsilon) / (rests[1] + epsilon)).ln()

    rows = zip(inputs["old_logprobs"], inputs["logprobs"], strict=True)
    return {"divergence": [of_token(old, new) for old, new in rows]}


SURROGATES: dict[str, Surrogate] = {
    surrogate.__name__: surrogate
    for surrogate in (
        ppo_clip,
        dual_clip,
        two_sided,
        cispo,
        sapo,
        gspo,
        gspo_token,
        gmpo,
        cpgd,
        policy_drift,
        dppo_tv,
        dppo_kl,
        clip_cov,
        kl_cov,
        reinforce,
        importance_weighted,
        dro,
        dro_sequence,
        vespo,
        topr,
        dppo_top_k,
        squared_log_ratio,
        decoupled_ppo,
    )
}
TWINS = {name: with_loss(surrogate) for name, surrogate in SURROGATES.items()}
TWINS["kl_cov_selection"] = token_covariances
TWINS["top_k_divergence"] = top_k_divergence
