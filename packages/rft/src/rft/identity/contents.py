"""Contents of the files and the code of a run by name: rows, rewards, models. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft.identity.model_files import directory_content, file_content, model_contents
from rft.identity.record import Content
from rft.identity.user_files import code_content, folder_content, function_content
from rft.resolved import Resolved
from rft.reward_kinds import given_directories
from rft.reward_names import all_functions, named_models
from rft_core.checkpoint_places import run_of
from rft_dist.checkpoint_format.layout import MANIFEST
from rft_trainer.data.prompts import HASH_SCHEME

SETTING_OF = {"model": "pretrain", "tokenizer": "pretrain", "weights": "pretrain"}
"""The setting that names a content, where it is called otherwise."""
_CODE = ("environment", "advantage_estimator")


def run_contents(
    resolved: Resolved[Any],
    rows: Content,
    held_out: Content | None,
    functions: Mapping[str, object] | None = None,
) -> dict[str, Content]:
    """Contents of all that the settings of a run name.

    Args:
        resolved: the settings.
        rows: of the training rows in use, which were read already.
        held_out: of the held-out rows, where there are any.
        functions: code of the running program in the place of what settings name, such as a reward function.
    """
    values = resolved.values
    contents = {"prompt_data": rows, **model_contents(str(values["pretrain"]))}
    if held_out is not None:
        contents["eval_data"] = held_out
    for name in _CODE:
        if values.get(name):
            contents[name] = code_content(str(values[name]))
    if "reward" in values and (rewards := all_functions(resolved.settings)):
        contents["reward"] = functions_content(rewards)
    if values.get("model_code"):
        contents["model_code"] = folder_content(str(values["model_code"]))
    for name in ("judge_template", "json_schema"):
        if values.get(name):
            contents[name] = file_content(str(values[name]))
    for name in ("critic_pretrain", "reference_pretrain", "teacher_pretrain"):
        if values.get(name):
            contents[name] = directory_content(str(values[name]))
    if values.get("ckpt_weights_only") or values.get("ckpt_partial"):
        # a resume takes the reference from there again
        contents["ckpt_path"] = _checkpoint(str(values["ckpt_path"]))
    for kind, flag, value in given_directories(values):
        contents[flag] = _joined(value) if kind.joins_directories else directory_content(value)
    contents |= {name: function_content(function) for name, function in (functions or {}).items()}
    return contents


def rows_content(digest: str, count: int, place: str) -> Content:
    """Content of rows that have this hash."""
    return Content(digest, f"{count:,} rows in use", place, count, HASH_SCHEME)


def records_content(records: Iterable[object], place: str) -> Content | None:
    """Content of rows given as JSON values, in their order; None where there are none."""
    digest, count = hashlib.sha256(), 0
    for record in records:
        digest.update(json.dumps(record).encode() + b"\n")
        count += 1
    return rows_content(digest.hexdigest(), count, place) if count else None


def functions_content(names: Sequence[str]) -> Content:
    """Content of reward functions; of several the digests in their order, which is that of the sum."""
    contents = [code_content(name) for name in names]
    if len(contents) == 1:
        return contents[0]
    digest = hashlib.sha256(json.dumps([content.digest for content in contents]).encode()).hexdigest()
    absent = any(content.digest == "absent" for content in contents)
    return Content("absent" if absent else digest, "; ".join(c.covers for c in contents), ",".join(names))


def _joined(value: str) -> Content:
    """Content of several models, each with the name of its part of the reward."""
    models = [(named.name, directory_content(named.location)) for named in named_models(value)]
    digest = hashlib.sha256(json.dumps([[name, content.digest] for name, content in models]).encode())
    absent = any(content.digest == "absent" for _, content in models)
    covers = "; ".join(f"{name}: {content.covers}" for name, content in models)
    return Content("absent" if absent else digest.hexdigest(), covers, value)


def _checkpoint(place: str) -> Content:
    """Content of the checkpoint that a path stands for, by its manifest, which has the hash of every file."""
    # here, because it needs torch
    from rft_dist.checkpoints.locate import unverified_checkpoint

    path = unverified_checkpoint(Path(place).expanduser())
    if path is None:
        return Content("absent", "no checkpoint", place)
    return replace(file_content(str(path / MANIFEST)), covers=f"{path.name} of {run_of(path).name}", place=place)
