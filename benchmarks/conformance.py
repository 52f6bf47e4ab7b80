"""Put the cases of tests/conformance to this project and to its peers, and print who computes what.

python benchmarks/conformance.py            all trainers whose environments are there
    --only trl --only verl                  these alone; the others keep what is recorded
    --recorded                              run nothing, print what is recorded
    --write                                 write benchmarks/results/conformance.json and docs/conformance.md

TRL is in the dependency group `bench`; verl and OpenRLHF have projects of their own below
benchmarks/peers, made with `uv sync` there. Each runs in its own interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # before the folder of this file, whose name is that of the package

from conformance import page, record  # noqa: E402
from conformance.make_cases import read  # noqa: E402

PEERS = ROOT / "benchmarks" / "peers"


def interpreter(trainer: str) -> Path:
    """The Python that has the trainer."""
    own = PEERS / trainer / ".venv" / "bin" / "python"
    return own if (PEERS / trainer).is_dir() else Path(sys.executable)


def run(trainer: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """What the trainer's interpreter makes of the cases."""
    python = interpreter(trainer)
    if not python.exists():
        sys.exit(f"{python} is not there: run `uv sync` in {python.parents[2]}")
    command = [str(python), "-m", "conformance.adapters.peer_runner", trainer]
    with tempfile.TemporaryDirectory() as folder:
        # by itself: a peer would take the folder of tests of vLLM for vLLM
        (Path(folder) / "conformance").symlink_to(ROOT / "tests" / "conformance")
        environment = os.environ | {"PYTHONPATH": folder, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, input=json.dumps(cases), capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        sys.exit(f"{trainer}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main() -> None:
    """Run, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", choices=record.TRAINERS, help="one trainer; may be repeated")
    parser.add_argument("--write", action="store_true", help="keep the results and the page")
    parser.add_argument("--recorded", action="store_true", help="run nothing")
    options = parser.parse_args()
    cases = read()
    kept: dict[str, Any] = record.read() if record.FILE.exists() else {"versions": {}, "results": {}}
    for trainer in () if options.recorded else options.only or record.TRAINERS:
        found = run(trainer, cases)
        kept["versions"][trainer] = found["versions"]
        kept["results"][trainer] = record.table(cases, found)
    ordered = {key: {t: kept[key][t] for t in record.TRAINERS if t in kept[key]} for key in ("versions", "results")}
    missing = [t for t in record.TRAINERS if t not in ordered["results"]]
    if missing:
        sys.exit(f"never run: {missing}")
    text = page.page(cases, ordered)
    print(text)
    if options.write:
        record.FILE.write_text(record.as_text(ordered))
        page.PAGE.write_text(text)


if __name__ == "__main__":
    main()
