"""Tokens a second of the in-process engine beside transformers and vLLM's CPU build, in one run.

    python benchmarks/rollout.py [--sizes 0.6M 10M 100M] [--engines hf hf_continuous vllm] [--rounds 5] [--threads 2]
                                 [--vllm_python PATH]

See README.md for what is compared. The last line is `worst_ratio=<x> against <peer> at <case>`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_case import CASES, SHAPES, Case, best_rates, build_directory, floor_seconds, num_parameters

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "rollout.json"
PEERS = ("hf", "hf_continuous", "vllm")
SLOW = ("hf_continuous",)
"""A rollout takes these nearly a minute at 0.6 M parameters: the smallest model alone, and one round that counts."""


class Side:
    """One engine in a process of its own, that rolls out once for every line it is sent."""

    def __init__(self, engine: str, directory: Path, number: int, python: Path, threads: int) -> None:
        env = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        env |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        env |= {"PYTHONPATH": str(HERE), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self.engine = engine
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [str(python), str(HERE / "rollout_sides.py"), engine, str(directory), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=env,
        )
        self.rounds: list[dict[str, float]] = []
        self.reason = "" if self._answer() else self._last_words()

    def roll_out(self, number: int, *, counts: bool) -> None:
        """One rollout; the reason why not is kept where the process ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer is None:
            self.reason = self._last_words()
        elif counts:
            self.rounds.append(answer)

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def median(self, field: str) -> float:
        """Over the rounds that count."""
        return statistics.median(answer[field] for answer in self.rounds)

    def _answer(self) -> dict[str, float] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f"{lines[-1] if lines else 'no words'} (ended with {self._process.returncode})"


def measured(number: int, arguments: argparse.Namespace, rates: tuple[float, float]) -> dict[str, Any]:
    """All engines on one case, in turn, the order turned round every second time."""
    case = CASES[number]
    pythons: dict[str, Path] = {"vllm": arguments.vllm_python} if arguments.vllm_python else {}
    with tempfile.TemporaryDirectory() as folder:
        directory = build_directory(case, Path(folder))
        engines = ["native", *arguments.engines]
        known = [e for e in engines if (e != "vllm" or "vllm" in pythons) and (e not in SLOW or case.size == "0.6M")]
        sides = [Side(e, directory, number, pythons.get(e, Path(sys.executable)), arguments.threads) for e in known]
        for turn in range(arguments.rounds + 1):
            for side in sides if turn % 2 else sides[::-1]:
                if not side.reason and (turn <= 1 or side.engine not in SLOW):
                    side.roll_out(turn, counts=turn > 0)
        for side in sides:
            side.close()
    return {"case": case.name, "parameters": num_parameters(case), **_figures(case, sides, rates)}


def _figures(case: Case, sides: list[Side], rates: tuple[float, float]) -> dict[str, Any]:
    by_flop, by_bytes = floor_seconds(case, *rates)
    engines: dict[str, Any] = {}
    for side in sides:
        if side.reason:
            engines[side.engine] = {"reason": side.reason}
            continue
        fields = ("seconds", "cpu_seconds", "tokens", "peak_mib")
        engines[side.engine] = {name: side.median(name) for name in fields}
        engines[side.engine]["all_seconds"] = [answer["seconds"] for answer in side.rounds]
    if "reason" in engines["native"]:
        raise SystemExit(f"ours did not run: {engines['native']['reason']}")
    ours = engines["native"]["seconds"]
    ratios = {name: figures["seconds"] / ours for name, figures in engines.items() if "seconds" in figures}
    ratios.pop("native")
    return {"floor_flop_seconds": by_flop, "floor_bytes_seconds": by_bytes, "engines": engines, "ratios": ratios}


def show(row: Mapping[str, Any]) -> None:
    """One line an engine."""
    floors = row["floor_flop_seconds"], row["floor_bytes_seconds"]
    print(f"{row['case']}: floor {floors[0]:.2f} s by products, {floors[1]:.2f} by bytes")
    for name, figures in row["engines"].items():
        if "reason" in figures:
            print(f"    {name:<14} did not run: {figures['reason'][:150]}")
            continue
        rate, ratio = figures["tokens"] / figures["seconds"], row["ratios"].get(name)
        beside = "" if ratio is None else f"   ours is {ratio:.2f} times as fast"
        print(f"    {name:<14}{rate:>9.0f} tokens/s{figures['seconds']:>8.2f} s{figures['peak_mib']:>7.0f} MiB{beside}")
    sys.stdout.flush()


def main() -> None:
    """Cases one after the other, the file, and the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--engines", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5, help="that count, after one of warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm_python", type=Path, help="of an environment made with --extra vllm-cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rates = best_rates(arguments.threads)
    print(f"{rates[0] / 1e9:.0f} GFLOP/s, {rates[1] / 1e9:.0f} GB/s, {arguments.threads} threads")
    rows = []
    for number, case in enumerate(CASES):
        if case.size in arguments.sizes:
            rows.append(measured(number, arguments, rates))
            show(rows[-1])
    whole = set(arguments.sizes) == set(SHAPES) and set(arguments.engines) == set(PEERS)
    output = arguments.output or (RESULTS if whole else None)
    if output is not None:
        setting = {"threads": arguments.threads, "rounds": arguments.rounds, "flop_rate": rates[0], "bytes": rates[1]}
        output.write_text(json.dumps({"setting": setting, "cases": rows}, indent=1) + "\n")
    found = [(ratio, peer, row["case"]) for row in rows for peer, ratio in row["ratios"].items()]
    if not found:
        sys.exit("no peer ran")
    ratio, peer, place = min(found)
    print(f"worst_ratio={ratio:.2f} against {peer} at {place}")


if __name__ == "__main__":
    main()
