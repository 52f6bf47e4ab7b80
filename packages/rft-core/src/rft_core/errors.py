"""Errors as one record (`Problem`) that every package raises and the command line shows.

A failure that a person can meet carries seven fields (`Problem`), once as text for the
terminal and once as one JSON line for programs. The class of the error says which exit code
the process ends with. No torch is imported here, so that `--help` and configuration errors
answer at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import ClassVar, Self

from rft_core.secrets import hide_values
from rft_core.terminal_text import bounded


class ExitCode(IntEnum):
    """One meaning each; `docs/errors.md` lists them."""

    DONE = 0
    OPTIONS = 2
    PREFLIGHT = 3
    DATA = 4
    NO_CHECKPOINT = 5
    STORAGE = 6
    NUMERICS = 7
    SERVICE = 8
    PEER = 9
    ALARM = 10
    OUTAGE = 69
    SAVED_AFTER_SIGNAL = 75
    NO_PROGRESS = 93


NOTHING_DONE = "nothing was started and nothing was changed"
"""The state of an error that comes before anything begins, which is what an error has where it names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The seven fields of a failure.

    Example::

        Problem(
            code="batch.not_a_multiple",
            what="train_batch_size = 500, rollout_batch_size x n_samples_per_prompt = 64 x 4 = 256",
            where="--train_batch_size (command line)",
            why="a larger train batch takes whole rollout batches: it must be a multiple of 256",
            state="nothing was started",
            do="--train_batch_size 512",
        )
    """

    code: str
    """Stable identifier: area, dot, rule."""
    what: str
    """The value that was found against the value that is needed, with the arithmetic."""
    where: str
    """Rank, step, setting with its origin, or file:line:field."""
    why: str
    """The rule that was broken."""
    state: str = NOTHING_DONE
    """The last good checkpoint and what is lost."""
    do: str = ""
    """One flag or command, computed from this run."""
    bundle: str = ""
    """Path of the diagnostics file, empty where none was written."""

    def shown(self) -> Problem:
        """The problem as a person reads it: no field steers a terminal or is longer than `bounded` lets it be.

        The remedy is whole, to be copied. The record, which `as_json` and the diagnostics file hold, keeps every field.
        """
        what, where, why, state = map(bounded, (self.what, self.where, self.why, self.state))
        return replace(self, what=what, where=where, why=why, state=state)

    def as_text(self) -> str:
        """Lines for a person: the cause first, then the other fields, empty ones left out; each as `shown` has it."""
        shown = self.shown()
        rows = [shown.what]
        for label, value in (
            ("where", shown.where),
            ("why", shown.why),
            ("state", shown.state),
            ("do", shown.do),
            ("bundle", shown.bundle),
        ):
            if value:
                rows.append(f"  {label:<6} {value}")
        return "\n".join(rows)

    def as_json(self, exit_code: int) -> str:
        """One JSON line with the seven fields and the exit code."""
        return json.dumps({"problem": asdict(self), "exit_code": exit_code}, ensure_ascii=False)


class RftError(Exception):
    """Base of every failure that a person can meet; raise a subclass."""

    exit_code: ClassVar[ExitCode] = ExitCode.PREFLIGHT

    def __init__(
        self,
        *,
        code: str,
        what: str,
        where: str,
        why: str,
        state: str = NOTHING_DONE,
        do: str = "",
        bundle: str = "",
    ) -> None:
        # texts of libraries, user code and servers are quoted here, and may hold what the environment holds
        what, where, why, state, do = map(hide_values, (what, where, why, state, do))
        self.problem = Problem(code=code, what=what, where=where, why=why, state=state, do=do, bundle=bundle)
        self.problems: tuple[Problem, ...] = (self.problem,)
        super().__init__(self.problem.as_text())

    @classmethod
    def of(cls, problem: Problem) -> Self:
        """Return the error of this class that has these fields."""
        return cls(**asdict(problem))

    def with_bundle(self, path: str) -> RftError:
        """The same error, naming the diagnostics file that was written for it."""
        return type(self)(**asdict(replace(self.problem, bundle=path)))

    def tell_state(self, state: str) -> None:
        """Let the error say this of the last good checkpoint and of what is lost, where it says nothing itself."""
        if self.problem.state == NOTHING_DONE:
            self.reword(lambda problem: replace(problem, state=state))

    def reword(self, change: Callable[[Problem], Problem]) -> None:
        """Let every problem of the error say what `change` makes of it."""
        self.problem = change(self.problem)
        self.problems = tuple(map(change, self.problems))
        self.args = (self.problem.as_text(),)

    def as_json(self) -> str:
        """Return one JSON line with the fields of the problem and the exit code."""
        return self.problem.as_json(int(self.exit_code))

    def __reduce__(self) -> tuple[object, tuple[type[RftError], dict[str, str]]]:
        # exceptions are pickled with positional arguments, and these take keywords only
        return _rebuild, (type(self), asdict(self.problem))


def _rebuild(kind: type[RftError], fields: dict[str, str]) -> RftError:
    return kind(**fields)


class OptionsError(RftError):
    """A flag, a setting or a combination of them that cannot be used."""

    exit_code = ExitCode.OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRefusal:
    """Settings that cannot be used, as the package that reads them says it.

    The command line adds where each value came from; whoever calls the package itself gets `as_error`.
    """

    code: str
    names: tuple[str, ...]
    """The settings that are refused, or that contradict one another."""
    why: str
    do: str

    def as_error(self, values: Mapping[str, object]) -> OptionsError:
        """Return the error of these settings, with their values."""
        return OptionsError(
            code=self.code,
            what=", ".join(f"{name} = {values[name]}" for name in self.names),
            where=", ".join(f"--{name}" for name in self.names),
            why=self.why,
            do=self.do,
        )


class PreflightError(RftError):
    """The machine or the installation lacks what the run needs."""

    exit_code = ExitCode.PREFLIGHT


class DataError(RftError):
    """A data file or an artefact that cannot be read or has the wrong content."""

    exit_code = ExitCode.DATA


class CheckpointError(RftError):
    """No usable checkpoint where one was asked for."""

    exit_code = ExitCode.NO_CHECKPOINT


class StorageError(RftError):
    """The disk refused: full, read-only, quota, input/output error."""

    exit_code = ExitCode.STORAGE


class NumericsError(RftError):
    """Non-finite values reached their limit."""

    exit_code = ExitCode.NUMERICS


class ServiceError(RftError):
    """A reward, an inference engine or the Hugging Face Hub is unavailable or answers wrongly."""

    exit_code = ExitCode.SERVICE


class PeerError(RftError):
    """Another rank failed or did not arrive."""

    exit_code = ExitCode.PEER


class OutageError(RftError):
    """A service was away for longer than the run waits for it; a run that had begun has saved its last whole step.

    All ranks of a run end with it together.
    """

    exit_code = ExitCode.OUTAGE


class AlarmError(RftError):
    """The health of a run gave an alarm, on which it was asked to stop; its last whole step is saved.

    All ranks of a run end with it together.
    """

    exit_code = ExitCode.ALARM


class NoProgressError(RftError):
    """A job was started again several times and came to no newer checkpoint: it is not to be started again."""

    exit_code = ExitCode.NO_PROGRESS


class SavedAfterSignal(RftError):
    """The run was asked to stop, has saved, and wants to be started again."""

    exit_code = ExitCode.SAVED_AFTER_SIGNAL


def install_command(extra: str) -> str:
    """Return the command that adds an extra to what is installed, to be run at the root of the repository.

    Without `--inexact` it would remove the extras that were added before, and without `--no-dev` it would install the
    tools of development.
    """
    return f"uv sync --no-dev --inexact --extra {extra}"
