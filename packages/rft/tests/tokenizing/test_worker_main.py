"""Worker processes of a store: the same bytes for any number of them, kills, and rows that cannot be used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft.tokenizing.demonstrations import StoredText
from rft.tokenizing.kinds import StoredRowsText
from rft.tokenizing.texts import tokenizer_digest
from rft.tokenizing.worker_main import make_tokenize
from rft_core.child_process import ChildProcess
from rft_core.errors import DataError, ServiceError
from rft_models.tiny_models.text import build_bpe_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer
from rft_trainer.data.store import worker_pool
from rft_trainer.data.store.build import build_store, in_this_process
from rft_trainer.data.store.published_file import shard_path
from rft_trainer.data.store.shards import ShardFacts, published_shards
from rft_trainer.data.store.worker_pool import BuildWorkers, in_workers

PARENT = """
import json, sys
from pathlib import Path
from rft.tokenizing.worker_main import make_tokenize
from rft_core.child_process import ChildProcess
from rft_trainer.data.store import worker_pool
from rft_trainer.data.store.build import build_store, in_this_process

class Told(ChildProcess):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        print(self.pid, flush=True)

worker_pool.ChildProcess = Told
given = json.loads(sys.argv[1])
directory, files, job = Path(given["directory"]), [[Path(given["file"])]], given["job"]
workers = worker_pool.BuildWorkers(given["command"], job, 2, fewest_shards=2)
here = in_this_process(directory, files, make_tokenize(job))
build_store(directory, files, worker_pool.in_workers(directory, files, workers, here), rows_of_shard=20)
"""
COMMAND = [sys.executable, "-P", "-m", "rft.tokenizing.worker_main"]
TEXT = StoredText(
    sources=["sums"],
    input_key="input",
    output_key="output",
    weight_key="",
    input_template="Q: {}",
    system_prompt="",
    apply_chat_template=False,
    roles=["assistant"],
    last_only=False,
    max_len=30,
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tokenizer on disk, and the text settings."""
    place = tmp_path_factory.mktemp("tokenizer")
    HfTokenizer(build_bpe_tokenizer(["1+1=2"], 258)).save_pretrained(place)
    rows = StoredRowsText("demonstrations", TEXT).as_record()
    return {"tokenizer": str(place), "digest": tokenizer_digest(load_tokenizer(place)), "rows": rows}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Forty sums, and some that are too long."""
    rows = [{"input": f"{n}+{n}=", "output": str(2 * n) * (1 + 20 * (n % 11 == 10))} for n in range(40)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def built(
    directory: Path, file: Path, job: dict[str, Any], num_workers: int, stopped: Callable[[], bool] = lambda: False
) -> list[ShardFacts]:
    here = in_this_process(directory, [[file]], make_tokenize(job))
    workers = BuildWorkers(COMMAND, job, num_workers, fewest_shards=2)
    return build_store(
        directory, [[file]], in_workers(directory, [[file]], workers, here, stopped=stopped), rows_of_shard=3
    )


@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_number_of_workers_changes_no_byte(
    tmp_path: Path, file: Path, job: dict[str, Any], num_workers: int
) -> None:
    alone = built(tmp_path / "alone", file, job, 1)
    several = built(tmp_path / "several", file, job, num_workers)
    assert several == alone
    assert len(alone) == 14
    assert published_shards(tmp_path / "several") == alone
    assert [name for facts in alone for name, _ in facts.too_long] == ["sums:10", "sums:21", "sums:32"]


def test_a_row_that_cannot_be_used_is_named_and_is_the_first_one(
    tmp_path: Path, file: Path, job: dict[str, Any]
) -> None:
    lines = file.read_text().splitlines()
    lines[20], lines[30] = '{"input": "", "output": "1"}', "{"
    file.write_text("\n".join(lines) + "\n")
    for num_workers in (1, 2):
        with pytest.raises(DataError) as caught:
            built(tmp_path / f"store_{num_workers}", file, job, num_workers)
        assert caught.value.problem.where == f"{file}:21:input"
        assert shard_path(tmp_path / f"store_{num_workers}", 5).is_dir()


def test_a_killed_worker_is_an_error_and_the_next_build_goes_on(
    tmp_path: Path, file: Path, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Seen(ChildProcess):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)

    def kill_one() -> bool:
        if len(started) == 2:
            os.kill(started.pop(), signal.SIGKILL)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(worker_pool, "ChildProcess", Seen)
        with pytest.raises(ServiceError, match=r"was killed by SIGKILL") as caught:
            built(tmp_path / "store", file, job, 2, kill_one)
    assert "--data_store_workers 1" in caught.value.problem.do
    # the worker that was left has built shards behind that of the killed one
    assert built(tmp_path / "store", file, job, 1) == built(tmp_path / "alone", file, job, 1)


def test_workers_end_when_the_process_is_asked_to_stop(tmp_path: Path, file: Path, job: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        built(tmp_path / "store", file, job, 2, lambda: shard_path(tmp_path / "store", 2).is_dir())
    assert built(tmp_path / "store", file, job, 1) == built(tmp_path / "alone", file, job, 1)


def test_a_killed_parent_takes_its_workers_along_and_the_next_build_goes_on(
    tmp_path: Path, job: dict[str, Any]
) -> None:
    file, directory = tmp_path / "many.jsonl", tmp_path / "store"
    file.write_text("".join(json.dumps({"input": f"{n}+{n}=", "output": str(2 * n)}) + "\n" for n in range(6000)))
    given = {"directory": str(directory), "file": str(file), "job": job, "command": COMMAND}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, json.dumps(given)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    # of any numbers: one worker may have built many before the other has started
    wait_for(lambda: len([*directory.glob("shard_*")]) >= 4)
    parent.kill()
    parent.communicate()
    wait_for(lambda: not any(map(runs, workers)))
    left = published_shards(directory)
    assert len(left) < 300, "it was killed within the build"
    kept = [shard_path(directory, n).stat().st_mtime_ns for n in range(len(left))]

    def again(place: Path) -> list[ShardFacts]:
        return build_store(place, [[file]], in_this_process(place, [[file]], make_tokenize(job)), rows_of_shard=20)

    assert again(directory) == again(tmp_path / "alone")
    assert [shard_path(directory, n).stat().st_mtime_ns for n in range(len(left))] == kept


def runs(process: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody has asked about is still listed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until something is so, at most ten minutes: on a busy machine the start of a process takes long."""
    end = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_another_tokenizer_in_the_place_of_the_parents_is_refused(job: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="is not the tokenizer"):
        make_tokenize({**job, "digest": "0"})


def test_a_worker_starts_without_torch() -> None:
    code = "import sys, rft.tokenizing.worker_main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0, "it takes three seconds"
