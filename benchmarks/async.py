"""Rollouts ahead of the trainer against one after the other: samples a second and rewards, two replicas, long tails.

    python benchmarks/async.py [--quick] [--seeds 3] [--steps 48]

The real loop, engine processes and weights: a tiny decoder, GRPO on a reward that it learns, one thread a process. The
length of each response is given by its key: lognormal, so that the longest of a step has about eight times the median.
Sizes are such that the rollout takes about three quarters of a step when one follows the other. Sides take turns, seed
by seed; each run starts processes of its own, and its first three steps are not measured. All sides see the same
prompts, keys and lengths.

Two cores are shared by the trainer and two replicas. One after the other, the trainer's phase leaves one core idle and
the tail of a rollout as well; that is what runs ahead can fill. The second table is simulated from the times of
decoding, prefill and training measured: these two replicas on the cores that they share with the trainer, and 8 and 64
replicas beside a trainer that grows with them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from async_run import Measured, Workload, run
from async_simulated import Times, simulate

from rft_models.decode.fast_decoder import decoder_for
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_model

RESULTS = Path(__file__).resolve().parent / "results" / "async.json"
Found = dict[str, list[Measured]]
"""Runs by side."""

SIDES = {
    "one after the other": (0, False),
    "staleness 1": (1, False),
    "staleness 2": (2, False),
    "staleness 4": (4, False),
    "staleness 1, deterministic": (1, True),
}
BASE, TARGET = "one after the other", "staleness 1"
LAST = 0.25


def engine_times(model: Path, work: Workload) -> tuple[float, float, float]:
    """(seconds of a decode step, seconds more a row, seconds a prefilled token) of one replica's decoder."""
    decoder, points = decoder_for(load_policy(model)), {}
    with torch.inference_mode():
        for rows in (1, work.samples_per_step // 2, work.samples_per_step):
            cache = decoder.new_cache(rows, work.longest + 8)
            decoder.prefill(cache, torch.full((1, 4), 3), torch.tensor([4]), [rows])
            tokens = torch.full((rows,), 3)
            found = []
            for _ in range(60):
                started = time.perf_counter()
                decoder.step(cache, tokens)
                found.append(time.perf_counter() - started)
            points[rows] = statistics.median(found)
        few, most = min(points), max(points)
        each = max((points[most] - points[few]) / (most - few), 0.0)
        cache = decoder.new_cache(16, work.longest + 8)
        prompts = torch.full((16, work.longest // 2), 3)
        started = time.perf_counter()
        decoder.prefill(cache, prompts, torch.full((16,), work.longest // 2), [1] * 16)
        prefill = (time.perf_counter() - started) / prompts.numel()
    return points[few] - each * few, each, prefill


def last_reward(measured: Measured) -> float:
    """Mean reward of the last quarter of a run."""
    num = max(1, round(LAST * len(measured.rewards)))
    return statistics.fmean(measured.rewards[-num:])


def table(found: dict[str, list[Measured]]) -> list[str]:
    """One line a side."""
    base = statistics.median(one.samples_per_second for one in found[BASE])
    lines = [f"{'':<28}samples/s  times  staleness  reward by quarter of the run        last quarter"]
    for side, runs in found.items():
        rate = statistics.median(one.samples_per_second for one in runs)
        curve = quarters(runs)
        last = [last_reward(one) for one in runs]
        spread = f"{statistics.fmean(last):.3f} ({min(last):.3f} to {max(last):.3f})"
        lag = statistics.fmean(one.staleness for one in runs)
        shown = "  ".join(f"{value:.3f}" for value in curve)
        lines.append(f"{side:<28}{rate:9.1f}  {rate / base:5.2f}  {lag:9.2f}  {shown:<34}  {spread}")
    return lines


def quarters(runs: list[Measured]) -> list[float]:
    """Mean reward in each quarter, over runs."""
    num = len(runs[0].rewards)
    bounds = [round(i * num / 4) for i in range(5)]
    return [
        statistics.fmean(reward for one in runs for reward in one.rewards[bounds[i] : bounds[i + 1]]) for i in range(4)
    ]


def simulated(times: Times, work: Workload) -> dict[int, dict[int, float]]:
    """Samples a second by replicas and staleness."""
    samples = work.samples_per_step // work.num_replicas
    lengths = [work.length(i) for i in range(4096)]
    found: dict[int, dict[int, float]] = {}
    for replicas in (work.num_replicas, 8, 64):
        steps = {2: 192, 8: 48, 64: 12}[replicas]
        speed = 1 - 1 / replicas if replicas == work.num_replicas else 1.0  # here the trainer sits on one of the cores
        found[replicas] = {
            staleness: simulate(times, replicas, samples, staleness, steps, lambda i: lengths[i * 7919 % 4096], speed)
            for staleness in (0, 1, 2, 4)
        }
    return found


def measure(sides: dict[str, tuple[int, bool]], work: Workload, seeds: int, steps: int) -> tuple[Found, Times]:
    """All runs, and the times that the simulation takes."""
    found: Found = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model"
        model = build_character_model(
            place, hidden=work.hidden, layers=work.layers, ffn=3 * work.hidden, max_positions=work.longest + 8
        )
        for seed in range(seeds):
            for side, (staleness, deterministic) in sides.items():
                one = run(model, work, staleness, steps, seed, deterministic=deterministic)
                found[side].append(one)
                phases = ", ".join(f"{name} {value:.2f}" for name, value in one.phases.items())
                print(f"seed {seed}  {side:<28}{one.samples_per_second:8.1f} samples/s  s a step: {phases}", flush=True)
        fixed, each, prefill = engine_times(model, work)
    train = statistics.median(one.phases["train"] for one in found[BASE])
    return found, Times(fixed, each, prefill, train)


def simulated_lines(times: Times, more: dict[int, dict[int, float]]) -> list[str]:
    """One line a number of replicas."""
    lines = [
        f"simulated from {1e3 * times.fixed:.2f} ms + {1e3 * times.each:.3f} ms a row for a decode step, "
        f"{1e6 * times.prefill:.0f} us a prefilled token, {times.train:.2f} s of training a step:"
    ]
    for replicas, row in more.items():
        told = "  ".join(f"staleness {k}: {rate:8.0f} ({rate / row[0]:.2f})" for k, rate in row.items())
        lines.append(f"{replicas:>3} replicas, samples/s (times)  {told}")
    return lines


def record_of(found: Found, times: Times, more: dict[int, dict[int, float]], work: Workload) -> dict[str, Any]:
    """Everything, as JSON."""
    return {
        "workload": {name: getattr(work, name) for name in Workload.__slots__},
        "seeds": len(found[BASE]),
        "rewards": {side: [one.rewards for one in runs] for side, runs in found.items()},
        "samples_per_second": {side: [one.samples_per_second for one in runs] for side, runs in found.items()},
        "reward_last_quarter": {side: [last_reward(one) for one in runs] for side, runs in found.items()},
        "staleness": {side: statistics.fmean(one.staleness for one in runs) for side, runs in found.items()},
        "phases": {side: [one.phases for one in runs] for side, runs in found.items()},
        "simulated": {str(replicas): {str(k): rate for k, rate in row.items()} for replicas, row in more.items()},
        "times": {name: getattr(times, name) for name in Times.__slots__},
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__, "threads": 1},
    }


def main() -> None:
    """All runs, both tables, the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, fewer sides: under two minutes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    work, seeds, steps, sides = Workload(), options.seeds, options.steps, SIDES
    if options.quick:
        seeds, steps, sides = 1, 8, {side: SIDES[side] for side in (BASE, TARGET, "staleness 4")}
    found, times = measure(sides, work, seeds, steps)
    more = simulated(times, work)
    print("", *table(found), "", *simulated_lines(times, more), sep="\n")
    if not options.quick:
        RESULTS.write_text(json.dumps(record_of(found, times, more, work), indent=2) + "\n")
    base, ahead = (statistics.median(one.samples_per_second for one in found[side]) for side in (BASE, TARGET))
    print(f"worst_ratio={ahead / base:.2f} against {BASE} at {TARGET}")


if __name__ == "__main__":
    main()
