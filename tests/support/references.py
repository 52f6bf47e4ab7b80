"""Uninterrupted runs to compare with, and the way from an interrupted run to a finished one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.runs import Child, Ended, ForkServer, Prelude
from support.setup import TinyTask

SAVED_AFTER_SIGNAL, KILLED = 75, -9


@dataclass(slots=True)
class References:
    """The uninterrupted run of each variant, made when it is first asked for."""

    server: ForkServer
    task: TinyTask
    folder: Path
    _made: dict[tuple[str, ...], tuple[Path, float]] = field(default_factory=dict)

    def run(self, variant: str, *more: str, num_ranks: int = 1) -> Path:
        """Its directory."""
        return self._get(variant, more, num_ranks)[0]

    def seconds(self, variant: str, *more: str, num_ranks: int = 1) -> float:
        """How long it took."""
        return self._get(variant, more, num_ranks)[1]

    def _get(self, variant: str, more: tuple[str, ...], num_ranks: int) -> tuple[Path, float]:
        key = (variant, *more, f"{num_ranks}")
        if key not in self._made:
            path = self.folder / f"reference_{len(self._made)}_{variant}"
            ended = self.server.must_finish(*self.task.words(variant, path, *more), num_ranks=num_ranks)
            self._made[key] = (path, ended.seconds)
        return self._made[key]


@dataclass(slots=True)
class Restarts:
    """One run that is started again, as a person or a scheduler would, until it is finished."""

    server: ForkServer
    words: list[str]
    run: Path
    fresh_starts: int = 0
    resumes: int = 0
    num_ranks: int = 1

    def start(self, preludes: list[Prelude] | None = None) -> Child:
        """`resume` where something was committed, else the first command, after what is there was removed."""
        # A rank that was killed before it came is waited for; everybody who came is watched.
        environment = {"NCCL_TIMEOUT": "60"} if self.num_ranks > 1 else None
        given: dict[str, Any] = {"preludes": preludes or (), "environment": environment, "num_ranks": self.num_ranks}
        folder = self.run / "checkpoints"
        if any((*folder.glob("step_*/manifest.json"), *folder.glob("dead_replaced_step_*/manifest.json"))):
            self.resumes += 1
            return self.server.start("resume", str(self.run), **given)
        if self.run.exists():
            shutil.rmtree(self.run)
        self.fresh_starts += 1
        return self.server.start(*self.words, **given)

    def finish(self, allowed: tuple[int, ...] = ()) -> Ended:
        """Start without interruption; it must finish."""
        ended = self.start().wait()
        assert ended.code in (0, *allowed), f"exit code {ended.code}:\n{ended.output[-4000:]}"
        return ended
