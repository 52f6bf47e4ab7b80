"""Losses of pairs and of labelled responses, differentiated with respect to the policy's numbers.

`chosen` and `rejected` are scores or log-probabilities of whole responses, `lengths` their numbers of
tokens; KTO has `logprobs`, `labels` and one list each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conformance.twins.numbers import ONE, ZERO, Decimal, dec, gradient, mean, row, sigmoid, softplus, total

Inputs = Mapping[str, Any]
Pair = Callable[[Decimal, Decimal, Mapping[str, Decimal]], Decimal]
"""(chosen, rejected, the pair's other numbers and the parameters) -> loss."""


def bradley_terry(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """-log sigmoid(s_c - s_r - margin)."""
    return softplus(-(c - r - x.get("margin", ZERO)))


def hps(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """Cross-entropy over the two."""
    return -(c.exp() / (c.exp() + r.exp())).ln()


def log_exp(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """log(1 + exp(s_r - s_c))."""
    return (1 + (r - c).exp()).ln()


def rao_kupper_tie(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """-log((theta^2 - 1) p_c p_r / ((p_c + theta p_r) (p_r + theta p_c))), p = e^s, theta = e^threshold."""
    theta, p_c, p_r = x["threshold"].exp(), c.exp(), r.exp()
    return -((theta**2 - 1) * p_c * p_r / ((p_c + theta * p_r) * (p_r + theta * p_c))).ln()


def difference(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """log pi(c) - log ref(c) - (log pi(r) - log ref(r))."""
    return c - x["reference_chosen"] - (r - x["reference_rejected"])


def dpo(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """-(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)."""
    margin, smoothing = x["beta"] * difference(c, r, x), x["label_smoothing"]
    return (1 - smoothing) * softplus(-margin) + smoothing * softplus(margin)


def ipo(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """(d - 1 / (2 beta))^2."""
    return (difference(c, r, x) - 1 / (2 * x["beta"])) ** 2


def ipo_per_token(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """The same of log-probabilities per token."""
    good = (c - x["reference_chosen"]) / x["chosen_lengths"]
    bad = (r - x["reference_rejected"]) / x["rejected_lengths"]
    return (good - bad - 1 / (2 * x["beta"])) ** 2


def log_odds(log_p: Decimal) -> Decimal:
    """log(p / (1 - p))."""
    return log_p - (1 - log_p.exp()).ln()


def orpo(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """The likelihood per token and the odds ratio."""
    good, bad = c / x["chosen_lengths"], r / x["rejected_lengths"]
    return -good + x["coefficient"] * softplus(-(log_odds(good) - log_odds(bad)))


def simpo(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """-log sigmoid(beta (log pi(c) / |c| - log pi(r) / |r|) - gamma)."""
    return softplus(-(x["beta"] * (c / x["chosen_lengths"] - r / x["rejected_lengths"]) - x["gamma"]))


def with_gradients(losses: Callable[[list[Decimal]], list[Decimal]], inputs: Inputs) -> dict[str, Any]:
    """Losses of chosen and rejected responses, their mean, and the gradient of the mean."""
    count, both = len(inputs["chosen"]), [*row(inputs["chosen"]), *row(inputs["rejected"])]
    slopes = gradient(lambda values: mean(losses(values)), both)
    found = losses(both)
    return {
        "loss": found,
        "total": mean(found),
        "gradient_chosen": slopes[:count],
        "gradient_rejected": slopes[count:],
    }


def of_pairs(loss: Pair) -> Any:
    """The twin of a loss of pairs: losses, their mean, and the gradient of the mean."""

    def twin(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        others = {key: row(values) for key, values in inputs.items() if key not in ("chosen", "rejected")}
        numbers = {key: dec(value) for key, value in params.items()}
        count = len(inputs["chosen"])

        def losses(both: list[Decimal]) -> list[Decimal]:
            return [
                loss(both[i], both[count + i], {**numbers, **{key: values[i] for key, values in others.items()}})
                for i in range(count)
            ]

        return with_gradients(losses, inputs)

    return twin


def kto_reference_point(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """max(0, mean of log pi(y') - log ref(y')) over mismatched responses."""
    pairs = zip(inputs["mismatched"], inputs["reference_mismatched"], strict=True)
    return {"point": max(ZERO, mean([dec(p) - dec(q) for p, q in pairs]))}


def kto(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """w (1 - sigmoid(beta (x - z))) where good, w (1 - sigmoid(beta (z - x))) where bad."""
    point = kto_reference_point(inputs, params)["point"]
    beta, good, bad = (dec(params[name]) for name in ("beta", "desirable_weight", "undesirable_weight"))
    references = row(inputs["reference_logprobs"])

    def losses(logprobs: list[Decimal]) -> list[Decimal]:
        gains = [beta * (n - q - point) for n, q in zip(logprobs, references, strict=True)]
        return [
            good * (ONE - sigmoid(g)) if label else bad * (ONE - sigmoid(-g))
            for g, label in zip(gains, inputs["labels"], strict=True)
        ]

    now = row(inputs["logprobs"])
    found = losses(now)
    return {
        "loss": found,
        "total": total(found) / len(found),
        "gradient": gradient(lambda values: mean(losses(values)), now),
    }


def step_cross_entropy(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """-y log sigmoid(s) - (1 - y) log sigmoid(-s), of each step."""
    labels = row(inputs["labels"])

    def losses(scores: list[Decimal]) -> list[Decimal]:
        return [y * softplus(-s) + (1 - y) * softplus(s) for s, y in zip(scores, labels, strict=True)]

    now = row(inputs["scores"])
    found = losses(now)
    slopes = gradient(lambda values: mean(losses(values)), now)
    return {"loss": found, "total": mean(found), "gradient": slopes}


def ratios(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> tuple[Decimal, Decimal]:
    """beta x of both, x = log pi - log ref."""
    return x["beta"] * (c - x["reference_chosen"]), x["beta"] * (r - x["reference_rejected"])


def hinge(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """max(0, 1 - beta d)."""
    return max(ZERO, 1 - x["beta"] * difference(c, r, x))


def robust_dpo(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """((1 - e) softplus(-beta d) - e softplus(beta d)) / (1 - 2 e)."""
    margin, noise = x["beta"] * difference(c, r, x), x["label_noise"]
    return ((1 - noise) * softplus(-margin) - noise * softplus(margin)) / (1 - 2 * noise)


def exo(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """KL of (s, 1 - s) from (1 - e, e), s = sigmoid(beta d)."""
    right, label = sigmoid(x["beta"] * difference(c, r, x)), x["label_smoothing"]
    return right * (right / (1 - label)).ln() + (1 - right) * ((1 - right) / label).ln()


def nca(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """-log sigmoid(g) - (log sigmoid(-g) + log sigmoid(-b)) / 2, g and b the rewards."""
    good, bad = ratios(c, r, x)
    return softplus(-good) + (softplus(good) + softplus(bad)) / 2


def bco(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """-log sigmoid(g - shift) - log sigmoid(shift - b)."""
    good, bad = ratios(c, r, x)
    return softplus(x["shift"] - good) + softplus(bad - x["shift"])


def sppo(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """(x_c - 1 / (2 beta))^2 + (x_r + 1 / (2 beta))^2."""
    half = 1 / (2 * x["beta"])
    return (c - x["reference_chosen"] - half) ** 2 + (r - x["reference_rejected"] + half) ** 2


def apo_zero(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """1 - sigmoid(g) + sigmoid(b)."""
    good, bad = ratios(c, r, x)
    return 1 - sigmoid(good) + sigmoid(bad)


def apo_down(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """sigmoid(g) + 1 - sigmoid(g - b)."""
    good, bad = ratios(c, r, x)
    return sigmoid(good) + 1 - sigmoid(good - bad)


def discopop(c: Decimal, r: Decimal, x: Mapping[str, Decimal]) -> Decimal:
    """(1 - m) softplus(-z) + m e^-z, z = beta d, m = sigmoid(z / temperature)."""
    margin = x["beta"] * difference(c, r, x)
    share = sigmoid(margin / x["temperature"])
    return (1 - share) * softplus(-margin) + share * (-margin).exp()


def sorted_apart(is_paired: bool) -> Any:
    """Alignment by optimal transport: the logistic loss of the k-th smallest of one list less that of the other."""

    def twin(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        reference = [*row(inputs["reference_chosen"]), *row(inputs["reference_rejected"])]
        beta, label, count = dec(params["beta"]), dec(params["label_smoothing"]), len(inputs["chosen"])

        def losses(both: list[Decimal]) -> list[Decimal]:
            if is_paired:
                upper = [both[i] - both[count + i] for i in range(count)]
                lower = [reference[i] - reference[count + i] for i in range(count)]
            else:
                upper = [both[i] - reference[i] for i in range(count)]
                lower = [both[i] - reference[i] for i in range(count, 2 * count)]
            apart = [beta * (u - v) for u, v in zip(sorted(upper), sorted(lower), strict=True)]
            return [(1 - label) * softplus(-one) + label * softplus(one) for one in apart]

        return with_gradients(losses, inputs)

    return twin


PAIRS: dict[str, Pair] = {
    loss.__name__: loss for loss in (bradley_terry, hps, log_exp, rao_kupper_tie, dpo, ipo, ipo_per_token, orpo, simpo)
}
TWINS = {name: of_pairs(loss) for name, loss in PAIRS.items()}
VARIANTS = (hinge, robust_dpo, exo, nca, bco, sppo, apo_zero, apo_down, discopop)
TWINS |= {loss.__name__: of_pairs(loss) for loss in VARIANTS}
TWINS |= {"aot_paired": sorted_apart(True), "aot_unpaired": sorted_apart(False)}
TWINS |= {"kto_reference_point": kto_reference_point, "kto": kto, "step_cross_entropy": step_cross_entropy}
