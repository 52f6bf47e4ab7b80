"""Faults of every kind, one after another, on runs that are started again until they have finished.

Which fault comes, where and how often its point is passed before, is a function of (seed, run, number of the fault), so
that a soak that fails is repeated by its seed.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rft_core.keyed_random import derive_key, permutation
from support.compare import checkpoints, differences
from support.references import KILLED, SAVED_AFTER_SIGNAL
from support.runs import Child, Ended, ForkServer, Prelude
from support.setup import TinyTask

DATA, STORAGE, NUMERICS, SERVICE, PEER = 4, 6, 7, 8, 9
STEPS = 12
CALLS_A_STEP = 4
"""Calls of the reward by one of two ranks: eight prompts a step."""
REWARD = """
import json, time
from pathlib import Path

FAULT = Path(__file__).with_name("fault.json")
calls = 0


def score(responses, labels):
    global calls
    calls += 1
    fault = json.loads(FAULT.read_text()) if FAULT.exists() else {"call": 0}
    if calls == fault["call"]:
        if fault["kind"] == "raises":
            raise ValueError("planted")
        if fault["kind"] == "hangs":
            time.sleep(600)
        return [float("nan")] * len(responses)
    return [float(str(label) in response) for response, label in zip(responses, labels)]
"""
"""Right answers earn 1, but for one call of a process where `fault.json` beside the file says so."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is planted into one start, and the exit codes with which its ranks may end."""

    codes: frozenset[int]
    preludes: tuple[Prelude, ...] = ()
    reward: dict[str, Any] = field(default_factory=dict[str, Any])
    damage: bool = False
    """Whether a byte of the newest checkpoint is changed after the end."""
    rows: str = ""
    """What happens to the training rows after the end, and is put right once a start was refused for it."""


Draw = Callable[[random.Random, int], Fault]
"""A fault within the next steps, of which there are so many."""


def _codes(*codes: int) -> frozenset[int]:
    return frozenset(codes)


def _point(draw: random.Random, steps: int) -> list[Any]:
    """A point of the loop or of a save, and one of its passes, at the earliest in the first step."""
    name = draw.choice(
        ["rl.rolled_out", "rl.updated", "rl.logged", "checkpoint.model.write.before", "checkpoint.publish.before"]
    )
    return [name, draw.randint(1, steps)]


def _kill(draw: random.Random, steps: int) -> Fault:
    # the first to be killed may be missed by the other before it comes to its own point
    return Fault(_codes(KILLED, PEER), (("signal_at", [*_point(draw, steps), "SIGKILL"]),))


def _kill_one(draw: random.Random, steps: int) -> Fault:
    point = [draw.choice(["rl.rolled_out", "rl.updated", "rl.logged"]), draw.randint(1, steps)]
    return Fault(_codes(KILLED, PEER), (("signal_rank_at", [draw.randrange(2), *point, "SIGKILL"]),))


def _signal(draw: random.Random, steps: int) -> Fault:
    point = ["rl.updated", draw.randint(1, steps), draw.choice(["SIGTERM", "SIGINT", "SIGUSR1"])]
    return Fault(_codes(SAVED_AFTER_SIGNAL), (("signal_rank_at", [draw.randrange(2), *point]),))


def _stop(draw: random.Random, steps: int) -> Fault:
    point = [draw.choice(["rl.rolled_out", "rl.updated"]), draw.randint(1, steps), "SIGSTOP"]
    return Fault(_codes(KILLED, PEER), (("signal_rank_at", [draw.randrange(2), *point]),))


def _reward(kind: str) -> Draw:
    def drawn(draw: random.Random, steps: int) -> Fault:
        return Fault(_codes(SERVICE, PEER), reward={"kind": kind, "call": draw.randint(1, CALLS_A_STEP * steps)})

    return drawn


def _refused_save(draw: random.Random, steps: int) -> Fault:
    """It costs one checkpoint: the run goes on to the kill, unless nothing was saved before or other ranks wait."""
    point = draw.choice(["checkpoint.model.write.before", "checkpoint.publish.before"])
    error = draw.choice(["ENOSPC", "EDQUOT", "EIO", "EROFS"])
    refused: Prelude = ("refuse_at", [point, draw.randint(1, steps), error])
    return Fault(_codes(KILLED, STORAGE, PEER), (refused, ("signal_at", ["rl.logged", steps, "SIGKILL"])))


def _refused_row(draw: random.Random, steps: int) -> Fault:
    refused: Prelude = ("refuse_at", ["run.append", draw.randint(1, steps), "ENOSPC"])
    return Fault(_codes(STORAGE, PEER), (refused,))


def _spoiled_weight(draw: random.Random, steps: int) -> Fault:
    value, nth = draw.choice([float("nan"), float("inf")]), draw.randint(1, steps)
    return Fault(_codes(NUMERICS, PEER), (("spoil_a_weight", ["rl.updated", nth, "layers.0", value]),))


def _damage(draw: random.Random, steps: int) -> Fault:
    return Fault(_codes(KILLED, PEER), (("signal_at", ["rl.updated", steps, "SIGKILL"]),), damage=True)


def _rows(kind: str) -> Draw:
    def drawn(draw: random.Random, steps: int) -> Fault:
        return replace(_kill(draw, steps), rows=kind)

    return drawn


SPOILT_ROWS: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-20],
    "in another order": lambda content: b"".join(sorted(content.splitlines(keepends=True))),
}
"""What becomes of the file of rows; a start that finds it so is refused."""


def _lost_replica(draw: random.Random, steps: int) -> Fault:
    """It costs the run nothing: the samples are drawn again, and the run goes on to the kill."""
    lost: Prelude = ("kill_replica_at", [draw.randint(1, 32)])
    return Fault(_codes(KILLED), (lost, ("signal_at", ["rl.logged", 1 + steps // 2, "SIGKILL"])))


OF_TWO_RANKS: dict[str, Draw] = {
    "all ranks are killed": _kill,
    "one rank is killed": _kill_one,
    "a signal asks for the end": _signal,
    "one rank is stopped": _stop,
    "the reward raises": _reward("raises"),
    "the reward hangs": _reward("hangs"),
    "the reward is NaN": _reward("nan"),
    "a save is refused": _refused_save,
    "a row is refused": _refused_row,
    "a weight is not finite": _spoiled_weight,
    "a checkpoint is damaged": _damage,
    "the rows are cut": _rows("cut"),
    "the rows are in another order": _rows("in another order"),
}
OF_REPLICAS: dict[str, Draw] = {
    "an engine dies": _lost_replica,
    "all ranks are killed": _kill,
    "the reward raises": _reward("raises"),
    "a save is refused": _refused_save,
}


@dataclass(slots=True)
class Soak:
    """Runs under faults, each compared with the run that nothing happened to."""

    server: ForkServer
    task: TinyTask
    folder: Path
    kinds: dict[str, Draw]
    more: Sequence[str] = ()
    num_ranks: int = 2
    seed: int = 0
    told: list[str] = field(default_factory=list[str])
    """A line a fault: the run, the kind, the newest checkpoint after it."""
    counts: Counter[str] = field(default_factory=Counter[str])
    reward: Path = field(init=False)
    data: Path = field(init=False)
    """The training rows."""
    seconds: float = 0.0
    """All starts together."""
    undisturbed_seconds: float = field(init=False)
    num_runs: int = 0
    expected: Path = field(init=False)
    """The run that nothing happens to."""

    def __post_init__(self) -> None:
        self.reward = self.folder / "reward.py"
        self.reward.write_text(REWARD)
        self.data = self.folder / "train.jsonl"
        shutil.copy(self.task.folder / "train.jsonl", self.data)
        self.expected = self.folder / "undisturbed"
        ended = self.server.must_finish(*self._words(self.expected), num_ranks=self.num_ranks)
        self.undisturbed_seconds = ended.seconds

    def faults(self, count: int) -> None:
        """Let so many faults happen to as many runs as it takes; every run ends as the undisturbed one."""
        run = 0
        while self.counts.total() < count:
            self._run(self.folder / f"run_{run}", run, count)
            run += 1
        self.num_runs = run

    def page(self) -> str:
        """The faults by kind, and each of them."""
        kinds = ", ".join(f"{name} {number}" for name, number in sorted(self.counts.items()))
        pace = self.num_runs * self.undisturbed_seconds / self.seconds
        return "\n".join(
            [
                *self.told,
                f"{self.counts.total()} faults: {kinds}",
                f"{self.num_runs} runs in {self.seconds:.0f} s: {pace:.0%} of the pace of an undisturbed run, with "
                f"{self.counts.total() / (self.num_runs * STEPS):.2f} faults a step and every start counted",
            ]
        )

    def _run(self, path: Path, run: int, count: int) -> None:
        number = 0
        # a fault within the next three steps, so that it comes before the run is over
        while self.counts.total() < count and STEPS - max(newest_step(path), 0) > 3:
            kind = self._kind()
            fault = self.kinds[kind](random.Random(derive_key(self.seed, "soak", run, number)), 3)
            ended = self._start(path, fault)
            where = f"run {run}, fault {number}: {kind} {fault}"
            # a rank that hears of another's fault first ends with PEER
            assert {ended.code, *ended.other_codes} <= fault.codes, f"{where}\n{ended}\n{ended.output[-4000:]}"
            if fault.damage and len(checkpoints(path)) > 1:
                damage(path)
            if fault.rows:
                self._start_with_other_rows(path, fault.rows, where)
            self.counts[kind] += 1
            self.told.append(
                f"{path.name}  {kind:<26} exit codes {ended.code} {ended.other_codes}, {newest_step(path)}"
            )
            number += 1
        ended = self._start(path, Fault(_codes(0)))
        assert {ended.code, *ended.other_codes} == {0}, f"run {run} does not finish\n{ended.output[-4000:]}"
        found = differences(self.expected, path)
        assert found == [], "\n".join([*self.told, *found])
        shutil.rmtree(path)

    def _start_with_other_rows(self, path: Path, kind: str, where: str) -> None:
        """Spoil the rows, see a start refused that changes nothing, and put them right."""
        content, before = self.data.read_bytes(), newest_step(path)
        self.data.write_bytes(SPOILT_ROWS[kind](content))
        refused = Fault(_codes(DATA, PEER))
        ended = self._start(path, refused)
        self.data.write_bytes(content)
        assert {ended.code, *ended.other_codes} <= refused.codes, f"{where}\n{ended}\n{ended.output[-4000:]}"
        assert newest_step(path) == before

    def _kind(self) -> str:
        """Every kind once in each round, in an order of its own."""
        names, done = list(self.kinds), self.counts.total()
        order = permutation(derive_key(self.seed, "kinds", done // len(names)), len(names)).tolist()
        return names[order[done % len(names)]]

    def _start(self, path: Path, fault: Fault) -> Ended:
        place = self.reward.with_name("fault.json")
        place.unlink(missing_ok=True)
        if fault.reward:
            place.write_text(json.dumps(fault.reward))
        words = ["resume", str(path)] if path.exists() else self._words(path)
        child = self.server.start(*words, preludes=fault.preludes, num_ranks=self.num_ranks)
        release_stopped(child)
        ended = child.wait()
        self.seconds += ended.seconds
        place.unlink(missing_ok=True)
        return ended

    def _words(self, path: Path) -> list[str]:
        rules = ("--max_steps", f"{STEPS}", "--save_steps", "1", "--eval_steps", "0", "--eval_data", "")
        reward = ("--reward", f"{self.reward}:score", "--reward_timeout", "1", "--max_unscored_share", "0")
        words = self.task.words("rl", path, *rules, *reward, *self.more)
        words[words.index("--prompt_data") + 1] = str(self.data)
        return words


def newest_step(run: Path) -> int:
    """-1 where nothing is committed."""
    return max((int(path.name.removeprefix("step_")) for path in checkpoints(run)), default=-1)


def damage(run: Path) -> None:
    """Change one bit of the newest checkpoint's weights."""
    file = checkpoints(run)[-1] / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def release_stopped(child: Child) -> None:
    """Wait until a child has ended, or its processes are ended and stopped: what is stopped is then killed."""
    while not child.is_over():
        states = [state_of(pid) for pid in child.pids]
        if "T" in states and set(states) <= {"T", "Z"}:
            child.send(signal.SIGKILL)
            return
        time.sleep(0.05)


def state_of(pid: int) -> str:
    """The letter of a process's state; Z where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
