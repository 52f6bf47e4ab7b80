"""`rft-train rollouts`: sampled answers of a run or a file, listed, compared token by token, made into a data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from rft_cli.commands import arguments
from rft_cli.commands.answers.tables import page_of_group, table_of_groups
from rft_cli.commands.arguments import Arguments
from rft_cli.commands.runs import find_run, wide_console
from rft_core.errors import DataError, OptionsError
from rft_core.nearest_names import nearest_names
from rft_core.terminal_text import visible
from rft_trainer.rollout_files.selection import ORDERS, AnswerGroup, Order, Row, RowFilter, group_rows, read_groups

USAGE = """usage: rft-train rollouts RUN [OPTIONS]
       rft-train rollouts RUN --prompt ID [OPTIONS]         the best and the worst answer to a prompt, side by side
       rft-train rollouts RUN --export demonstrations|pairs --output FILE [OPTIONS]

RUN is a directory, or the name of one in runs/. Only files are read; the run may be going on. Answers are those that
the run kept: see its --save_trajectories, --rollout_log_interval and --num_trajectories_to_save. In its place may stand
a file of answers (.jsonl, .json) that rft-train eval or generate wrote with --output: all of them, without steps and
without numbers of tokens.

  --step N             of this step; otherwise of every step
  --prompt ID          to this prompt, as the first column of the table names it
  --status NAME        ok, failed, timeout, ...
  --finish NAME        stop or length
  --reward_min X       with at least this reward
  --reward_max X       with at most this reward
  --contains TEXT      with this text in the answer
  --sort ORDER         step, reward, spread or length (step)
  --most N             groups in the table (20)
  --color QUANTITY     what colours the tokens: advantage, entropy, gap (the trainer's log-prob less the engine's),
                       surprise (minus the engine's log-prob), or none (advantage)
  --export KIND        demonstrations: the best answers; pairs: the best beside the worst answer of a group
  --output FILE        where the rows go, a JSON line each
  --per_prompt N       answers of a group among demonstrations (1)
  --least_gap X        difference of rewards above which two answers are a pair (0)"""

_OPTIONS = (
    *("step", "prompt", "status", "finish", "reward_min", "reward_max", "contains", "sort", "most", "color"),
    *("export", "output", "per_prompt", "least_gap"),
)
_QUANTITIES = ("advantage", "entropy", "gap", "surprise", "none")
_EXPORTS = ("demonstrations", "pairs")


def run(argv: list[str]) -> int:
    """List groups, show one, or write a data set."""
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    parsed = arguments.parse("rollouts", argv, most=1, options=_OPTIONS)
    kind, quantity = _one_of(parsed, "export", ("", *_EXPORTS)), _one_of(parsed, "color", _QUANTITIES)
    if bool(kind) != ("output" in parsed.values):
        given, absent = ("export", "output") if kind else ("output", "export")
        do = "--output FILE.jsonl" if kind else "--export demonstrations"
        raise _refused(f"--{given} needs --{absent}", "rows go into a file of their own", do)
    idle = {"per_prompt": "demonstrations", "least_gap": "pairs"}
    for name, needed in idle.items():
        if name in parsed.values and kind != needed:
            raise _refused(f"--{name} has no effect", f"it belongs to --export {needed}", f"--export {needed}")
    chosen, order, most = (
        _filter(parsed),
        cast("Order", _one_of(parsed, "sort", ORDERS)),
        _integer(parsed, "most") or 20,
    )
    file = _answer_file(parsed)
    directory = find_run(parsed.word(0)) if file is None else None
    groups = group_rows(_answers(file), chosen, order) if file else []
    if directory:
        groups = read_groups(directory, chosen, order)
    if kind:
        return _export(parsed, kind, groups)
    if not groups:
        print("no kept answer is as asked")
        return 0
    if chosen.prompt_id:
        for group in groups[:most]:
            _show(group, directory, quantity if directory else "none")
    else:
        wide_console().print(table_of_groups(groups, most))
        shown = groups[0].prompt_id
        print(visible(f"\nbest and worst answer to one: rft-train rollouts {parsed.word(0)} --prompt {shown}"))
    return 0


def _show(group: AnswerGroup, run: Path | None, quantity: str) -> None:
    from rft.library.run import Run
    from rft.library.token_numbers import GroupTokens, group_tokens

    tokens = GroupTokens()
    if run is not None and quantity != "none":
        tokens = group_tokens(Run(run), group.step, group.prompt_id, quantity)
    console = wide_console()
    has_colors = console.is_terminal and console.color_system is not None
    console.print(page_of_group(group, tokens, quantity, colors=has_colors))


def _filter(parsed: Arguments) -> RowFilter:
    return RowFilter(
        step=_integer(parsed, "step"),
        prompt_id=parsed.values.get("prompt", ""),
        status=parsed.values.get("status", ""),
        finish_reason=parsed.values.get("finish", ""),
        reward_min=_real(parsed, "reward_min"),
        reward_max=_real(parsed, "reward_max"),
        contains=parsed.values.get("contains", ""),
    )


def _answer_file(parsed: Arguments) -> Path | None:
    """Return the file of answers that stands in the place of a run; None where a run does."""
    path = Path(parsed.word(0)).expanduser()
    if path.suffix not in (".json", ".jsonl") or path.is_dir():
        return None
    for name in ("step", "color"):
        if name in parsed.values:
            why = "a file of answers has no steps and no numbers of tokens; those are of a run"
            raise _refused(f"--{name} has no effect on {path}", why, f"rft-train rollouts {path}")
    return path


def _answers(file: Path) -> list[Row]:
    from rft.stages.evaluation_output import saved_rows

    if not file.is_file():
        raise DataError(
            code="answers.no_file",
            what=f"{file} is not there",
            where="command line",
            why="it is a file that rft-train eval or generate wrote with --output, or a run",
            do=f"rft-train eval --output {file}",
        )
    return [dict(row) for row in saved_rows(file)]


def _export(parsed: Arguments, kind: str, groups: Sequence[AnswerGroup]) -> int:
    from rft_trainer.rollout_files.exports import demonstrations, preference_pairs, write_rows

    if kind == "demonstrations":
        made = demonstrations(groups, per_prompt=_integer(parsed, "per_prompt") or 1)
    else:
        made = preference_pairs(groups, least_gap=_real(parsed, "least_gap") or 0.0)
    left = ", ".join(f"{count} {reason}" for reason, count in sorted(made.left_out.items()))
    if not made.rows:
        why = f"of {len(groups)} groups: {left}" if groups else "no kept answer is as asked"
        raise _refused("there is no row to write", why, f"rft-train rollouts {parsed.word(0)}")
    file = Path(parsed.values["output"]).expanduser()
    write_rows(file, made.rows)
    print(visible(f"{file}: {len(made.rows)} rows of {len(groups)} groups" + (f"; left out: {left}" if left else "")))
    return 0


def _one_of(parsed: Arguments, name: str, allowed: Sequence[str]) -> str:
    value = parsed.values.get(name, allowed[0])
    if value not in allowed:
        names = [one for one in allowed if one]
        near = nearest_names(value, names) or names
        raise _refused(f"--{name} {value}", f"it is one of {', '.join(names)}", f"--{name} {near[0]}")
    return value


def _integer(parsed: Arguments, name: str) -> int | None:
    text = parsed.values.get(name)
    if text is None:
        return None
    if not text.isdecimal() or (name != "step" and not int(text)):
        raise _refused(f"--{name} {text}", "it is a whole number of at least 1", f"--{name} 1")
    return int(text)


def _real(parsed: Arguments, name: str) -> float | None:
    text = parsed.values.get(name)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _refused(f"--{name} {text}", "it is a number", f"--{name} 0.5")
    return number


def _refused(what: str, why: str, do: str) -> OptionsError:
    return OptionsError(code="rollouts.options", what=what, where="command line", why=why, do=do)
