"""The files of an evaluation: rows while they come, and at the end all rows with the manifest and the figures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft.identity.contents import functions_content
from rft.identity.model_files import directory_content
from rft.identity.user_files import function_content
from rft.resolved import flat
from rft.reward_names import all_functions
from rft.settings import EvalSettings
from rft.stages.answer_file import refuse_unwritable
from rft_core.durable_files import encode_record, read_records, replace_record, replace_text, storage_errors
from rft_core.errors import DataError
from rft_trainer.evaluation.partial_rows import PartialRows, require_each_once
from rft_trainer.records.rollouts import Prompt

Row = Mapping[str, Any]

_OF_THE_REPORT = ("output", "compare", "eval_by", "eval_k", "eval_metrics", "eval_pick")
"""Settings that decide what is said of the answers, not the answers and their rewards."""


def checked_output(output: str) -> Path | None:
    """Return the file of an evaluation, before anything is computed for it; None where none is asked for.

    Raises:
        OptionsError: as `rft.stages.answer_file.refuse_unwritable`.
    """
    refuse_unwritable(output)
    return Path(output).expanduser() if output else None


def manifest_of(settings: EvalSettings, prompts: Sequence[Prompt], function: object | None = None) -> dict[str, Any]:
    """Return what the answers and rewards of an evaluation follow from, as JSON; `function` is a reward of a script."""
    digest = hashlib.sha256()
    for prompt in prompts:
        row = [prompt.prompt_id, prompt.text, prompt.label, prompt.token_ids, prompt.columns]
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    names = all_functions(settings)
    reward = function_content(function) if function is not None else functions_content(names) if names else None
    values = {key: value for key, value in flat(settings).items() if key not in _OF_THE_REPORT}
    return {
        "prompts": len(prompts),
        "samples": settings.sampling.num_beams or settings.evaluation.eval_n,
        "data_sha256": digest.hexdigest(),
        "model_sha256": directory_content(settings.model.pretrain).digest,
        **({"reward_sha256": reward.digest} if reward is not None else {}),
        # as it is read back
        "settings": json.loads(json.dumps(values, default=str)),
    }


def partial_rows(path: Path, manifest: Mapping[str, Any], prompts: Sequence[Prompt], suffix: str) -> PartialRows:
    """Return the journal beside the file of an evaluation."""
    ids = [prompt.prompt_id for prompt in prompts]
    return PartialRows(path.with_name(f"{path.name}{suffix}"), manifest, ids, int(manifest["samples"]))


def write_output(path: Path, manifest: Mapping[str, Any], figures: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write all rows with manifest and figures: one file where its name ends with .json, else two.

    Each is replaced as a whole: a reader finds the old content or the new one.
    """
    if path.suffix == ".json":
        replace_record(path, {"manifest": dict(manifest), **figures, "rows": [dict(row) for row in rows]})
        return
    text = "".join(encode_record(row) + "\n" for row in rows)
    replace_text(path, text)
    hashed = {**manifest, "rows": len(rows), "rows_sha256": hashlib.sha256(text.encode()).hexdigest()}
    replace_record(manifest_path(path), {"manifest": hashed, **figures})


def manifest_path(path: Path) -> Path:
    """Return the file of the manifest of FILE.jsonl: FILE.manifest.json."""
    return path.with_name(f"{path.stem}.manifest.json")


def saved_rows(path: Path) -> list[Row]:
    """Read the rows that `eval` wrote, as many as its manifest says, or those of `generate`, which have no rewards.

    Raises:
        DataError: it is no such file, or rows are missing, doubled or changed since.
    """
    with storage_errors("read", path):
        raw = path.read_bytes()
    if path.suffix == ".json":
        rows, manifest = _document(path, raw)
    else:
        records = read_records(path)
        if records.num_unreadable or records.torn:
            raise _unsound(path, f"{records.num_unreadable + records.torn} lines are no whole JSON records")
        rows, manifest = list[Row](records.rows), _manifest_beside(path, raw)
    if not rows or any("prompt_id" not in row or "reward" not in row for row in rows):
        raise _unsound(path, "rows lack prompt_id or reward" if rows else "it holds no rows")
    ids = list(dict.fromkeys(str(row["prompt_id"]) for row in rows))
    num_samples = int(manifest.get("samples", 0)) or max(int(row.get("sample", 0)) for row in rows) + 1
    require_each_once(rows, ids, num_samples, str(path))
    if manifest and len(ids) != manifest["prompts"]:
        raise _unsound(path, f"it holds {len(ids)} prompts, its manifest {manifest['prompts']}")
    return rows


def _document(path: Path, raw: bytes) -> tuple[list[Row], Row]:
    try:
        content: Any = json.loads(raw)
        return list(content["rows"]), dict(content["manifest"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _unsound(path, "it is no JSON object with manifest and rows") from None


def _manifest_beside(path: Path, raw: bytes) -> Row:
    """Return the manifest of FILE.jsonl; empty where there is none, as beside rows written by another program."""
    beside = manifest_path(path)
    if not beside.is_file():
        return {}
    try:
        manifest = dict(json.loads(beside.read_bytes())["manifest"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _unsound(beside, "it is no JSON object with a manifest") from None
    if manifest.get("rows_sha256") != hashlib.sha256(raw).hexdigest():
        raise _unsound(path, f"its content is not the one that {beside.name} has the hash of")
    return manifest


def _unsound(path: Path, what: str) -> DataError:
    return DataError(
        code="eval.saved_rows",
        what=f"{path}: {what}",
        where=str(path),
        why="each response has to be there exactly once, as rft-train eval or generate wrote it",
        do="make the file again, by the same command with --output",
    )
