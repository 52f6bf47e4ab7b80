"""Algorithm's part of the plan page: its components with their numbers, and its controllers."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import cast

from rft.build.algorithm import algorithm_record
from rft.settings import RlSettings


def algorithm_lines(settings: RlSettings) -> list[str]:
    """Return the algorithm as lines of text: every component with its numbers, and its controllers."""
    record = algorithm_record(settings)
    constant = f" (by {record.max_tokens} tokens)" if record.max_tokens else ""
    texts = [f"{record.name or type(record).__name__}: advantage {component_text(record.advantage)}"]
    texts.append(f"surrogate {component_text(record.surrogate)}, {record.aggregation.replace('_', ' ')}" + constant)
    if record.correction.is_active:
        texts.append(
            f"off-policy correction {component_text(record.correction)}; log-probs are computed again before a step"
        )
    if record.needs_reference:
        texts.append(
            f"divergence from the reference: {record.kl_estimator} x {record.kl_coef:g} in the {record.kl_place}"
        )
    if settings.teacher.teacher_pretrain:
        texts.append(
            f"teacher {settings.teacher.teacher_pretrain}: {settings.teacher.teacher_kl_coef:g} x (its log-prob - the "
            "policy's) is added to the advantage of every token"
        )
    if record.drift_coef > 0:
        texts.append(f"drift from the start of the step: x {record.drift_coef:g} in the loss")
    if settings.algorithm.kl_target is not None:
        which = "drift" if record.drift_coef > 0 else "divergence"
        texts.append(f"kl_target {settings.algorithm.kl_target:g} nats a token moves the weight of the {which}")
    if record.entropy_coef:
        texts.append(f"entropy bonus x {record.entropy_coef:g}")
    texts += [
        text
        for text, on in (
            ("advantages are normalised over all tokens of the step", record.normalise_advantages),
            (f"advantages are clipped at {record.advantage_clip:g}", record.advantage_clip),
            (f"the surrogate learns from {record.high_entropy_fraction:g} of the tokens", record.needs_old_entropy),
            ("groups without signal are replaced by sampling more prompts", record.dynamic_sampling),
            (
                f"the first token is drawn at temperature {settings.sampling.first_token_temperature:g}; the weight of "
                "its gradient is the ratio to the policy's own probability (the correction)",
                settings.sampling.use_fire,
            ),
        )
        if on
    ]
    return texts


def component_text(choice: object) -> str:
    """Return a component with its numbers as text."""
    numbers = ", ".join(f"{f.name} {_value_text(getattr(choice, f.name))}" for f in fields(choice))  # type: ignore[arg-type]
    return f"{type(choice).__name__}({numbers})" if numbers else type(choice).__name__


def _value_text(value: object) -> str:
    # a component may be made of others
    if isinstance(value, tuple):
        return " and ".join(_value_text(one) for one in cast("tuple[object, ...]", value))
    return component_text(value) if is_dataclass(value) else str(value)
