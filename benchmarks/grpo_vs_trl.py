"""A whole GRPO step of this project beside one of TRL's GRPOTrainer, on a CPU in float32.

    python benchmarks/grpo_vs_trl.py [--cases 4096/256/4/p32 ...] [--steps 5] [--threads 1] [--quick]

See README.md for what is compared. The last line is `worst_ratio=<x> against trl <version> at <case>`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "grpo_vs_trl.json"
WARM_UP = 2
SIDES = ("ours", "trl")
PARTS = ("generate", "reward", "forward", "backward", "optimizer", "sync", "other")


class Side:
    """One system's loop in its own process, stepped from here."""

    def __init__(
        self, name: str, case_name: str, directory: Path, micro_batch: int, arguments: argparse.Namespace
    ) -> None:
        self.name = name
        command = [sys.executable, __file__, "--worker", name, "--cases", case_name]
        num_steps = WARM_UP + arguments.steps
        command += ["--directory", str(directory), "--steps", str(num_steps), "--threads", str(arguments.threads)]
        command += ["--micro_batch", str(micro_batch)]
        self._errors = (directory / f"{name}.log").open("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(arguments.threads),
        )
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._errors.close()

    def step(self) -> dict[str, Any]:
        """Let it take one step; what its gate reported."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise SystemExit(f"{self.name} ended:\n{self._errors.read()[-4000:]}")
        return json.loads(line)


def _environment(threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {**os.environ, **dict.fromkeys(names, str(threads)), **quiet, "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class Measured:
    """One side in one case: medians over the steps."""

    seconds: float
    cpu_seconds: float
    fastest: float
    peak_mib: float
    parts: dict[str, float]
    all_seconds: list[float]
    micro_batch: int
    """Sequences of a forward and backward pass."""
    tokens: float
    """Tokens of a step's responses, mean of the steps."""
    seconds_per_token: float
    """Median over the steps, as `cpu_seconds_per_token`: where responses end by themselves the sides draw other
    lengths, so that only these can be compared."""
    cpu_seconds_per_token: float

    @classmethod
    def of(cls, steps: Sequence[Mapping[str, Any]], micro_batch: int) -> Self:
        """From the answers of the gate."""
        seconds = [step["seconds"] for step in steps]
        parts = {name: statistics.median(step["parts"].get(name, 0.0) for step in steps) for name in PARTS[:-1]}
        total = statistics.median(seconds)
        parts["other"] = statistics.median(step["seconds"] - sum(step["parts"].values()) for step in steps)
        cpu = statistics.median(step["cpu"] for step in steps)
        return cls(
            seconds=total,
            cpu_seconds=cpu,
            fastest=min(seconds),
            peak_mib=steps[-1]["peak_mib"],
            parts=parts,
            all_seconds=seconds,
            micro_batch=micro_batch,
            tokens=statistics.fmean(step["tokens"] for step in steps),
            seconds_per_token=statistics.median(step["seconds"] / step["tokens"] for step in steps),
            cpu_seconds_per_token=statistics.median(step["cpu"] / step["tokens"] for step in steps),
        )


def measure(case_name: str, directory: Path, micro_batch: int, arguments: argparse.Namespace) -> dict[str, Measured]:
    """Both loops, resident together and stepping in turn: ours TRL TRL ours ours TRL ..."""
    directory = directory / f"micro_batches_of_{micro_batch}"
    directory.mkdir()
    for file in directory.parent.iterdir():
        if file.is_file():
            (directory / file.name).symlink_to(file)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    with (
        Side("ours", case_name, directory, micro_batch, arguments) as ours,
        Side("trl", case_name, directory, micro_batch, arguments) as trl,
    ):
        for number in range(WARM_UP + arguments.steps):
            for side in (ours, trl) if number % 2 == 0 else (trl, ours):
                answers[side.name].append(side.step())
    return {name: Measured.of(steps[WARM_UP:], micro_batch) for name, steps in answers.items()}


def check_gate(case_name: str, directory: Path, threads: int) -> dict[str, Any]:
    """The equality gate in a process of its own; ends the benchmark where it does not hold."""
    command = [sys.executable, __file__, "--worker", "gate", "--cases", case_name, "--directory", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(threads), check=False)
    if done.returncode:
        raise SystemExit(f"equality gate of {case_name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def work(arguments: argparse.Namespace) -> None:
    """A worker process: one side, the gate, or the rate of products. What libraries print goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from grpo_case import CASES, MORE_CASES, build_directory, product_rate

    torch.set_num_threads(arguments.threads)
    if arguments.worker == "rate":
        print(json.dumps({"rate": product_rate(), "torch": torch.__version__}), file=answers, flush=True)
        return
    case = next(case for case in (*CASES, *MORE_CASES) if case.name == arguments.cases[0])
    if arguments.worker == "build":
        build_directory(case, arguments.directory)
        return
    if arguments.worker == "gate":
        from grpo_gate import check

        agreement = check(case, arguments.directory)
        print(json.dumps(asdict(agreement)), file=answers, flush=True)
        sys.exit(0 if agreement.holds else 1)
    from grpo_sides import Gate, drive_ours, drive_trl

    gate = Gate(sys.stdin, answers)
    if arguments.worker == "ours":
        drive_ours(case, arguments.directory, arguments.steps, gate, arguments.micro_batch)
    else:
        drive_trl(case, arguments.directory, arguments.steps, gate, arguments.micro_batch)


def _worker(name: str, threads: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", name, "--threads", str(threads), *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=_environment(threads), check=True)
    return json.loads(done.stdout) if done.stdout.strip() else {}


def run(arguments: argparse.Namespace) -> None:
    """All cases: build, gate, measure, print; then the file and the last line."""
    from grpo_case import CASES, MORE_CASES, floor

    chosen = [case for case in (*CASES, *MORE_CASES) if case.name in arguments.cases]
    rate = _worker("rate", arguments.threads)
    rows: list[dict[str, Any]] = []
    setting = _setting(arguments, rate)
    print(" | ".join(f"{name} {value}" for name, value in setting.items()))
    for case in chosen:
        with tempfile.TemporaryDirectory(prefix="grpo_vs_trl_") as name:
            directory = Path(name)
            _worker("build", arguments.threads, "--cases", case.name, "--directory", name)
            gate = check_gate(case.name, directory, arguments.threads)
            if arguments.gate_only:
                print(f"{case.name}: loss {gate['loss']:.1e}, gradients {gate['gradient']:.1e} apart", flush=True)
                continue
            sizes = sorted({min(size, case.num_sequences) for size in arguments.micro_batches})
            measured = [measure(case.name, directory, size, arguments) for size in sizes]
        tokens = statistics.fmean(pair["ours"].tokens for pair in measured)
        seconds = floor(case, tokens / case.num_sequences).seconds(rate["rate"])
        rows.append(_row(case.name, gate, measured, seconds))
        _print_row(rows[-1], header=len(rows) == 1)
    if rows:
        _finish(rows, setting, arguments)


def _setting(arguments: argparse.Namespace, rate: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "trl": version("trl"),
        "transformers": version("transformers"),
        "torch": rate["torch"],
        "python": platform.python_version(),
        "threads": arguments.threads,
        "steps": arguments.steps,
        "micro_batches": arguments.micro_batches,
        "gflop_per_second": round(rate["rate"] / 1e9, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _row(
    case_name: str, gate: Mapping[str, Any], measured: Sequence[Mapping[str, Measured]], floor_seconds: float
) -> dict[str, Any]:
    """Each side with the micro-batch that serves it best, by CPU time; `ratio_at` has both at the same one."""
    best = {name: min((pair[name] for pair in measured), key=lambda side: side.cpu_seconds_per_token) for name in SIDES}
    at = {str(pair["ours"].micro_batch): _cpu_ratio(pair["trl"], pair["ours"]) for pair in measured}
    return {
        "case": case_name,
        "ratio": best["trl"].seconds_per_token / best["ours"].seconds_per_token,
        "cpu_ratio": _cpu_ratio(best["trl"], best["ours"]),
        "cpu_ratio_at": at,
        "default_cpu_ratio": _cpu_ratio(best["trl"], measured[0]["ours"]),
        "floor_seconds": floor_seconds,
        "gate": dict(gate),
        **{name: asdict(side) for name, side in best.items()},
        "all": [{name: asdict(side) for name, side in pair.items()} for pair in measured],
    }


def _cpu_ratio(one: Measured, other: Measured) -> float:
    return one.cpu_seconds_per_token / other.cpu_seconds_per_token


def _print_row(row: Mapping[str, Any], *, header: bool) -> None:
    if header:
        names = "".join(f"{name:>10}" for name in PARTS)
        head = f"{'case':<26}{'side':<6}{'micro':>6}{'tokens':>8}{'step ms':>9}{'cpu ms':>9}"
        print(f"{head}{'x floor':>9}{'peak MiB':>9}{names}")
    for name in SIDES:
        side = row[name]
        parts = "".join(f"{1e3 * side['parts'][part]:>10.1f}" for part in PARTS)
        line = f"{row['case']:<26}{name:<6}{side['micro_batch']:>6}{side['tokens']:>8.0f}"
        line += f"{1e3 * side['seconds']:>9.1f}{1e3 * side['cpu_seconds']:>9.1f}"
        print(f"{line}{side['seconds'] / row['floor_seconds']:>9.2f}{side['peak_mib']:>9.0f}{parts}")
    gate, floor_ms = row["gate"], 1e3 * row["floor_seconds"]
    apart = "".join(f" {name} {gate[name]:.1e}" for name in ("loss", "gradient", "entropy"))
    at = "".join(f", both {size} {ratio:.2f}" for size, ratio in row["cpu_ratio_at"].items())
    ratios = f"ratio {row['ratio']:.2f} (cpu time {row['cpu_ratio']:.2f}{at})"
    print(f"{'':<26}{ratios}, floor {floor_ms:.1f} ms; apart by{apart}", flush=True)


def _finish(rows: Sequence[Mapping[str, Any]], setting: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    worst = min(rows, key=lambda row: row["ratio"])
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        report = {"setting": dict(setting), "worst_ratio": worst["ratio"], "worst_case": worst["case"], "cases": rows}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"worst_ratio={worst['ratio']:.2f} against trl {setting['trl']} at {worst['case']}")


def parse() -> argparse.Namespace:
    """The command line; `--worker`, `--directory` and `--micro_batch` are for the processes started from here."""
    from grpo_case import CASES, MORE_CASES

    names = [case.name for case in (*CASES, *MORE_CASES)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[case.name for case in CASES],
        choices=names,
        metavar="CASE",
        help=", ".join(names),
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side (after 2 of warm-up)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--micro_batches", type=int, nargs="+", default=[8, 64], help="sequences a pass; each side has its better one"
    )
    parser.add_argument("--quick", action="store_true", help="3 steps; the results file is left as it is")
    parser.add_argument("--gate_only", action="store_true", help="compare losses and gradients, time nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--worker", choices=("ours", "trl", "gate", "rate", "build"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--micro_batch", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.output = 3, None
    return arguments


if __name__ == "__main__":
    chosen_arguments = parse()
    if chosen_arguments.worker:
        work(chosen_arguments)
    else:
        run(chosen_arguments)
