"""Verdict on the speed of a run: what its steps wait for, and the one change that would make them faster.

Computed from the times in the rows of metrics alone. The first steps are left out: they make what later ones take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from rft_trainer.metrics.phase_timer import Phase
from rft_trainer.runs.verdict import RunFinding

Row = Mapping[str, Any]

STEPS = 30
"""Steps after which the verdict is given; fewer say too little."""
WARM_UP = 3
"""First steps that are left out."""
WAITS = 0.10
"""Share of the time from which on a run is bound by what its training waits for."""
SAMPLES = 0.50
"""The same of sampling, which is half of the work of reinforcement learning."""
LOW_USE = 0.30
"""Share of the peak of a GPU (MFU) below which larger micro-batches are worth trying."""
SPARE = 0.10
"""Share of the room on a GPU that a suggested micro-batch leaves free, for blocks that the allocator cannot join."""
_OTHER = "other"
_NOUNS = {
    Phase.REWARD: "scoring",
    Phase.TOOLS: "waiting for the environment",
    Phase.LOGPROB: "log-probabilities besides the update's",
    Phase.SYNC: "the exchange between ranks and new weights for the engine",
    Phase.EVAL: "evaluations",
    Phase.SAVE: "checkpoints",
    _OTHER: "work outside of every phase",
}
_SUBJECTS = _NOUNS | {
    Phase.DATA: "waiting for data",
    Phase.ROLLOUT: "sampling",
    Phase.TRAIN: "forward, backward and optimizer",
}
"""Every phase as the subject of a sentence."""
_REMEDIES = {
    Phase.REWARD: "--reward_workers 2, or twice as many as before",
    Phase.TOOLS: "--environment_workers 2, or twice as many as before",
    Phase.LOGPROB: "a larger --micro_train_batch_size, where memory is left",
    Phase.SYNC: "a larger --rollout_batch_size: fewer exchanges for as many samples",
    Phase.EVAL: "a larger --eval_steps, or a smaller --max_eval_samples",
    Phase.SAVE: "a larger --save_steps",
    _OTHER: "fewer trackers and callbacks: rows and what is called at each step are written in this time",
}

_LIMITS = {
    "preemptions": "the cache is too small for the rows at work",
    "prefill": "reading prompts costs more than drawing",
    "tail": "most rows wait for the longest responses",
    "memory": "not all rows fit into the memory",
    "occupancy": "too few responses are drawn at once",
    "forward": "the model's own arithmetic",
}
"""What `time/engine_limit` means."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The setting that decides how much a forward pass takes at once, and its value in a run."""

    setting: str
    size: int
    """Samples, or tokens."""


def micro_batch_of(values: Mapping[str, Any]) -> MicroBatch | None:
    """Return the setting of the micro-batches among the flat settings of a run; None where it has none."""
    for name in ("max_tokens_per_micro_batch", "micro_train_batch_size"):
        if values.get(name):
            return MicroBatch(name, int(values[name]))
    return None


def speed_verdict(rows: Sequence[Row], command: str = "", micro_batch: MicroBatch | None = None) -> RunFinding | None:
    """Return what bounds the speed of a run; None where its rows are fewer than `STEPS`.

    Waiting for data comes first, then what takes the largest share; where nothing waits, arithmetic is the bound.

    Args:
        rows: rows of metrics from the first step on.
        command: that made the run (`pretrain`, `sft`, `rl`, ...), which decides what can be changed.
        micro_batch: of the run, for a size that its memory allows.
    """
    timed = [row for row in rows[WARM_UP:] if _number(row, "time/step") > 0]
    if len(timed) < STEPS - WARM_UP:
        return None
    return verdict_of_rows(timed, command, micro_batch)


def verdict_of_rows(rows: Sequence[Row], command: str = "", micro_batch: MicroBatch | None = None) -> RunFinding | None:
    """Return what bounds the speed in these rows alone, however few they are; None where they took no time.

    Args:
        rows: rows of metrics of steps after the first ones.
        command: as of `speed_verdict`.
        micro_batch: as of `speed_verdict`.
    """
    timed = [row for row in rows if _number(row, "time/step") > 0]
    if not timed:
        return None
    seconds = sum(_number(row, "time/step") for row in timed)
    shares = {name: sum(_number(row, f"time/{name}") for row in timed) / seconds for name in (*Phase, _OTHER)}
    if shares[Phase.DATA] > WAITS:
        return _data_bound(shares[Phase.DATA], command)
    found = {name: shares[name] for name in _NOUNS if shares[name] > WAITS}
    if shares[Phase.ROLLOUT] > SAMPLES:
        found[Phase.ROLLOUT] = shares[Phase.ROLLOUT]
    if not found:
        return _compute_bound(shares[Phase.TRAIN], timed, micro_batch)
    name = max(found, key=lambda name: found[name])
    if name == Phase.ROLLOUT:
        return _rollout_bound(found[name], timed)
    return RunFinding(
        f"{name}_bound", f"{_NOUNS[name]} took {found[name]:.0%} of the time of the steps", _REMEDIES[name]
    )


def grown_phase(before: Sequence[Row], now: Sequence[Row], command: str = "") -> RunFinding | None:
    """Return the phase of a step that has grown by most seconds; None where none has by a tenth of a step.

    Evaluations and checkpoints are left out, since they are not in every step.

    Args:
        before: rows of the steps before.
        now: rows of the steps that are looked at.
        command: as of `speed_verdict`.
    """
    names = [name for name in (*Phase, _OTHER) if name not in (Phase.EVAL, Phase.SAVE)]
    seconds = {
        name: tuple(median(_number(row, f"time/{name}") for row in rows) for rows in (before, now)) for name in names
    }
    name = max(names, key=lambda name: seconds[name][1] - seconds[name][0])
    earlier, later = seconds[name]
    if later - earlier <= WAITS * median(_number(row, "time/step") for row in before):
        return None
    what = f"{_SUBJECTS[name]} took {earlier:.3g} -> {later:.3g} s of a step"
    return RunFinding(f"{name}_grew", what, _growth_remedy(name, command))


def _growth_remedy(name: str, command: str) -> str:
    if name == Phase.DATA:
        return _data_bound(0.0, command).do
    if name == Phase.ROLLOUT:
        return "completion/length_mean and time/engine_limit say whether responses or the engine have changed"
    if name == Phase.TRAIN:
        return "another program on the device, or longer samples (completion/length_mean, data/tokens)"
    return _REMEDIES[name]


def _data_bound(share: float, command: str) -> RunFinding:
    mapped = command == "pretrain"
    return RunFinding(
        "data_bound",
        f"the steps waited for their {'windows' if mapped else 'rows'} in {share:.0%} of their time",
        "--data_store_path on a disk of this machine: windows are read from it at each step"
        if mapped
        else "--num_workers 2, or twice as many as before: rows are then prepared while a step computes",
    )


def _rollout_bound(share: float, rows: Sequence[Row]) -> RunFinding:
    limits = [str(row["time/engine_limit"]) for row in rows if row.get("time/engine_limit")]
    limit = max(sorted(set(limits)), key=limits.count) if limits else ""
    named = f", limited by {limit}: {_LIMITS[limit]}" if limit in _LIMITS else ""
    is_asynchronous = any("time/groups_ahead" in row for row in rows)
    return RunFinding(
        "rollout_bound",
        f"sampling took {share:.0%} of the time of the steps{named}",
        "more engines or devices to sample on: the policy waits for them already"
        if is_asynchronous
        else "--max_staleness 1: samples of the next step are drawn while the policy is trained",
    )


def _compute_bound(share: float, rows: Sequence[Row], micro_batch: MicroBatch | None) -> RunFinding:
    used = [_number(row, "time/mfu") for row in rows if "time/mfu" in row]
    use = sum(used) / len(used) if used else None
    named = "" if use is None else f", at {use:.0%} of the arithmetic that the device is made for"
    low = use is not None and use < LOW_USE
    return RunFinding(
        "compute_bound",
        f"nothing waits: forward, backward and optimizer took {share:.0%} of the time of the steps{named}",
        _larger_micro_batches(rows, micro_batch)
        if low
        else "nothing in the settings of its parts: more devices or a smaller model",
    )


def _larger_micro_batches(rows: Sequence[Row], micro_batch: MicroBatch | None) -> str:
    """Return the largest micro-batch that the memory of these steps allows, or why there is none.

    A step takes what is held between steps and something that grows with the micro-batch, at most in proportion:
    gradients are in it and do not grow. So the largest is held + factor x (peak - held) <= room - spare.
    """
    if micro_batch is None or any(_number(row, "memory/room_device_mib") <= 0 for row in rows):
        return (
            f"--{micro_batch.setting if micro_batch else 'micro_train_batch_size'} twice as large, where memory is left"
        )
    at_rest = max(_number(row, "memory/held_device_mib") for row in rows)
    peak = max(_number(row, "memory/peak_device_mib") for row in rows)
    room = min(_number(row, "memory/room_device_mib") for row in rows)
    memory = f"the largest step took {peak / 1024:.1f} of {room / 1024:.1f} GiB"
    if any(_number(row, "policy/micro_batch_halvings") for row in rows) or peak <= at_rest:
        return f"nothing in the settings of its parts: {memory}, and larger micro-batches did not fit"
    batches = _batches_of_an_update(rows)
    if batches <= 1:
        return "a larger --train_batch_size: each update is one micro-batch already"
    factor = (room * (1 - SPARE) - at_rest) / (peak - at_rest)
    size = int(micro_batch.size * min(factor, batches))
    if size <= micro_batch.size:
        return f"nothing in the settings of its parts: {memory}, and no larger micro-batch is sure to fit"
    return f"--{micro_batch.setting} {size}: {memory}, {(peak - at_rest) / 1024:.1f} of it with the micro-batch"


def _batches_of_an_update(rows: Sequence[Row]) -> int:
    """Return the most micro-batches that one update of these steps was made of."""
    updates = [_number(row, "policy/total_updates") for row in rows]
    made = [later - earlier for earlier, later in pairwise(updates)]
    batches = [_number(row, "policy/micro_batches") for row in rows[1:]]
    return max((math.ceil(num / update) for num, update in zip(batches, made, strict=True) if update > 0), default=1)


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else 0.0  # type: ignore[arg-type]
