"""The sandbox of the reward `code`: programs a second, and what it adds to the time of a program.

    python benchmarks/sandbox.py                     # 200 programs, 5 repeats; results/sandbox.json
    python benchmarks/sandbox.py --programs 20 --repeats 1 --output /tmp/sandbox.json

`bare` runs each program with its test in a new process of the same interpreter, without any limit; `caged` runs it as
the reward does, `--at_once` of them at a time. Sides alternate, and every figure is the median of its repeats. The
overhead is of one program at a time, the median of its times in the cage less that without. Needs bubblewrap.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from rft_trainer.sandbox.cage import CageEnd, CageLimits, run_cages
from rft_trainer.sandbox.cage_main import encode
from rft_trainer.sandbox.interpreter import CagedPython
from rft_trainer.sandbox.isolation import proven_python

RESULTS = Path(__file__).parent / "results" / "sandbox.json"
PROGRAM = "def double(x):\n    return [2 * value for value in x]\n"
"""A solution of usual length; its test takes microseconds, so that the figures are those of the sandbox."""
TEST = {"call": "double", "args": [encode([1, 2, 3])], "kwargs": []}
LIMITS = CageLimits(cpu_seconds=2, memory_bytes=512 << 20, wall_seconds=20.0)


def main() -> None:
    """Measure both sides and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--at_once", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    python = proven_python()
    caged(python, 2, 1)  # the first one copies the interpreter's pages into memory
    seconds: dict[str, list[float]] = {"bare, 1 at a time": [], "caged, 1 at a time": [], "caged": []}
    few = max(1, asked.programs // 4)
    for _ in range(asked.repeats):
        seconds["bare, 1 at a time"].append(bare(few) / few)
        seconds["caged, 1 at a time"].append(caged(python, few, 1) / few)
        seconds["caged"].append(caged(python, asked.programs, asked.at_once) / asked.programs)
    medians = {name: median(values) for name, values in seconds.items()}
    figures = {
        "programs_per_second": round(1 / medians["caged"], 1),
        "at_once": asked.at_once,
        "overhead_ms": round(1000 * (medians["caged, 1 at a time"] - medians["bare, 1 at a time"]), 1),
        "milliseconds": {name: round(1000 * value, 2) for name, value in medians.items()},
        "programs": asked.programs,
        "repeats": asked.repeats,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    asked.output.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


def bare(number: int) -> float:
    """Seconds of as many programs, each in a process of its own."""
    code = f"{PROGRAM}\nprint(double([1, 2, 3]))"
    began = time.perf_counter()
    for _ in range(number):
        done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "[2, 4, 6]\n"
    return time.perf_counter() - began


def caged(python: CagedPython, number: int, at_once: int) -> float:
    """Seconds of as many programs, each in a cage of its own."""
    began = time.perf_counter()
    runs = run_cages(python, [(LIMITS, PROGRAM, [TEST])] * number, at_once=at_once)
    seconds = time.perf_counter() - began
    wrong = [run.reason for run in runs if run.end is not CageEnd.DONE]
    assert not wrong, wrong[0]
    return seconds


if __name__ == "__main__":
    main()
