"""Hidden states to log-probabilities: ours beside naive torch, torch.compile, torch's chunked op, TRL and others.

    python benchmarks/logprob.py [--dtypes float32 bfloat16] [--threads 1 2] [--runs 5] [--gate_only]
    python benchmarks/logprob.py --device cuda

See README.md for what is compared. The last line is `worst_ratio=<x> against <peer> at <case>`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logprob_sides import Data, Side
    from torch import Tensor

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "logprob.json"
CPU_SHAPES = ((2048, 512, 32000),)
CUDA_SHAPES = ((8192, 4096, 151936), (8192, 2048, 128256), (2048, 4096, 151936), (8192, 1024, 50257))
TOLERANCES = {"float32": (1e-4, 1e-4), "bfloat16": (0.1, 2e-2)}
"""Gate: largest error of a log-probability (nats), relative L2 error of the gradients, against float64."""
PASSES = ("forward", "backward")
"""`backward` is forward with backward."""


# in the parent: workers, the table, the file


def run(arguments: argparse.Namespace) -> None:
    """All cases: gate, times, memory; then the file and the last line."""
    rows: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            for threads in arguments.threads:
                case = {"shape": shape, "dtype": dtype, "threads": threads}
                setting, found = _case(case, arguments)
                settings.append(setting)
                rows += found
                _print_case(case, setting, found)
    if not arguments.gate_only:
        _finish(rows, settings, arguments.output)


def _case(case: Mapping[str, Any], arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    answers = list(_worker(case, arguments, "--work", "times"))
    setting, rows = answers[0], answers[1:]
    if arguments.gate_only or arguments.device != "cpu":
        return setting, rows
    for row in rows:
        for name in PASSES:
            if row.get(f"{name}_seconds") is not None and row["name"] not in ("floor",):
                more = ("--work", "memory", "--side", row["name"], "--pass", name)
                row[f"{name}_mib"] = next(_worker(case, arguments, *more))["mib"]
    return setting, rows


def _worker(case: Mapping[str, Any], arguments: argparse.Namespace, *more: str) -> Iterator[dict[str, Any]]:
    command = [sys.executable, __file__, "--device", arguments.device, "--runs", str(arguments.runs)]
    command += ["--shape", *map(str, case["shape"]), "--dtypes", case["dtype"], "--threads", str(case["threads"])]
    command += ["--gate_only"] if arguments.gate_only else []
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(case["threads"]))
    env = {**os.environ, **threads, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if arguments.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"{' '.join(more)} at {dict(case)} ended with {process.returncode}")


def _print_case(case: Mapping[str, Any], setting: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    rows_x = " x ".join(map(str, case["shape"]))
    print(f"\n[{rows_x}] {case['dtype']}, {case['threads']} threads | " + json.dumps(setting))
    print(
        f"{'':<34}{'fwd ms':>9}{'f+b ms':>9}{'cpu f+b':>9}{'fwd MiB':>9}{'f+b MiB':>9}"
        f"{'floor/fwd':>10}{'floor/f+b':>10}"
        "   errors: log p (nats), dX, dW (relative)"
    )
    floors = next((row for row in rows if row["name"] == "floor"), {})
    for row in rows:
        numbers = [row.get(f"{name}_seconds") for name in PASSES]
        cells = "".join(f"{'-' if x is None else f'{1e3 * x:.1f}':>9}" for x in [*numbers, row.get("backward_cpu")])
        cells += "".join(f"{'-' if (x := row.get(f'{name}_mib')) is None else f'{x:.0f}':>9}" for name in PASSES)
        for name, seconds in zip(PASSES, numbers, strict=True):
            share = None if not seconds or not floors.get(f"{name}_seconds") else floors[f"{name}_seconds"] / seconds
            cells += f"{'-' if share is None else f'{100 * share:.0f} %':>10}"
        errors = " ".join("-" if x is None else f"{x:.0e}" for x in row.get("errors", ()))
        print(f"{row['name']:<34}{cells}   {errors}", flush=True)


def _finish(rows: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]], output: Path | None) -> None:
    worst: tuple[float, str] | None = None
    for key in sorted({json.dumps(row["case"]) for row in rows}):
        case = [row for row in rows if json.dumps(row["case"]) == key and row.get("backward_seconds")]
        ours = min(row["backward_seconds"] for row in case if row["ours"])
        for row in case:
            if not row["ours"] and row["name"] != "floor":
                ratio = row["backward_seconds"] / ours
                worst = min(worst or (ratio, ""), (ratio, f"{row['name']} at {key}"))
    assert worst is not None
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        report = {"settings": list(settings), "worst_ratio": worst[0], "worst_case": worst[1], "rows": list(rows)}
        output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"worst_ratio={worst[0]:.2f} against {worst[1]}")


# in the worker


def work(arguments: argparse.Namespace) -> None:
    """Times of all sides, or the memory of one; a line of JSON each. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from logprob_sides import make_data, missing, sides

    torch.set_num_threads(arguments.threads[0])
    dtype = getattr(torch, arguments.dtypes[0])
    data = make_data(tuple(arguments.shape), dtype, arguments.device)
    chosen = sides(arguments.device)
    if arguments.work == "memory":
        side = next(side for side in chosen if side.name == arguments.side)
        print(json.dumps({"mib": _peak_mib(_call(side, getattr(arguments, "pass"), data))}), file=answers, flush=True)
        return
    setting = {
        **{name: _version(name) for name in ("torch", "trl", "transformers")},
        **{"threads": torch.get_num_threads(), "runs": arguments.runs, "load": round(os.getloadavg()[0], 2)},
        "not_run": missing(arguments.device),
    }
    print(json.dumps(setting), file=answers, flush=True)
    case = {"shape": arguments.shape, "dtype": arguments.dtypes[0], "threads": arguments.threads[0]}
    for row in _rows(chosen, data, arguments):
        print(json.dumps({"case": case, **row}), file=answers, flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _rows(chosen: Sequence[Side], data: Data, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    checked = {side.name: _checked(side, data, arguments.dtypes[0]) for side in chosen}
    rows: list[dict[str, Any]] = [
        {"name": side.name, "ours": side.ours, "units": side.units, "errors": checked[side.name]} for side in chosen
    ]
    if arguments.gate_only:
        return rows
    for name in PASSES:
        calls = {side.name: call for side in chosen if (call := _call(side, name, data)) is not None}
        calls["floor"] = _floor(data, name)
        measured = _measured(calls, arguments.runs, data.hidden.is_cuda)
        rows += [{"name": "floor", "ours": False, "units": (1, 3)}] if name == PASSES[0] else []
        for row in rows:
            if row["name"] in measured:
                wall, cpu, everything = measured[row["name"]]
                row |= {f"{name}_seconds": wall, f"{name}_cpu": cpu, f"{name}_all": everything}
    if data.hidden.is_cuda:
        for row, side in zip(rows, chosen, strict=False):
            row |= {f"{name}_mib": _cuda_mib(call) for name in PASSES if (call := _call(side, name, data)) is not None}
    return rows


def _call(side: Side, name: str, data: Data) -> Callable[[], object] | None:
    function = side.forward if name == "forward" else side.backward
    return None if function is None else lambda: function(data)


def _floor(data: Data, name: str) -> Callable[[], object]:
    from logprob_sides import floor_products

    return floor_products(data)[PASSES.index(name)]


def _checked(side: Side, data: Data, dtype: str) -> list[float | None]:
    """Errors of log p, dX and dW against float64; ends the benchmark where they are too large."""
    import torch

    assert side.backward is not None
    found = side.backward(data)
    grad = torch.full_like(data.grad, -1 / data.grad.shape[0]) if side.mean_only else data.grad
    expected = _reference(data, grad)
    errors = [None if x is None else _error(x, y, k == 0) for k, (x, y) in enumerate(zip(found, expected, strict=True))]
    values, gradients = TOLERANCES[dtype]
    for error, allowed in zip(errors, (values, gradients, gradients), strict=True):
        if error is not None and not error <= allowed:
            raise SystemExit(f"equality gate of {side.name} failed: {errors}")
    return errors


def _error(found: Tensor, expected: Tensor, largest: bool) -> float:
    apart = found.double() - expected
    return float(apart.abs().max() if largest else apart.norm() / expected.norm())


_KNOWN: dict[str, tuple[Tensor, Tensor, Tensor]] = {}


def _reference(data: Data, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In float64 from the same inputs, 256 rows at a time."""
    import torch

    key = str(float(grad[0]))
    if key not in _KNOWN:
        hidden, weight = data.hidden.double(), data.weight.double()
        logprobs, grad_hidden = grad.new_empty(grad.shape, dtype=torch.float64), torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for start in range(0, hidden.shape[0], 256):
            part = slice(start, start + 256)
            table = torch.log_softmax(hidden[part] @ weight.T, -1)
            targets = data.targets[part, None]
            logprobs[part] = table.gather(1, targets)[:, 0]
            slopes = table.exp_().mul_(-grad[part, None].double())
            slopes.scatter_add_(1, targets, grad[part, None].double())
            grad_hidden[part] = slopes @ weight
            grad_weight += slopes.T @ hidden[part]
        _KNOWN[key] = logprobs, grad_hidden, grad_weight
    return _KNOWN[key]


def _measured(
    calls: Mapping[str, Callable[[], object]], runs: int, cuda: bool
) -> dict[str, tuple[float, float, list[float]]]:
    """Medians of wall and CPU seconds; all sides in turn, forwards and backwards by turns, one run of warm-up."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(runs + 1):
        for name in list(calls) if number % 2 else list(calls)[::-1]:
            seconds = _seconds(calls[name], cuda)
            if number:
                wall[name].append(seconds[0])
                cpu[name].append(seconds[1])
    return {name: (statistics.median(wall[name]), statistics.median(cpu[name]), wall[name]) for name in calls}


def _seconds(call: Callable[[], object], cuda: bool) -> tuple[float, float]:
    if cuda:
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        results = call()
        end.record()
        torch.cuda.synchronize()
        del results
        return begin.elapsed_time(end) / 1e3, 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    results = call()
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    del results
    return seconds


def _peak_mib(call: Callable[[], object] | None) -> float:
    """How far the resident set rises over one call after one of warm-up, freed memory handed back before."""
    assert call is not None
    call()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    call()
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def _cuda_mib(call: Callable[[], object]) -> float:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def parse() -> argparse.Namespace:
    """The command line; what has no help is for the processes started from here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(TOLERANCES))
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--runs", type=int, default=5, help="measured calls of each side (after 1 of warm-up)")
    parser.add_argument("--shape", nargs=3, type=int, metavar=("ROWS", "WIDTH", "VOCABULARY"))
    parser.add_argument("--gate_only", action="store_true", help="compare with float64, time nothing")
    parser.add_argument("--output", type=Path, help="results file; that of all cases is results/logprob.json")
    parser.add_argument("--work", choices=("times", "memory"), help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--pass", choices=PASSES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    whole = arguments.shape is None and arguments.dtypes is None
    if arguments.output is None and whole:
        arguments.output = RESULTS if arguments.device == "cpu" else RESULTS.with_name("logprob_cuda.json")
    arguments.dtypes = arguments.dtypes or (list(TOLERANCES) if arguments.device == "cpu" else ["bfloat16"])
    shapes = CPU_SHAPES if arguments.device == "cpu" else CUDA_SHAPES
    arguments.shapes = [arguments.shape] if arguments.shape else [list(shape) for shape in shapes]
    arguments.threads = arguments.threads if arguments.device == "cpu" else [1]
    return arguments


if __name__ == "__main__":
    chosen_arguments = parse()
    if chosen_arguments.work:
        work(chosen_arguments)
    else:
        run(chosen_arguments)
