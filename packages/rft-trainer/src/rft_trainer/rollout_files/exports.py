"""Data sets made of a run's rollouts: demonstrations of the best answers, and pairs of a better and a worse one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rft_core.durable_files import encode_record, replace_text
from rft_core.errors import OptionsError
from rft_trainer.rollout_files.selection import AnswerGroup, Row


@dataclass(frozen=True, slots=True)
class ExportedRows:
    """Rows of a data set, and how many groups gave none, by the reason."""

    rows: list[Row]
    left_out: dict[str, int]


def demonstrations(groups: Sequence[AnswerGroup], *, per_prompt: int = 1) -> ExportedRows:
    """Return the best answers as rows of `rft-train sft`: input, output, and where they come from.

    Rejection sampling, where `groups` are selected by a least reward; best of n, where they are not. An answer that was
    given twice to a prompt is one row.

    Args:
        groups: of one run, in any order.
        per_prompt: answers of a group at the most.
    """
    left_out: Counter[str] = Counter()
    rows: dict[tuple[str, str], Row] = {}
    for group in groups:
        if not _is_text(group, left_out):
            continue
        best: dict[str, Row] = {}
        for row in _texts(group):
            best.setdefault(str(row["response"]), row)
        for row in list(best.values())[:per_prompt]:
            made = {"input": row["prompt"], "output": row["response"], **_origin(row), "reward": row["reward"]}
            rows.setdefault((str(row["prompt"]), str(row["response"])), made)
    return ExportedRows(list(rows.values()), dict(left_out))


def preference_pairs(groups: Sequence[AnswerGroup], *, least_gap: float = 0.0) -> ExportedRows:
    """Return the best beside the worst answer of each group: prompt, chosen, rejected, margin.

    Args:
        groups: of one run, in any order.
        least_gap: difference of their rewards above which two answers are a pair.
    """
    left_out: Counter[str] = Counter()
    rows: dict[tuple[str, ...], Row] = {}
    for group in groups:
        if not _is_text(group, left_out):
            continue
        best, worst = _texts(group)[0], _texts(group)[-1]
        margin = best["reward"] - worst["reward"]
        if margin <= least_gap:
            left_out["equal rewards" if not least_gap else "too small a difference"] += 1
            continue
        made = {"prompt": best["prompt"], "chosen": best["response"], "rejected": worst["response"]}
        rows.setdefault(tuple(map(str, made.values())), {**made, "margin": margin, **_origin(best)})
    return ExportedRows(list(rows.values()), dict(left_out))


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSON lines, whole or not at all; a file that is there is not replaced.

    Raises:
        OptionsError: the file is there.
        StorageError: the disk refuses.
    """
    if file.exists():
        raise OptionsError(
            code="rollouts.export_exists",
            what=f"{file} is there already",
            where="--output",
            why="an export never overwrites files",
            state="nothing was written",
            do=f"--output {_free(file)}",
        )
    replace_text(file, "".join(encode_record(row) + "\n" for row in rows))


def _is_text(group: AnswerGroup, left_out: Counter[str]) -> bool:
    """Return whether a group has scored answers of one turn without images; count the reason where it has not."""
    reason = next(_reasons(group), "")
    if reason:
        left_out[reason] += 1
    return not reason


def _texts(group: AnswerGroup) -> list[Row]:
    """Return the scored answers that have text, the best first: a data set refuses the others."""
    return [row for row in group.scored if str(row["response"]).strip()]


def _reasons(group: AnswerGroup) -> Iterator[str]:
    if not group.scored:
        yield "without a reward"
    elif not _texts(group):
        yield "without text in any answer"
    if any(row.get("turns") for row in group.rows):
        yield "conversations of several turns"
    if any(row.get("images") for row in group.rows):
        yield "prompts with images"


def _origin(row: Row) -> Row:
    return {"prompt_id": row.get("prompt_id"), "step": row.get("step")}


def _free(file: Path) -> Path:
    numbered = (file.with_stem(f"{file.stem}-{number}") for number in range(2, 10_000))
    return next(other for other in numbered if not other.exists())
