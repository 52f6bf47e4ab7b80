"""Names of models and data sets of the Hugging Face Hub, as settings have them. No torch is imported here.

A model is `ORG/NAME` or `ORG/NAME@REVISION`, a data set `ORG/NAME[:CONFIG[:SPLIT]][@REVISION]`. What exists on this
machine is a path, whatever its name looks like; and where a folder ORG is here, `ORG/NAME` is a path in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rft.reward_kinds import given_directories

Kind = Literal["model", "dataset"]
Rewrite = Callable[["HubName", str], str]
"""(name, setting) to the text that takes its place."""

DATA_SETTINGS = ("prompt_data", "eval_data", "pretrain_data")
_MODEL_SETTINGS = ("pretrain", "critic_pretrain", "reference_pretrain", "teacher_pretrain")
_REPOSITORY = r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_REVISION = r"(?:@(?P<revision>\w[\w./-]*))?"
_MODEL = re.compile(_REPOSITORY + _REVISION)
_DATASET = re.compile(_REPOSITORY + r"(?::(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?" + _REVISION)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE = re.compile(r"\.(jsonl?|csv|tsv|txt|parquet|arrow|gz|bz2|xz|zst|zip)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the Hub, and what of it is meant.

    Example: `HubName("dataset", "openai/gsm8k", "main", config="main", split="train")`
    """

    kind: Kind
    repo: str
    revision: str = ""
    """Branch, tag or commit hash; empty for the newest commit."""
    config: str = ""
    split: str = ""

    @property
    def commit(self) -> str:
        """The commit hash, where the revision is one; else empty."""
        return self.revision if _COMMIT.fullmatch(self.revision) else ""

    @property
    def without_revision(self) -> str:
        """The name without its revision: what a person calls it."""
        return ":".join(filter(None, (self.repo, self.config, self.split)))

    def at(self, commit: str) -> HubName:
        """Return the same name at a commit."""
        return replace(self, revision=commit)

    def __str__(self) -> str:
        return f"{self.without_revision}@{self.revision}" if self.revision else self.without_revision


def model_name(text: str) -> HubName | None:
    """Return the name of a model of the Hub; None for a path."""
    found = _MODEL.fullmatch(text)
    if found is None or _is_path(text, found):
        return None
    return HubName("model", found["repo"], found["revision"] or "")


def dataset_name(text: str) -> HubName | None:
    """Return the name of a data set of the Hub; None for a path, a pattern or a task."""
    found = _DATASET.fullmatch(text)
    if found is None or _is_path(text, found) or (_FILE.search(found["repo"]) and text == found["repo"]):
        return None
    return HubName("dataset", found["repo"], found["revision"] or "", found["config"] or "", found["split"] or "")


def _is_path(text: str, found: re.Match[str]) -> bool:
    # with a revision the Hub is meant, even where a folder has the name of the organisation
    return Path(text).exists() or (not found["revision"] and Path(found["repo"].partition("/")[0]).is_dir())


def with_directories(values: Mapping[str, Any], directory: Rewrite) -> dict[str, str]:
    """Return the settings that name models of the Hub, each with its directory.

    One of several keeps the label that it has without one: the last part of its name, and not of the directory.
    """
    return rewritten(values, directory, data=False, labelled=True)


def rewritten(
    values: Mapping[str, Any], rewrite: Rewrite, *, data: bool = True, labelled: bool = False
) -> dict[str, str]:
    """Return the settings that name something of the Hub, with each name replaced; others are left out."""
    changed: dict[str, str] = {}
    joined = {flag: kind.joins_directories for kind, flag, _ in given_directories(values)}
    for name in (*_MODEL_SETTINGS, *joined):
        changed[name] = _replaced(values, name, model_name, rewrite, joins=joined.get(name, False), labelled=labelled)
    if data:
        for name in DATA_SETTINGS:
            changed[name] = _replaced(values, name, dataset_name, rewrite, joins=True)
    return {name: text for name, text in changed.items() if text and text != values[name]}


def _replaced(
    values: Mapping[str, Any],
    setting: str,
    parse: Callable[[str], HubName | None],
    rewrite: Rewrite,
    *,
    joins: bool,
    labelled: bool = False,
) -> str:
    """Return a value with the names in it replaced; several are joined by commas, each NAME or LABEL=NAME."""
    value = str(values.get(setting) or "")
    words = value.split(",") if joins else [value]
    for index, word in enumerate(words):
        label, equals, text = word.strip().rpartition("=")
        name = parse(text)
        if name is not None:
            if joins and labelled and not equals:
                label, equals = name.repo.rpartition("/")[2], "="
            words[index] = f"{label}{equals}{rewrite(name, setting)}"
    return ",".join(words)


def with_recorded_commits(values: Mapping[str, Any], recorded: Mapping[str, object]) -> dict[str, str]:
    """Return settings whose names get the commits that a record has for them; one with a revision keeps it.

    Args:
        values: the present settings.
        recorded: the values of the record, by setting.
    """
    commits: dict[tuple[str, str], str] = {}
    for setting, value in recorded.items():
        for word in str(value).split(","):
            found = _DATASET.fullmatch(word.strip().rpartition("=")[2])
            if found is not None and _COMMIT.fullmatch(found["revision"] or ""):
                commits[setting, found["repo"]] = found["revision"]

    def known(name: HubName, setting: str) -> str:
        commit = commits.get((setting, name.repo), "")
        return str(name.at(commit)) if commit and not name.revision else str(name)

    return rewritten(values, known)
