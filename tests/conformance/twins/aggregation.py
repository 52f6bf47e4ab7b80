"""Aggregations: what the mean over tokens is, as a weight of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.twins.numbers import ONE, ZERO, Decimal, Row, dec, kept, total

Inputs = Mapping[str, Any]


def weights(name: str, mask: Sequence[Sequence[Any]], params: Inputs) -> list[Row]:
    """The weight of every token. The number of sequences is that of those with tokens, unless it is given."""
    lengths = [sum(bool(m) for m in row) for row in mask]
    num_sequences = dec(params.get("num_sequences", sum(1 for length in lengths if length)))
    num_tokens = dec(params.get("num_tokens", sum(lengths)))
    prompts = params.get("prompts", range(len(mask)))
    of_prompt = {g: sum(n for n, h in zip(lengths, prompts, strict=True) if h == g) for g in prompts}
    num_prompts = dec(sum(1 for length in of_prompt.values() if length))

    def of_token(length: int, prompt: int) -> Decimal:
        if name == "token_mean":
            return ONE / num_tokens
        if name == "token_sum":
            return ONE
        if name == "prompt_mean_token_mean":
            return ONE / (num_prompts * of_prompt[prompt])
        if name == "sequence_mean_token_mean":
            return ONE / (num_sequences * length)
        if name == "sequence_mean_token_sum":
            return ONE / num_sequences
        assert name == "fixed_length", name
        return ONE / (num_sequences * dec(params["max_tokens"]))

    rows = zip(mask, lengths, prompts, strict=True)
    return [[of_token(length, prompt) if m else ZERO for m in row] for row, length, prompt in rows]


def weighted(name: str, values: Sequence[Sequence[Any]], mask: Sequence[Sequence[Any]], params: Inputs) -> Decimal:
    """The weighted sum of values that stand at the sampled tokens alone."""
    of_tokens = weights(name, mask, params)
    products = [
        w * v
        for weight_row, value_row, mask_row in zip(of_tokens, values, mask, strict=True)
        for w, v in zip(kept(weight_row, mask_row), value_row, strict=True)
    ]
    return total(products)


def _twin(name: str) -> Any:
    def twin(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        mask = inputs["mask"]
        values = [kept(row, marks) for row, marks in zip(inputs["values"], mask, strict=True)]
        return {"total": weighted(name, values, mask, params), "gradient": weights(name, mask, params)}

    return twin


TWINS = {
    name: _twin(name)
    for name in (
        *("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length"),
        *("token_sum", "prompt_mean_token_mean"),
    )
}
