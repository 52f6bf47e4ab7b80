"""Runs that are killed at random instants and started again, until they have finished."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.compare import checkpoints, differences
from support.references import KILLED, References, Restarts
from support.runs import Child, ForkServer
from support.setup import TinyTask


@dataclass(slots=True)
class Kills:
    """Kills of runs of one command line, and what became of them."""

    server: ForkServer
    task: TinyTask
    references: References
    folder: Path
    more: tuple[str, ...]
    num_steps: int
    num_ranks: int = 1
    seed: int = 20
    variant: str = "rl"
    instants: list[tuple[int, float, str, int]] = field(default_factory=list)
    """(run, second, phase of rank 0, newest checkpoint after it)."""
    in_a_save: int = 0
    """Kills that left a checkpoint half written; a save goes on beside the phases of the loop."""
    runs: list[Restarts] = field(default_factory=list)

    def at_random(
        self, num_kills: int, num_runs: int, kills_a_run: int, whom: Sequence[Sequence[int] | None] = (None,)
    ) -> None:
        """Kill at uniform instants of what is left of a run, in turn the ranks of `whom` (None: all at once)."""
        seconds = self.references.seconds(self.variant, *self.more, num_ranks=self.num_ranks)
        summary = json.loads((self.expected / "summary.json").read_text())
        to_start = max(0.0, seconds - summary["seconds"])
        draw = random.Random(self.seed)
        while len(self.instants) < num_kills or len(self.runs) < num_runs:
            restarts, phase_file = self._add()
            for _ in range(kills_a_run):
                done = max(_newest_step(restarts.run), 0) / self.num_steps
                instant = draw.uniform(0.0, to_start + (seconds - to_start) * (1.0 - done))
                ranks = whom[len(self.instants) % len(whom)]
                child = restarts.start([("record_phase", [str(phase_file)])])
                if not _kill_after(child, instant, ranks):
                    break  # it was faster than the instant, and has finished
                self._note(instant, phase_file)
                if _is_over(restarts.run):
                    break  # killed after its last record, before the process had left
            else:
                restarts.finish()

    def at_points(self, points: Sequence[tuple[str, int]]) -> None:
        """One run for each fault point, killed at the nth pass of it."""
        for point, nth in points:
            restarts, phase_file = self._add()
            preludes = [("record_phase", [str(phase_file)]), ("signal_at", [point, nth, "SIGKILL"])]
            assert restarts.start(preludes).wait().code == KILLED
            self._note(float("nan"), phase_file)
            restarts.finish()

    @property
    def expected(self) -> Path:
        """The uninterrupted run."""
        return self.references.run(self.variant, *self.more, num_ranks=self.num_ranks)

    def differences(self) -> list[str]:
        """What differs between the runs and the uninterrupted one."""
        told: list[str] = []
        for restarts in self.runs:
            if not _is_over(restarts.run):
                restarts.finish()
            told += [f"{restarts.run.name}: {line}" for line in differences(self.expected, restarts.run)]
        return told

    def page(self) -> str:
        """The kills by phase, and each of them."""
        counts = Counter(phase for _, _, phase, _ in self.instants)
        lines = ["kills by phase: " + ", ".join(f"{name} {count}" for name, count in counts.most_common())]
        lines += ["run  second  phase     newest checkpoint after it"]
        lines += [f"{run:>3}  {second:>6.2f}  {phase:<8}  {step}" for run, second, phase, step in self.instants]
        resumes, fresh = sum(r.resumes for r in self.runs), sum(r.fresh_starts for r in self.runs)
        again = fresh - len(self.runs)
        told = f"{len(self.instants)} kills of {len(self.runs)} runs on {self.num_ranks} ranks"
        return "\n".join([*lines, f"{told}: {resumes} resumes, {again} fresh starts for want of a save"])

    def _add(self) -> tuple[Restarts, Path]:
        run = self.folder / f"run_{len(self.runs)}"
        words = self.task.words(self.variant, run, *self.more)
        self.runs.append(Restarts(self.server, words, run, num_ranks=self.num_ranks))
        return self.runs[-1], self.folder / f"phase_{len(self.runs)}"

    def _note(self, instant: float, phase_file: Path) -> None:
        phase = phase_file.read_bytes().rstrip(b"\0 ").decode() if phase_file.exists() else "start"
        run = self.runs[-1].run
        self.instants.append((len(self.runs) - 1, instant, phase, _newest_step(run)))
        self.in_a_save += any((run / "checkpoints").glob(".staging-*"))


def _kill_after(child: Child, seconds: float, ranks: Sequence[int] | None) -> bool:
    """Whether the child was still there to be killed; ranks that were not killed end by themselves."""
    time.sleep(seconds)
    child.send(signal.SIGKILL, ranks)
    ended = child.wait()
    assert not child.holds_its_port(), f"port {child.port} is held after the end of all ranks: {ended}"
    return KILLED in (ended.code, *ended.other_codes)


def _newest_step(run: Path) -> int:
    """-1 where nothing is committed."""
    return max((int(path.name.removeprefix("step_")) for path in checkpoints(run)), default=-1)


def _is_over(run: Path) -> bool:
    """Whether the run has said that it finished."""
    summary = run / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["outcome"] == "finished"
