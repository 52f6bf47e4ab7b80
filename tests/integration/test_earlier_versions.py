"""R13: what becomes of a run that an earlier version began: it goes on, or is refused by name and stays as it is.

`samples/rl_of_2026_11_23` is a run of two steps at commit 6dc0294a, with the model, the rows and the reward that it
began with; `expected.jsonl` has the next two steps as that version made them. The hash of rows has been computed
otherwise since, so that its ledger cannot be compared with the rows: it is refused.
"""

from __future__ import annotations

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


def test_r13_a_run_whose_rows_were_hashed_otherwise_is_refused_and_its_checkpoint_stays(
    server: ForkServer, runs: Path
) -> None:
    folder = runs / "sample"
    shutil.copytree(SAMPLE, folder)
    environment = folder / "run" / "env.json"
    environment.write_text(environment.read_text().replace("FOLDER", str(folder)))
    before = contents(folder / "run" / "checkpoints")
    ended = server.run("resume", str(folder / "run"), "--max_steps", "4")
    assert ended.code == NO_CHECKPOINT, ended.output[-3000:]
    assert "data_hash is" in ended.output
    assert "the checkpoint is untouched" in ended.output
    assert contents(folder / "run" / "checkpoints") == before
