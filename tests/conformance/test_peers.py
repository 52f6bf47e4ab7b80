"""What is recorded of other trainers is whole, and on the page; TRL, where installed, still computes it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from conformance import page, record
from conformance.make_cases import read

ROOT = Path(__file__).parents[2]
CASES = read()


def test_the_page_shows_the_record() -> None:
    assert page.PAGE.read_text() == page.page(CASES, record.read()), "run: python benchmarks/conformance.py --write"


def test_every_trainer_has_a_result_of_every_case() -> None:
    kept = record.read()
    assert kept["versions"].keys() == kept["results"].keys() == record.TRAINERS.keys()
    for trainer, entries in kept["results"].items():
        assert list(entries) == [case["id"] for case in CASES], trainer


def test_this_project_departs_nowhere() -> None:
    entries = record.read()["results"]["ours"]
    assert {name for name, entry in entries.items() if entry["status"] != "meets"} == set()
    assert {name for name, entry in entries.items() if "float32" in entry} == set()


def test_recorded_versions_are_those_of_the_locks() -> None:
    versions = record.read()["versions"]
    for trainer in ("verl", "openrlhf"):
        lock = tomllib.loads((ROOT / "benchmarks" / "peers" / trainer / "uv.lock").read_text())
        locked = {package["name"]: package["version"] for package in lock["package"] if "version" in package}
        assert {name: locked[name] for name in versions[trainer] if name in locked}
        for name, version in versions[trainer].items():
            assert name == "python" or locked[name] == version.split("+")[0]


if importlib.util.find_spec("trl") is not None:

    def test_trl_computes_what_is_recorded(tmp_path: Path) -> None:
        # this package alone: beside it in tests/ lie folders of the names of libraries that TRL looks for
        (tmp_path / "conformance").symlink_to(ROOT / "tests" / "conformance")
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "conformance.adapters.peer_runner", "trl"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, input=json.dumps(CASES), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        kept = record.read()
        assert found["versions"]["trl"] == kept["versions"]["trl"]["trl"]
        now = record.table(CASES, found)
        for name, entry in kept["results"]["trl"].items():
            # distances in float32 are rounding, which differs between machines
            for field in ("status", "variant", "in"):
                assert now[name].get(field) == entry.get(field), name
