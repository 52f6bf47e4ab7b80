"""R13: what becomes of a run that an earlier version began: it goes on, or is refused by name and stays as it is.

`samples/rl_of_2026_11_23` is a run of two steps at commit 6dc0294a, with the model, the rows and the reward that it
began with; `expected.jsonl` has the next two steps as that version made them. The hash of rows has been computed
otherwise since, so that its ledger cannot be compared with the rows: it is refused, and goes on where a person says
that they are the same.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.runs import ForkServer

pytestmark = pytest.mark.xdist_group("invariants")

SAMPLE = Path(__file__).with_name("samples") / "rl_of_2026_11_23"
NO_CHECKPOINT = 5


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sample(runs: Path) -> Path:
    """A copy of the sample, whose run names the folder that it is in."""
    folder = runs / "sample"
    shutil.copytree(SAMPLE, folder)
    environment = folder / "run" / "env.json"
    environment.write_text(environment.read_text().replace("FOLDER", str(folder)))
    return folder


def test_r12_a_run_whose_rows_were_hashed_otherwise_is_told_so_and_its_checkpoint_stays(
    server: ForkServer, runs: Path
) -> None:
    folder = sample(runs)
    before = contents(folder / "run" / "checkpoints")
    ended = server.run("resume", str(folder / "run"), "--max_steps", "4")
    assert ended.code == NO_CHECKPOINT, ended.output[-3000:]
    assert "the unnumbered scheme of an earlier version" in ended.output
    assert "--accept_changes prompt_data" in ended.output
    assert "the checkpoint is untouched" in ended.output
    assert contents(folder / "run" / "checkpoints") == before


def test_r12_a_run_whose_rows_were_hashed_otherwise_goes_on_where_its_rows_are_accepted(
    server: ForkServer, runs: Path
) -> None:
    folder = sample(runs)
    ended = server.run("resume", str(folder / "run"), "--max_steps", "4", "--accept_changes", "prompt_data")
    assert ended.code == 0, ended.output[-3000:]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [json.loads(line) for line in (folder / "expected.jsonl").read_text().splitlines()]
    # sums of float32 values may come in another order since
    found = [{name: row[name] for name in then} for row, then in zip(rows[-2:], expected, strict=True)]
    assert found == [pytest.approx(then, rel=1e-5) for then in expected]
