"""Page of a comparison of engines: a table, the largest gaps by token, and one verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rft.conformance import DrawResult, EngineResult
from rft_core.errors import OptionsError, PreflightError, Problem, RftError, ServiceError
from rft_engine.registry import ENGINES, REFERENCE_ENGINE
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.evaluation.logprob_mismatch import VERDICTS, Gap, Measured, MismatchLimits, TokenGap
from rft_trainer.records.rollouts import Prompt

_STYLES = {"equal": "green", "close": "yellow", "apart": "bold red", "failed": "red"}
_COLUMNS = ("T", "top-p", "tokens", "mean", "99 %", "largest", "kept mass", "as native")
_READING = (
    "mean, 99 %, largest: |log p of the engine - log p of the trainer| of the drawn tokens, in nats",
    "kept mass: the largest such distance of the log of what top-p kept",
    "as native: samples whose tokens are those that the native engine draws with the same keys",
)


def page(
    results: Sequence[EngineResult], facts: Sequence[tuple[str, str]], prompts: Sequence[Prompt], tokenizer: HfTokenizer
) -> RenderableType:
    """Return the page: the facts, the table, its legend, and the outcome."""
    head = Table.grid(padding=(0, 2, 0, 0))
    head.add_column(style="dim", no_wrap=True)
    for name, text in facts:
        head.add_row(name, Text(text))
    tail = Table.grid(padding=(0, 2, 0, 0))
    tail.add_column(style="dim", no_wrap=True)
    for name, text in _tail(results, prompts, tokenizer):
        tail.add_row(name, text)
    reading = [Text(f"  {line}", "dim") for line in _READING]
    return Group(head, Text(), _table(results), Text(), *reading, Text(), tail)


def facts(model: str, kind: str, prompts: str, limits: MismatchLimits, dtype: str) -> list[tuple[str, str]]:
    """Return the compared model and prompts, and the limits of a verdict."""
    limits_text = (
        f"nats, for {dtype} weights: equal up to {limits.equal:g} at every token; "
        f"close up to {limits.largest:g}, and {limits.mean:g} on average"
    )
    return [("model", f"{model}: {kind}"), ("prompts", prompts), ("limits", limits_text)]


def _table(results: Sequence[EngineResult]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("engine", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for result in results:
        name = Text(result.name, "bold")
        for draw in result.draws:
            table.add_row(name, *_cells(draw))
            name = Text()  # the name stands on the first line of its engine alone
        if result.state != "measured":
            state = _absence(result) if result.state == "absent" else "failed"
            table.add_row(name, *["-"] * len(_COLUMNS), Text(state, _STYLES.get(state, "dim")))
    return table


def _cells(result: DrawResult) -> list[RenderableType]:
    draw, measured = result.draw, result.measured
    ways = [f"{draw.temperature:g}", f"{draw.top_p:g}"]
    if measured is None:
        return [*ways, *["-"] * (len(_COLUMNS) - 2), Text("refused", "dim")]
    gap, mass = measured.gap, measured.kept_mass
    return [
        *ways,
        f"{gap.num_tokens:,}",
        *(f"{value:.1e}" for value in (gap.mean, gap.p99, gap.largest)),
        "-" if mass is None else f"{mass.largest:.1e}",
        "-" if result.same is None else f"{result.same}/{len(measured.samples)}",
        Text(measured.verdict, _STYLES[measured.verdict]),
    ]


def _absence(result: EngineResult) -> str:
    assert result.problem is not None
    return "not installed" if result.problem.code == "engine.not_installed" else "not here"


def _tail(results: Sequence[EngineResult], prompts: Sequence[Prompt], tokenizer: HfTokenizer) -> list[tuple[str, Text]]:
    """Return one line for each engine with a problem or a gap, and the verdict."""
    lines: list[tuple[str, Text]] = []
    for result in results:
        if result.problem is not None:
            lines.append((result.name, Text(_why_not(result))))
        for draw in result.draws:
            if draw.problem is not None:
                lines.append((result.name, Text(f"{_way(draw)}: {draw.problem.what}; {draw.problem.why}")))
        worst = result.worst
        if worst is not None and result.verdict != "equal":
            lines.append((result.name, Text(f"largest gap at {place(worst, prompts, tokenizer)}")))
    return [*lines, ("verdict", _verdict(results))]


def _why_not(result: EngineResult) -> str:
    """Return the engine's problem as text; of one that is not installed, the command that installs it."""
    problem = result.problem
    assert problem is not None
    if problem.code == "engine.not_installed":
        return f"not installed; {_installs(problem)}"
    return f"{problem.what}; {problem.why}; {problem.do}"


def _installs(problem: Problem) -> str:
    """The command, without the other engine that a run could take."""
    return problem.do.partition(", or --engine_type")[0]


def _verdict(results: Sequence[EngineResult]) -> Text:
    """The worst outcome, the engines that have it, and then those with another."""
    outcomes = {result.name: _outcome(result) for result in results}
    order = ("apart", "failed", "close", "equal", "not here", "not installed")
    present = [outcome for outcome in order if outcome in outcomes.values()]
    named = [
        ", ".join(name for name, outcome in outcomes.items() if outcome == shown) + (f" {shown}" if number else "")
        for number, shown in enumerate(present)
    ]
    return Text.assemble((present[0], _STYLES.get(present[0], "bold")), f": {'; '.join(named)}")


def _outcome(result: EngineResult) -> str:
    if result.state == "absent":
        return _absence(result)
    return "failed" if result.state == "failed" and result.verdict != "apart" else result.verdict or "not here"


def _way(result: DrawResult) -> str:
    return f"temperature {result.draw.temperature:g}, top-p {result.draw.top_p:g}"


def place(result: DrawResult, prompts: Sequence[Prompt], tokenizer: HfTokenizer) -> str:
    """The token with the largest gap of this draw, with both values."""
    measured = result.measured
    assert measured is not None
    token, noun = _worst(measured)
    text = tokenizer.decode([token.token_id])
    return (
        f"{_way(result)}: {prompts[token.prompt].prompt_id}, sample {token.sample}, token {token.position} "
        f"{text!r} (id {token.token_id}): {noun} {token.engine:.6f} in the engine, {token.trainer:.6f} in the trainer"
    )


def _worst(measured: Measured) -> tuple[TokenGap, str]:
    """Return the worst token and its quantity: the kept mass where it alone is worse than the log-probs."""
    mass = measured.kept_mass
    only_mass = mass is not None and VERDICTS.index(mass.verdict(measured.limits)) > VERDICTS.index(
        measured.gap.verdict(measured.limits)
    )
    if only_mass and measured.worst_kept is not None:
        return measured.worst_kept, "log kept mass"
    return measured.worst, "log p"


def failure(
    results: Sequence[EngineResult],
    asked: bool,
    fp8: bool,
    bf16: bool,
    prompts: Sequence[Prompt],
    tokenizer: HfTokenizer,
) -> RftError | None:
    """Return the command's error: an engine apart, one that failed, one asked for by name and absent; else None."""
    apart = [result for result in results if result.verdict == "apart"]
    if apart:
        return _apart(apart[0], [result.name for result in apart], fp8, bf16, prompts, tokenizer)
    for result in results:
        if result.state == "failed":
            assert result.problem is not None
            return ServiceError(**_fields(result))
    for result in results:
        if asked and result.state == "absent":
            assert result.problem is not None
            kind = PreflightError if result.problem.code == "engine.not_installed" else OptionsError
            return kind(**_fields(result))
    return None


def _fields(result: EngineResult) -> dict[str, str]:
    problem = result.problem
    assert problem is not None
    fields = {name: getattr(problem, name) for name in ("code", "what", "where", "why", "do")}
    fields["state"] = "what the page shows was measured; nothing was changed"
    if result.state == "absent":
        fields["where"] = f"--engines {result.name}"
    if problem.code == "engine.not_installed":
        fields |= {"what": f"{result.name} is not installed in this environment", "do": _installs(problem)}
    return fields


def _apart(
    result: EngineResult,
    names: Sequence[str],
    fp8: bool,
    bf16: bool,
    prompts: Sequence[Prompt],
    tokenizer: HfTokenizer,
) -> ServiceError:
    worst = result.worst
    assert worst is not None
    measured = worst.measured
    assert measured is not None
    return ServiceError(
        code="conformance.apart",
        what=f"{' and '.join(names)} apart from the trainer: {_size(measured)}",
        where=place(worst, prompts, tokenizer),
        why=_pattern(result),
        state="nothing was trained and nothing was changed",
        do=_remedy(result.name, fp8, bf16),
    )


def _size(measured: Measured) -> str:
    gap, limits = measured.gap, measured.limits
    parts: list[str] = []
    if gap.verdict(limits) == "apart":
        parts.append(
            f"log-probs differ by {_range(gap)}; {measured.num_beyond:,} of {gap.num_tokens:,} tokens by more than "
            f"{limits.largest:g}"
        )
    if measured.kept_mass is not None and measured.kept_mass.verdict(limits) == "apart":
        parts.append(f"logs of the mass that top-p kept by {_range(measured.kept_mass)}")
    if measured.num_outside:
        parts.append(f"{measured.num_outside:,} tokens are not among those that top-p keeps")
    return ", ".join(parts)


def _range(gap: Gap) -> str:
    return f"up to {gap.largest:.3g} nats, on average {gap.mean:.3g}"


def _pattern(result: EngineResult) -> str:
    """Return the property that the draws apart have in common, as text."""
    measured = [(one.draw, one.measured) for one in result.draws if one.measured is not None]
    apart = [(draw, one) for draw, one in measured if one.verdict == "apart"]
    by_logprobs = [(draw, one) for draw, one in apart if one.gap.verdict(one.limits) == "apart"]
    if not by_logprobs:
        return (
            "log-probs agree, but the mass kept by top-p does not: the engine cuts differently, or reports another mass"
        )
    # the patterns that name a setting come first: a share of the tokens says less
    if all(draw.temperature != 1.0 for draw, _ in apart) and len(apart) < len(measured):
        return f"only at temperature {apart[0][0].temperature:g}: not the log-probs of the logits divided by it"
    if all(draw.top_p < 1.0 for draw, _ in apart) and len(apart) < len(measured):
        return f"only with top-p {apart[0][0].top_p:g}: log-probs of the cut distribution, or a different cut"
    share = max(one.num_beyond / one.gap.num_tokens for _, one in by_logprobs)
    if share >= 0.5:
        return f"{share:.0%} of the tokens: other weights, or a forward that computes something else"
    return f"{share:.2%} of the tokens, the others agree: single tokens or places, or precision"


def _remedy(name: str, fp8: bool, bf16: bool) -> str:
    correct = "train with --off_policy_correction tis"
    if fp8 and not ENGINES[name].can.shares_weights:
        return f"leave --engine_fp8 out and compare again, or {correct}"
    if bf16:
        return f"leave --bf16 out and compare again, or {correct}"
    return (
        f"{correct}, or with an engine that is not apart"
        if name == REFERENCE_ENGINE
        else f"--engine_type native, or {correct}"
    )
