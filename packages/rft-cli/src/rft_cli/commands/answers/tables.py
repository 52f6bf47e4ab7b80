"""Pages of sampled answers: groups of answers, and the best beside the worst of one, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from rft.library.token_numbers import GroupTokens, ShadedTokens
from rft_trainer.rollout_files.selection import AnswerGroup, Row
from rft_trainer.runs.reader import as_object, is_number

_CUT = 48
_STRENGTHS = 4
_LEGENDS = {
    "advantage": "behind each token: its advantage",
    "entropy": "behind each token: entropy where it was drawn, in nats",
    "gap": "behind each token: log-prob of the trainer less that of the engine, in nats",
    "surprise": "behind each token: minus its log-prob, in nats",
}
_BLUE, _RED = ((88, 140, 220), (215, 95, 80))


def table_of_groups(groups: Sequence[AnswerGroup], most: int) -> RenderableType:
    """Return a line a group: rewards, lengths, and the best answer."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("step", "prompt", "answers", "reward", "best", "worst", "tokens"):
        table.add_column(name, justify="left" if name == "prompt" else "right", no_wrap=True)
    table.add_column("best answer", overflow="ellipsis", no_wrap=True)
    for group in groups[:most]:
        scored = group.scored
        table.add_row(
            str(group.step),
            Text(group.prompt_id, "bold"),
            str(len(group.rows)),
            _number(group.mean),
            *((_number(row["reward"]) for row in (scored[0], scored[-1])) if scored else ("", "")),
            _lengths(group.rows),
            Text(_one_line(scored[0]["response"]) if scored else _missing(group), "" if scored else "yellow"),
        )
    if len(groups) <= most:
        return table
    return Group(table, Text(f"{len(groups) - most} further groups: --most {len(groups)} shows all", "dim"))


def page_of_group(group: AnswerGroup, tokens: GroupTokens, quantity: str, *, colors: bool = True) -> RenderableType:
    """Return the prompt of a group, and its best and worst answers beside one another.

    Args:
        group: with one answer at least.
        tokens: its answers' tokens, as far as they have numbers.
        quantity: name of the numbers.
        colors: whether the console has some; otherwise each number stands behind its token.
    """
    scored = group.scored or group.rows
    ends = scored if len(scored) < 2 else [scored[0], scored[-1]]
    table = Table(expand=True, padding=(0, 1), show_lines=False)
    for row, title in zip(ends, ("best", "worst") if len(ends) > 1 else ("answer",), strict=True):
        table.add_column(f"{title}: {_facts(row)}", ratio=1, overflow="fold")
    largest = max((abs(n) for one in tokens.answers.values() for n in one.numbers if math.isfinite(n)), default=0.0)
    shown = largest if colors else None
    table.add_row(*(_answer(row, tokens.answers.get(row.get("sample", -1)), shown) for row in ends))
    first = group.rows[0]
    head = Text.assemble((group.prompt_id, "bold"), f"  step {group.step}  {len(group.rows)} answers")
    asked = Text.assemble(("prompt  ", "dim"), str(first.get("prompt")))
    wanted = [] if first.get("label") is None else [Text.assemble(("label   ", "dim"), str(first.get("label")))]
    if tokens.why_none or not tokens.answers:
        below = Text(tokens.why_none, "yellow")
    else:
        below = _legend(quantity, largest) if colors else Text(_LEGENDS[quantity])
    return Group(head, asked, *wanted, table, below)


def _answer(row: Row, shaded: ShadedTokens | None, largest: float | None) -> Text:
    """Return the answer, its tokens coloured by their share of `largest`; None: with the numbers as text."""
    if shaded is None:
        return Text(str(row.get("response")))
    text = Text()
    for piece, number in zip(shaded.pieces, shaded.numbers, strict=True):
        if largest is None:
            text.append(f"{piece}[{number:+.3g}]")
        else:
            text.append(piece, _style(number, largest))
    return text


def _style(number: float, largest: float) -> Style:
    """Return blue for numbers above 0 and red below, in four strengths; underlined where it is no number."""
    if not math.isfinite(number):
        return Style(underline=True)
    strength = math.ceil(abs(number) / largest * _STRENGTHS) if largest else 0
    if not strength:
        return Style()
    share = strength / _STRENGTHS
    red, green, blue = (round(40 + (part - 40) * share) for part in (_BLUE if number > 0 else _RED))
    return Style(color="white", bgcolor=f"rgb({red},{green},{blue})")


def _legend(quantity: str, largest: float) -> Text:
    if not largest:
        return Text(f"{quantity}: 0 at every token", "dim")
    text = Text(f"{quantity} a token: ", "dim")
    for step in range(-_STRENGTHS, _STRENGTHS + 1, 2):
        number = largest * step / _STRENGTHS
        text.append(f" {number:+.3g} ", _style(number, largest))
    return text


def _facts(row: Row) -> str:
    reward = row.get("reward")
    parts = ", ".join(f"{name} {_number(part)}" for name, part in as_object(row.get("breakdown")).items())
    scored = f"reward {_number(reward)}" if is_number(reward) else str(row.get("failure") or row.get("status"))
    more = f" ({parts})" if parts and len(as_object(row.get("breakdown"))) > 1 else ""
    return f"{scored}{more}, {row.get('num_tokens')} tokens, {row.get('finish_reason')}, sample {row.get('sample')}"


def _number(value: object) -> str:
    return f"{value:.3g}" if is_number(value) else ""


def _lengths(rows: Sequence[Row]) -> str:
    lengths = [int(row["num_tokens"]) for row in rows if is_number(row.get("num_tokens"))]
    if not lengths:
        return ""
    return str(lengths[0]) if min(lengths) == max(lengths) else f"{min(lengths)}-{max(lengths)}"


def _missing(group: AnswerGroup) -> str:
    row = group.rows[0]
    return _one_line(row.get("detail") or row.get("failure") or row.get("status"))


def _one_line(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _CUT else text[: _CUT - 1] + "\u2026"
