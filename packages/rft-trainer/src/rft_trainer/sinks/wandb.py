"""Sink of records to Weights & Biases, and the check that a project name is not a key."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rft_core.errors import OptionsError
from rft_trainer.metrics.sink import RunInfo, evaluation_scalars, sample_table, scalars
from rft_trainer.sinks.extras import import_extra

DEFAULT_PROJECT = "rft"
_KEY = re.compile(r"(?<![0-9a-zA-Z])[0-9a-fA-F]{40}(?![0-9a-zA-Z])|wandb_v\d+_", re.IGNORECASE)
_FORBIDDEN = set("/\\#?%:")
_MAX_NAME = 128
_NOT_OF_AN_ID = re.compile(r"[:;,#?/'\\]")


def wandb_name(value: str | bool, flag: str = "--use_wandb") -> str:
    """Return the project (or organisation, or run name) of a flag's value; a bare flag means the default project.

    Raises `OptionsError` for what looks like an API key, without showing it, and for characters
    that Weights & Biases does not allow.
    """
    if value is True or (isinstance(value, str) and not value.strip()):
        return DEFAULT_PROJECT
    name = str(value).strip()
    if _KEY.search(name):
        raise OptionsError(
            code="tracker.key_as_name",
            what=f"the value of {flag} looks like an API key (not shown)",
            where=flag,
            why=f"{flag} takes a name; keys are read from the environment or from `wandb login`, never from flags",
            do="export WANDB_API_KEY and give --use_wandb the name of a project",
        )
    bad = sorted(_FORBIDDEN & set(name))
    if bad or len(name) > _MAX_NAME:
        fault = f"holds {' '.join(bad)}" if bad else f"has {len(name)} characters"
        raise OptionsError(
            code="tracker.bad_name",
            what=f"{flag} {name[:80]} {fault}",
            where=flag,
            why=f"a name has at most {_MAX_NAME} characters and none of {' '.join(sorted(_FORBIDDEN))}",
            do=f"{flag} {re.sub(r'[^A-Za-z0-9_.-]+', '-', name)[:_MAX_NAME]}",
        )
    return name


def _run_id(name: str) -> str:
    """Return an id that Weights & Biases takes: the name, or what is left of it and a digest that no other name has."""
    if not _NOT_OF_AN_ID.search(name):
        return name[:_MAX_NAME]
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{_NOT_OF_AN_ID.sub('-', name)[: _MAX_NAME - 9]}-{digest}"


class WandbSink:
    """Sink to one Weights & Biases run; imports the package at construction, so that a missing one fails early."""

    def __init__(
        self, project: str | bool, *, entity: str | None = None, group: str | None = None, run_name: str | None = None
    ) -> None:
        self._project = wandb_name(project)
        self._entity = None if entity is None else wandb_name(entity, "--wandb_org")
        self._group = None if group is None else wandb_name(group, "--wandb_group")
        self._run_name = None if run_name is None else wandb_name(run_name, "--wandb_run_name")
        self._wandb = import_extra("wandb", extra="wandb", flag="--use_wandb")
        self._run: Any = None

    def start(self, info: RunInfo) -> None:
        """Open the run; the name of the run directory is its id, so that a resumed run goes on in place.

        The step is a metric of its own: Weights & Biases drops, with a warning, what is logged at a step below
        its last one, and a run resumed from a checkpoint repeats steps.
        """
        self._run = self._wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            name=self._run_name or info.name,
            id=_run_id(info.name),
            resume="allow",
            dir=str(info.directory),
            config=dict(info.config),
        )
        self._run.define_metric("*", step_metric="step")

    def step(self, record: Mapping[str, Any]) -> None:
        self._run.log({"step": record["step"], **scalars(record)})

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._run.log({"step": record["step"], **evaluation_scalars(record)})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, cells = sample_table(rows)
        self._run.log({"step": step, "samples": self._wandb.Table(columns=columns, data=cells)})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(scalars(summary))
        self._run.finish(exit_code=0 if summary.get("outcome") in (None, "finished") else 1)
