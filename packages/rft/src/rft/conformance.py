"""Comparison of every engine that can run here with the trainer's forward, on the same prompts and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from rft_core.errors import OptionsError, PreflightError, Problem, RftError
from rft_core.packed_tokens import PackedTokens
from rft_models.policy.causal_policy import CausalPolicy
from rft_trainer.evaluation.logprob_mismatch import VERDICTS, Draw, Measured, NextTokenLogits, Verdict
from rft_trainer.protocols import Engine

State = Literal["measured", "absent", "failed"]
TEMPERATURES = (1.0, 0.7)
TOP_PS = (1.0, 0.9)
_ROWS_OF_LOGITS = 256

_LIBRARY_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, OSError)
"""What a library under an engine raises for a model that it cannot run: a row of the table, not the end of the rest."""


class ClosingEngine(Engine, Protocol):
    """An engine that can be closed."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DrawResult:
    """One engine under one way of drawing."""

    draw: Draw
    measured: Measured | None
    problem: Problem | None = None
    """Why nothing was measured."""
    same: int | None = None
    """Samples whose tokens are those of the native engine; None where that one did not draw."""


@dataclass(frozen=True, slots=True)
class EngineResult:
    """Result of one engine: its state, draws and problem."""

    name: str
    state: State
    draws: tuple[DrawResult, ...] = ()
    problem: Problem | None = None
    """Why it is absent, or how it failed."""

    @property
    def verdict(self) -> Verdict | None:
        """Verdict of the engine's worst draw; None where nothing was measured."""
        verdicts: list[Verdict] = [result.measured.verdict for result in self.draws if result.measured is not None]
        return max(verdicts, key=VERDICTS.index) if verdicts else None

    @property
    def worst(self) -> DrawResult | None:
        """The draw with the engine's verdict and the largest gap; None where nothing was measured."""
        measured = [result for result in self.draws if result.measured is not None]
        return max(measured, key=_badness, default=None)


def draws(max_new_tokens: int, stop_token_ids: tuple[int, ...]) -> list[Draw]:
    """Each temperature without and with top-p."""
    return [
        Draw(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids)
        for temperature in TEMPERATURES
        for top_p in TOP_PS
    ]


def compare(
    names: Sequence[str],
    ways: Sequence[Draw],
    *,
    refuse: Callable[[str], object],
    start: Callable[[str], ClosingEngine],
    measure: Callable[[Engine, Draw], Measured],
) -> list[EngineResult]:
    """Start, measure and close each engine; a failure of one is its row and ends no other.

    Args:
        names: the engines; the native one first, if the tokens of the others are to be compared with its own.
        ways: how tokens are drawn.
        refuse: raises where an engine is not installed or cannot run on this machine.
        start: the engine with weights loaded or to be loaded as version 1.
        measure: one draw beside the trainer's forward.
    """
    results: list[EngineResult] = []
    native: dict[Draw, tuple[tuple[int, ...], ...]] = {}
    for name in names:
        result = _one(name, ways, native, refuse, start, measure)
        results.append(result)
        if name == "native":
            native = {one.draw: one.measured.samples for one in result.draws if one.measured is not None}
    return results


def _one(
    name: str,
    ways: Sequence[Draw],
    native: Mapping[Draw, tuple[tuple[int, ...], ...]],
    refuse: Callable[[str], object],
    start: Callable[[str], ClosingEngine],
    measure: Callable[[Engine, Draw], Measured],
) -> EngineResult:
    try:
        refuse(name)
    except (PreflightError, OptionsError) as error:
        return EngineResult(name, "absent", problem=error.problem)
    results: list[DrawResult] = []
    try:
        engine = start(name)
        try:
            engine.load_weights(1)
            for draw in ways:
                results.append(_drawn(engine, draw, native.get(draw), measure))
        finally:
            engine.close()
    except RftError as error:
        return EngineResult(name, "failed", tuple(results), error.problem)
    except _LIBRARY_ERRORS as error:
        return EngineResult(name, "failed", tuple(results), _foreign(name, error))
    return EngineResult(name, "measured", tuple(results))


def _drawn(
    engine: Engine,
    draw: Draw,
    native: tuple[tuple[int, ...], ...] | None,
    measure: Callable[[Engine, Draw], Measured],
) -> DrawResult:
    try:
        measured = measure(engine, draw)
    except OptionsError as error:  # a way of drawing that this engine refuses by itself
        return DrawResult(draw, None, error.problem)
    same = None if native is None else sum(a == b for a, b in zip(measured.samples, native, strict=True))
    return DrawResult(draw, measured, same=same)


def _foreign(name: str, error: Exception) -> Problem:
    lines = str(error).strip().splitlines()
    return Problem(
        code="conformance.engine_failed",
        what=f"{name}: {type(error).__name__}: {lines[0] if lines else 'without a message'}",
        where=f"engine {name}",
        why="the engine, or the library under it, cannot run this model as it is",
        do="train with an engine that is measured here",
    )


def _badness(result: DrawResult) -> tuple[int, int, float]:
    """Larger is worse; a gap that is not a number is worse than any number."""
    measured = result.measured
    assert measured is not None
    largest = measured.gap.largest
    return VERDICTS.index(measured.verdict), int(not largest < math.inf), largest


def next_token_logits(policy: CausalPolicy) -> NextTokenLogits:
    """Return a function that yields full rows of the trainer's logits, `_ROWS_OF_LOGITS` at a time."""

    def chunks(tokens: PackedTokens) -> Iterable[Tensor]:
        hidden_TD = policy.hidden_states(tokens)
        for rows_R in torch.split(tokens.targets_T.nonzero()[:, 0] - 1, _ROWS_OF_LOGITS):
            yield policy.head.logits(hidden_TD[rows_R])

    return chunks


def as_record(results: Sequence[EngineResult]) -> list[dict[str, object]]:
    """Every figure by name, for JSON; a number that is not finite is null."""
    return [
        {
            "engine": result.name,
            "state": result.state,
            "verdict": result.verdict,
            "problem": asdict(result.problem) if result.problem else None,
            "draws": [_draw_record(one) for one in result.draws],
        }
        for result in results
    ]


def _draw_record(result: DrawResult) -> dict[str, object]:
    record: dict[str, object] = {"temperature": result.draw.temperature, "top_p": result.draw.top_p}
    measured = result.measured
    if measured is None:
        return record | {"problem": asdict(result.problem) if result.problem else None}
    return record | {
        "verdict": measured.verdict,
        "gap": _finite(asdict(measured.gap)),
        "worst": _finite(asdict(measured.worst)),
        "tokens_beyond": measured.num_beyond,
        "kept_mass": None if measured.kept_mass is None else _finite(asdict(measured.kept_mass)),
        "worst_kept": None if measured.worst_kept is None else _finite(asdict(measured.worst_kept)),
        "tokens_outside": measured.num_outside,
        "samples": len(measured.samples),
        "samples_as_native": result.same,
    }


def _finite(values: dict[str, object]) -> dict[str, object]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
