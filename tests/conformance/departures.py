"""Twins with something changed: formulas that trainers compute in the place of the papers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from conformance.twins import TWINS, Twin, advantages, corrections, kl, surrogates, tokens
from conformance.twins.aggregation import weighted, weights
from conformance.twins.numbers import ONE, ZERO, Decimal, Row, by_group, clip, dec, kept, mean, ratio, row, std, total

Inputs = Mapping[str, Any]


def with_params(twin: Twin, **changes: Any) -> Twin:
    """The equation with other parameters."""
    return lambda inputs, params: twin(inputs, {**params, **changes})


def epsilons(twin: Twin, *texts: str) -> dict[str, Twin]:
    """The equation with an epsilon of its own."""
    return {f"epsilon {text}": with_params(twin, epsilon=float(text)) for text in texts}


def alone(of_alone: Callable[[Decimal, Inputs], Decimal], twin: Twin) -> Twin:
    """The equation with another result for groups of one."""

    def changed(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        found = list(twin(inputs, params)["advantages"])
        for places in by_group(inputs["groups"]).values():
            if len(places) == 1:
                found[places[0]] = of_alone(dec(inputs["rewards"][places[0]]), params)
        return {"advantages": found}

    return changed


def raw(twin: Twin) -> dict[str, Twin]:
    """A group of one keeps its reward, which is what a baseline of 0 and a deviation of 1 give."""

    def over_one(reward: Decimal, params: Inputs) -> Decimal:
        return reward / (1 + dec(params.get("epsilon", 0)))

    return {"a group of one keeps its reward": alone(over_one, twin)}


def with_ddof(ddof: int) -> Twin:
    """GRPO with another divisor."""

    def twin(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        return advantages.grouped(inputs, lambda r: advantages.normalised(r, dec(params["epsilon"]), ddof))

    return twin


def leave_one_out_std(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """GRPO with baseline and deviation of the others."""

    def of_group(rewards: Row) -> Row:
        found = []
        for i, reward in enumerate(rewards):
            others = [*rewards[:i], *rewards[i + 1 :]]
            spread = std(others)
            found.append(
                (reward - mean(others)) / (spread + dec(params["epsilon"])) if spread else reward - mean(others)
            )
        return found

    return advantages.grouped(inputs, of_group)


def gpg_by_reward(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """GPG whose alpha counts sequences of reward 0 as those without signal."""
    alpha = dec(len(inputs["rewards"])) / max(sum(1 for r in inputs["rewards"] if r), 1)
    centred = raw(advantages.group_centred)["a group of one keeps its reward"](inputs, params)
    return {"advantages": [alpha * a for a in centred["advantages"]]}


def gdpo_over_tokens(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """GDPO whose last step counts a sequence as often as it has tokens."""
    summed = advantages.component_sum(inputs, dec(params["epsilon"]))
    flat = [a for a, length in zip(summed, inputs["lengths"], strict=True) for _ in range(length)]
    scale, middle = (std(flat) ** 2 + dec("1e-8")).sqrt(), mean(flat)
    return {"advantages": [(a - middle) / scale for a in summed]}


def through_observations(inputs: Inputs, params: Inputs, zero: bool) -> dict[str, Any]:
    """GAE or returns that take observations for steps, with rewards and values there or with 0."""
    everywhere = [[1] * len(mask) for mask in inputs["mask"]]
    given = {"mask": everywhere}
    for key in ("token_rewards", "values"):
        if key in inputs:
            rows = zip(inputs[key], inputs["mask"], strict=True)
            given[key] = [[v if m or not zero else 0.0 for v, m in zip(r, marks, strict=True)] for r, marks in rows]
    twin = tokens.gae if "values" in inputs else tokens.discounted_returns
    found = twin(given, params)
    return {
        key: [
            [v if m else ZERO for v, m in zip(r, marks, strict=True)]
            for r, marks in zip(rows, inputs["mask"], strict=True)
        ]
        for key, rows in found.items()
    }


ZEROED = {"observations are steps of value 0": lambda inputs, params: through_observations(inputs, params, True)}
IGNORED = {"the mask is ignored": lambda inputs, params: through_observations(inputs, params, False)}


def whitened(rows: Twin, key: str, ddof: int, under_root: str) -> Twin:
    """Whitening with another divisor, and with epsilon added to the variance."""

    def twin(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        found = rows(inputs, params)[key]
        pairs = list(zip(found, inputs["mask"], strict=True))
        flat = [v for r, marks in pairs for v in kept(r, marks)]
        middle, scale = mean(flat), (std(flat, ddof) ** 2 + dec(under_root)).sqrt()
        return {
            "advantages": [[(v - middle) / scale if m else ZERO for v, m in zip(r, k, strict=True)] for r, k in pairs]
        }

    return twin


def spread_out(twin: Twin) -> Twin:
    """Advantages of sequences at their tokens."""

    def tokens(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        pairs = zip(twin(inputs, params)["advantages"], inputs["mask"], strict=True)
        return {"advantages": [[value] * len(mask) for value, mask in pairs]}

    return tokens


CENTRED_RAW = raw(advantages.group_centred)["a group of one keeps its reward"]


def dual_at(bound: str) -> Callable[[surrogates.Sequence], Row]:
    """PPO's surrogate with a dual clip that nobody asked for."""
    return lambda x: surrogates.dual_clip(replace(x, params={**x.params, "dual": bound}))


def unclamped(x: surrogates.Sequence) -> Row:
    """PPO's surrogate without a limit of the log-ratio."""
    return [surrogates.clipped(d.exp(), a, x) for d, a in x.each(x.log_ratios, x.advantages)]


def counted(twin: Twin) -> Twin:
    """Sequences without tokens count."""
    return lambda inputs, params: twin(inputs, {**params, "num_sequences": len(inputs["mask"])})


def capped(estimator: kl.Estimator, limit: str) -> kl.Estimator:
    """An estimate held in +-limit, and its gradient 0 beyond."""
    return lambda x, fixed, moved: clip(estimator(x, fixed, moved), -dec(limit), dec(limit))


def capped_value(x: Decimal, fixed: Decimal, moved: Decimal) -> Decimal:
    """The value of k3 held at 10 with the gradient of k2."""
    return min(kl.k3_of(fixed), dec(10)) + (x * x - fixed * fixed) / 2


def unbounded_k3(x: Decimal, fixed: Decimal, moved: Decimal) -> Decimal:
    """k3 without a limit."""
    return (-x).exp() - 1 + x


def stopped_weight(cap: str | None) -> Any:
    """The value of k3 (held at 10 where capped), with the gradient r x, r behind a stop-gradient."""

    def twin(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        values, slopes = [], []
        for now, reference, old in zip(
            inputs["logprobs"], inputs["reference_logprobs"], inputs["old_logprobs"], strict=True
        ):
            x, weight = dec(now) - dec(reference), ratio(dec(now) - dec(old))
            value = kl.k3_of(x)
            values.append(min(value, dec(cap)) if cap else value)
            slopes.append(weight * x)
        return {"value": values, "gradient": slopes}

    return twin


def inverse_bounds(with_ratios: bool) -> Twin:
    """Bounds on behaviour over old."""

    def of_row(x: Row, params: Inputs) -> Row:
        keep = corrections.within(ratio(-mean(x)), params)
        return [(ratio(d) if with_ratios else ONE) if keep else ZERO for d in x]

    return lambda inputs, params: corrections.by_sequence(inputs, lambda x: of_row(x, params))


def dropped_by_nan(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """A comparison with NaN is false, so that NaN at a masked token drops its sequence."""
    found = corrections.masked_geometric_with_ratios(inputs, params)["weights"]
    spoilt = [None in values for values in inputs["old_logprobs"]]
    return {"weights": [[ZERO] * len(ws) if lost else ws for ws, lost in zip(found, spoilt, strict=True)]}


def by_micro_batch(name: str) -> Twin:
    """Every micro-batch has its own denominators, and they weigh the same."""

    def twin(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        mask = inputs["mask"]
        cuts = params.get("cuts", [list(range(len(mask)))])
        slopes: dict[int, Row] = {}
        loss = ZERO
        for rows in cuts:
            part = [mask[i] for i in rows]
            values = [kept(inputs["values"][i], mask[i]) for i in rows]
            own = {**params, "prompts": [params["prompts"][i] for i in rows]} if "prompts" in params else params
            loss += weighted(name, values, part, own) / len(cuts)
            slopes |= {i: [w / len(cuts) for w in ws] for i, ws in zip(rows, weights(name, part, own), strict=True)}
        return {"total": loss, "gradient": [slopes[i] for i in range(len(mask))]}

    return twin


def by_width(twin: Twin) -> Twin:
    """The constant length is the width of the padded micro-batch."""

    def changed(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        mask, everything = inputs["mask"], {**params, "max_tokens": 1}
        cuts = params.get("cuts", [list(range(len(mask)))])
        slopes = TWINS["aggregation"]["fixed_length"](inputs, everything)["gradient"]
        for rows in cuts:
            width = max(len(mask[i]) for i in rows)
            for i in rows:
                slopes[i] = [w / width for w in slopes[i]]
        products = [
            w * v
            for ws, values, marks in zip(slopes, inputs["values"], mask, strict=True)
            for w, v in zip(kept(ws, marks), kept(values, marks), strict=True)
        ]
        return {"total": total(products), "gradient": slopes}

    return changed


def unheld_penalty(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The penalty goes on growing beyond the limit."""
    start, buffer = dec(params["max_length"] - params["buffer"]), dec(params["buffer"])
    return {"rewards": [min(ZERO, -dec(params["factor"]) * (n - start) / buffer) for n in row(inputs["lengths"])]}
