"""Comparison of every engine that can run here with the trainer's forward, on the same prompts and keys."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from rft.build.engines import choose_engine, make_engine
from rft.build.models import tokenizer_of
from rft.build.prompt_data import given_prompts, renderer_for
from rft.hub.run_settings import with_model_directories
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import Machine
from rft.run_lifecycle import environment
from rft.settings import ConformanceSettings
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import DataError, OptionsError, PreflightError, Problem, RftError
from rft_core.keyed_random import derive_key, integers
from rft_core.packed_tokens import PackedTokens
from rft_engine.registry import ENGINES, REFERENCE_ENGINE
from rft_engine.settings import ComparedEnginesSettings, DecodingEngineSettings
from rft_models.loading.context_length import model_facts
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.prompts import PromptRow
from rft_trainer.evaluation.logprob_mismatch import (
    VERDICTS,
    Measured,
    MismatchLimits,
    NextTokenLogits,
    Verdict,
    limits_of,
    measure_gap,
)
from rft_trainer.protocols import Engine
from rft_trainer.records.rollouts import Prompt

State = Literal["measured", "absent", "failed"]
TEMPERATURES = (1.0, 0.7)
TOP_PS = (1.0, 0.9)
_ROWS_OF_LOGITS = 256

BUILT_IN = (
    "Once upon a time",
    "The capital of France is",
    "12+34=",
    "def area(radius):\n    return",
    "Question: what is 7 times 8?\nAnswer:",
    '{"name": "Ada", "born":',
    "1, 1, 2, 3, 5, 8,",
    "\u5929\u7a7a\u662f\u4ec0\u4e48\u989c\u8272\uff1f",
)
"""Prose, a fact, a sum, code, a question, JSON, a series, Chinese: the prompts used when none are given."""

_DRAWN_PROMPTS, _DRAWN_TOKENS = 4, 8

_LIBRARY_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, OSError)
"""What a library under an engine raises for a model that it cannot run: a row of the table, not the end of the rest."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a comparison, and where they come from."""

    prompts: list[Prompt]
    source: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of all compared engines, and what they were compared on."""

    results: list[EngineResult]
    prompts: PromptSet
    tokenizer: HfTokenizer
    policy: CausalPolicy

    @property
    def limits(self) -> MismatchLimits:
        """The gaps that a verdict allows, in nats."""
        return limits_of(self.policy.dtype)

    @property
    def model_type(self) -> str:
        """The architecture, as config.json names it."""
        return str(self.policy.model.config.model_type)

    @property
    def dtype(self) -> str:
        """The type of the weights, such as `float32`."""
        return str(self.policy.dtype).removeprefix("torch.")


class ClosingEngine(Engine, Protocol):
    """An engine that can be closed."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DrawResult:
    """One engine under one way of drawing."""

    draw: SamplingOptions
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


def draws(max_new_tokens: int, stop_token_ids: tuple[int, ...]) -> list[SamplingOptions]:
    """Each temperature without and with top-p."""
    return [
        SamplingOptions(
            temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids
        )
        for temperature in TEMPERATURES
        for top_p in TOP_PS
    ]


def compare(
    names: Sequence[str],
    ways: Sequence[SamplingOptions],
    *,
    refuse: Callable[[str], object],
    start: Callable[[str], ClosingEngine],
    measure: Callable[[Engine, SamplingOptions], Measured],
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
    native: dict[SamplingOptions, tuple[tuple[int, ...], ...]] = {}
    for name in names:
        result = _one(name, ways, native, refuse, start, measure)
        results.append(result)
        # engines that come later are compared with its samples, token by token
        if name == REFERENCE_ENGINE:
            native = {one.draw: one.measured.samples for one in result.draws if one.measured is not None}
    return results


def _one(
    name: str,
    ways: Sequence[SamplingOptions],
    native: Mapping[SamplingOptions, tuple[tuple[int, ...], ...]],
    refuse: Callable[[str], object],
    start: Callable[[str], ClosingEngine],
    measure: Callable[[Engine, SamplingOptions], Measured],
) -> EngineResult:
    try:
        refuse(name)
    except (PreflightError, OptionsError) as error:
        return EngineResult(name, "absent", problem=error.problem)
    results: list[DrawResult] = []
    try:
        engine = start(name)
        try:
            # in the way that training updates it, whatever it read from the directory at its start
            engine.load_weights(1)
            for draw in ways:
                results.append(_drawn(engine, draw, native.get(draw), measure))
        finally:
            # before the next engine starts: two at once may not fit
            engine.close()
    except RftError as error:
        return EngineResult(name, "failed", tuple(results), error.problem)
    except _LIBRARY_ERRORS as error:
        return EngineResult(name, "failed", tuple(results), _foreign(name, error))
    return EngineResult(name, "measured", tuple(results))


def _drawn(
    engine: Engine,
    draw: SamplingOptions,
    native: tuple[tuple[int, ...], ...] | None,
    measure: Callable[[Engine, SamplingOptions], Measured],
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
        # a row of hidden states predicts the token after it
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


def compare_engines(settings: ConformanceSettings, machine: Machine, show_status: Callable[[str], None]) -> Comparison:
    """Compare the engines of the settings with the trainer's forward; `show_status` takes what happens now, as text.

    Raises:
        OptionsError: several processes, prompts that leave no room for a completion, or no prompts.
    """
    _refuse_ranks(machine)
    settings = with_model_directories(settings)
    tokenizer = tokenizer_of(settings.model)
    prompts = _prompts(settings, tokenizer)
    policy = load_policy(
        settings.model.pretrain, dtype=weights_dtype(settings.model.bf16), device=machine.device, tokenizer=tokenizer
    ).eval()
    results = _compare(settings, machine, policy, tokenizer.eos_ids, prompts.prompts, show_status)
    return Comparison(results, prompts, tokenizer, policy)


def _refuse_ranks(machine: Machine) -> None:
    if machine.ranks.world_size > 1:
        raise OptionsError(
            code="conformance.one_process",
            what=f"{machine.ranks.world_size} processes were started",
            where="the launcher",
            why="engines are compared one after another in one process; an engine takes its GPUs by itself",
            do="rft-train conformance, without torchrun",
        )


def _prompts(settings: ConformanceSettings, tokenizer: HfTokenizer) -> PromptSet:
    """Return the prompts that are given; without any, the built-in ones."""
    data, lengths = settings.data, settings.lengths
    if data.prompt or data.prompt_data:
        return PromptSet(given_prompts(data, tokenizer, lengths.prompt_max_len), data.prompt_data or "--prompt")
    room = max(1, model_facts(settings.model.pretrain).max_positions // 2)
    return _built_in(settings, tokenizer, min(room, lengths.prompt_max_len))


def _built_in(settings: ConformanceSettings, tokenizer: HfTokenizer, max_tokens: int) -> PromptSet:
    """The built-in texts that the tokenizer can write, cut at `max_tokens`; drawn tokens where it can write none."""
    limit = settings.data.max_samples or len(BUILT_IN)
    renderer, prompts = renderer_for(settings.data, tokenizer), list[Prompt]()
    for number, text in enumerate(BUILT_IN):
        try:
            row = renderer.render(PromptRow(f"text:{number}", text, None, None, None, "text", number))
        except DataError as error:
            if error.problem.code != "text.unknown_character":
                raise
            continue
        if row.token_ids:
            prompts.append(Prompt(row.prompt_id, row.token_ids[:max_tokens], row.text, None, "text"))
    if prompts:
        return PromptSet(prompts[:limit], "built-in texts (--prompt_data gives your own)")
    drawn = integers(
        derive_key(settings.output.seed, "prompts"), _DRAWN_PROMPTS * _DRAWN_TOKENS, 0, tokenizer.vocab_size
    )
    rows = drawn.reshape(_DRAWN_PROMPTS, _DRAWN_TOKENS)[:, :max_tokens]
    ids = [tuple(int(token) for token in row) for row in rows]
    prompts = [Prompt(f"drawn:{i}", row, tokenizer.decode(row), None, "drawn") for i, row in enumerate(ids)]
    return PromptSet(prompts[:limit], "drawn tokens, since the tokenizer cannot write the built-in texts")


def _compare(
    settings: ConformanceSettings,
    machine: Machine,
    policy: CausalPolicy,
    stop_token_ids: tuple[int, ...],
    prompts: list[Prompt],
    show_status: Callable[[str], None],
) -> list[EngineResult]:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    response = min(settings.lengths.generate_max_len, model_facts(settings.model.pretrain).max_positions - longest)
    if response < 1:
        raise OptionsError(
            code="conformance.no_room",
            what=f"the longest prompt has {longest} tokens, and the model has {longest + response} positions",
            where="--prompt_data",
            why="a completion needs room after its prompt",
            do=f"--prompt_max_len {max(1, longest + response - 1)}, with prompts that are shorter",
        )
    token_ids = [prompt.token_ids for prompt in prompts]
    keys = [
        [derive_key(settings.output.seed, "sample", 0, i, j) for j in range(settings.data.n_samples_per_prompt)]
        for i in range(len(prompts))
    ]
    logits, limits = next_token_logits(policy), limits_of(policy.dtype)

    def start(name: str) -> ClosingEngine:
        show_status(f"{name} starts")
        engine = make_engine(
            _one_engine(settings.engine, name), machine, policy, settings.model.pretrain, longest + response
        )
        return cast("ClosingEngine", engine)

    def measure(engine: Engine, draw: SamplingOptions) -> Measured:
        show_status(f"draws and scores at temperature {draw.temperature:g}, top-p {draw.top_p:g}")
        return measure_gap(engine, policy, token_ids, keys, draw, limits=limits, logits=logits, device=machine.device)

    return compare(
        settings.engine.names,
        draws(response, stop_token_ids),
        refuse=lambda name: choose_engine(_one_engine(settings.engine, name), machine.device),
        start=start,
        measure=measure,
    )


def _one_engine(settings: ComparedEnginesSettings, name: str) -> DecodingEngineSettings:
    """The settings of one of the compared engines; the names are known ones."""
    taken = {item.name: getattr(settings, item.name) for item in fields(settings) if item.name != "engines"}
    return DecodingEngineSettings(**taken, engine_type=name)  # pyright: ignore[reportArgumentType]


def full_record(
    settings: ConformanceSettings, machine: Machine, comparison: Comparison, prompts: str
) -> dict[str, Any]:
    """Every figure with settings and environment, for JSON; `prompts` describes the prompts."""
    here = environment(machine)
    for package in (kind.package for kind in ENGINES.values() if kind.package):
        with contextlib.suppress(PackageNotFoundError):
            here["versions"][package] = version(package)
    return {
        "model": settings.model.pretrain,
        "model_type": comparison.model_type,
        "dtype": comparison.dtype,
        "prompts": prompts,
        "settings": asdict(settings),
        "limits": asdict(comparison.limits),
        "engines": as_record(comparison.results),
        "environment": here,
    }
