"""Who starts the ranks of a run, what is shown of one that failed, and what the ranks compare."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.process import launching
from rft.resolved import Origin
from rft_core.errors import OptionsError
from rft_dist.launch.environment import SPAWNED
from rft_dist.launch.spawn import Ended
from rft_dist.launch.supervise import SUPERVISED

RANKS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
FILE = Origin("file", "c.yaml", 3)


def resolved(kind: Any = None, **values: Any) -> Any:
    usual = {"nproc": 2, "save_path": "here", "train_batch_size": 8, "micro_train_batch_size": 2}
    return SimpleNamespace(values=usual | values, origins={"nproc": kind or Origin("command line"), "tp_size": FILE})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be started; it ends well."""
    found: list[Any] = []

    def note(command: Any, nproc: int, *, log_folder: Path, nodes: Any = None, meetings: int) -> Ended:
        found.append((command, nproc, log_folder))
        return Ended(0, None, (0,) * nproc, ())

    monkeypatch.setattr(launching, "spawn_ranks", note)
    for name in (*RANKS, SPAWNED, SUPERVISED):
        monkeypatch.delenv(name, raising=False)
    return found


def launched(monkeypatch: pytest.MonkeyPatch, *, here: str = "2") -> None:
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    for name, value in (given | ({"LOCAL_WORLD_SIZE": here} if here else {})).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("save_path", "run", "folder"),
    [
        ("here", None, "here/logs"),
        ("~/here", None, f"{Path('~').expanduser()}/here/logs"),
        ("here", Path("there"), "there/logs"),
    ],
)
def test_ranks_write_into_the_folder_of_their_run(
    started: list[Any], save_path: str, run: Path | None, folder: str
) -> None:
    assert launching.spawned(resolved(save_path=save_path, nproc=3), ["a", "b"], run=run) == 0
    assert started == [(["a", "b"], 3, Path(folder))]


def test_ranks_of_a_run_without_a_name_write_into_a_folder_of_their_own(started: list[Any]) -> None:
    launching.spawned(resolved(save_path=""), ["a"])
    [(_, _, folder)] = started
    assert folder.parent == Path("runs/.ranks")
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\dT\d\d-\d\d-\d\d-{os.getpid()}", folder.name)


def test_one_process_goes_on_by_itself(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (0, 1):
        assert launching.spawned(resolved(nproc=number), ["a"]) is None
    assert launching.spawned(SimpleNamespace(values={}), ["a"]) is None  # type: ignore[arg-type]
    monkeypatch.setenv(SPAWNED, "2")
    assert launching.spawned(resolved(), ["a"]) is None
    assert started == []


@pytest.mark.parametrize(
    ("kind", "nproc", "here", "refused"),
    [
        ("command line", 2, "2", False),
        ("command line", 4, "2", True),
        ("command line", 4, "", False),
        ("file", 4, "2", False),
    ],
)
def test_a_number_of_the_command_line_must_be_that_of_the_launcher(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, kind: Any, nproc: int, here: str, refused: bool
) -> None:
    launched(monkeypatch, here=here)
    if refused:
        with pytest.raises(OptionsError) as caught:
            launching.spawned(resolved(Origin(kind), nproc=nproc), ["a"])
        assert caught.value.problem.code == "launch.two_launchers"
    else:
        assert launching.spawned(resolved(Origin(kind), nproc=nproc), ["a"]) is None
    assert started == []


@pytest.mark.parametrize(
    ("rank", "shows_log", "warnings"), [(None, False, 0), (0, False, 1), (1, True, 2), (2, True, 2)]
)
def test_a_failed_rank_is_told_with_the_end_of_its_own_log(
    monkeypatch: pytest.MonkeyPatch,
    started: list[Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    rank: int | None,
    shows_log: bool,
    warnings: int,
) -> None:
    logs = tuple(tmp_path / f"output_rank_{number}.log" for number in (1, 2))
    for number, log in enumerate(logs, start=1):
        log.write_text(f"the cause of {number}\n")
    monkeypatch.setattr(launching, "spawn_ranks", lambda *_, **__: Ended(4, rank, (9, 4, 4), logs))
    with caplog.at_level(logging.INFO, logger="rft"):
        assert launching.spawned(resolved(nproc=3), ["a"]) == 4
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, *[logging.WARNING] * warnings]
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "starting 3 ranks; all but the first" in text
    assert [f"the cause of {number}" in text for number in (1, 2)] == [shows_log and rank == n for n in (1, 2)]


def test_groups_are_named_by_the_setting_that_makes_them() -> None:
    sequence, matrix = launching.group_sizes(resolved(sp_size=2, tp_size=4))
    assert (sequence.value, sequence.origin) == (2, "default")
    assert (matrix.value, matrix.origin) == (4, "tp_size: c.yaml:3")


@pytest.mark.parametrize(
    ("save_path", "run", "directory"),
    [
        ("~/here", None, Path("~/here").expanduser()),
        ("", None, Path("runs/run")),
        ("here", Path("there"), Path("there")),
    ],
)
def test_the_preflight_reads_the_run_its_ranks_and_what_they_have_alike(
    save_path: str, run: Path | None, directory: Path
) -> None:
    given = resolved(save_path=save_path, tp_size=2, pretrain="m", prompt_data="a.jsonl")
    request = launching.requested_run(given, run)
    assert request.directory == directory
    assert (request.nproc.value, request.nproc.origin) == (2, "command line")
    assert (request.share.name, request.share.size, request.share.micro) == ("train_batch_size", 8, 2)
    assert (request.sp_size.value, request.tp_size.value, request.tp_size.origin) == (1, 2, "tp_size: c.yaml:3")
    assert request.values is given.values
    assert request.models() == {"pretrain": "m"}
    assert request.files == {"prompt_data 1": "a.jsonl"}
    given.origins = {}
    assert launching.requested_run(given).nproc.origin == ""


def test_models_are_named_by_the_settings_that_give_them() -> None:
    values = {"pretrain": "m", "critic_pretrain": "", "reward_pretrain": "a=one,dir/two", "judge_pretrain": "j,k"}
    assert launching.models_of(values) == {
        "pretrain": "m",
        "reward_pretrain a": "one",
        "reward_pretrain two": "dir/two",
        "judge_pretrain": "j,k",
    }
    assert launching.models_of({"critic_pretrain": "c"}) == {"critic_pretrain": "c"}


def test_files_are_data_and_code_of_a_persons_own() -> None:
    values = {
        "prompt_data": "a.jsonl, b.jsonl,",
        "eval_data": "c.jsonl",
        "reward": "my.py:score",
        "model_code": "code.py",
    }
    assert launching.files_of(values) == {
        "prompt_data 1": "a.jsonl",
        "prompt_data 2": "b.jsonl",
        "eval_data 1": "c.jsonl",
        "reward": "my.py",
        "model_code": "code.py",
    }
    several = {"reward": "math,a.py:f", "reward_routes": "x=b.py:g+math,*=exact"}
    assert sorted(launching.files_of(several).values()) == ["a.py", "b.py"]
    assert launching.files_of({"reward": "exact", "prompt_data": None, "eval_data": ""}) == {}


def test_a_run_that_is_to_be_restarted_is_continued_by_its_directory(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[list[str], str]] = []

    def process(words: Any, variables: Any) -> Ended:
        found.append(([*words], variables[SUPERVISED]))
        return Ended(0, None, (0,), ())

    def restart(start: Any, restarts: int, kept: Any) -> int:
        assert (restarts, kept) == (2, None)
        start(None, {SUPERVISED: "first"})
        return start(Path("run"), {SUPERVISED: "again"}).code

    monkeypatch.setattr(launching, "spawn_process", process)
    monkeypatch.setattr(launching, "supervise", restart)
    assert launching.spawned(resolved(nproc=0, restarts=2), ["rft", "rl"]) == 0
    assert found[0] == (["rft", "rl"], "first")
    assert (found[1][0][-2:], found[1][1]) == (["resume", "run"], "again")
    monkeypatch.setenv(SUPERVISED, "file")  # the process that is supervised is the run
    assert launching.spawned(resolved(nproc=0, restarts=2), ["rft", "rl"]) is None
    assert started == []


@pytest.mark.parametrize(("kind", "refused"), [("command line", True), ("file", False)])
def test_restarts_of_ranks_that_a_launcher_starts_are_its_own(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, kind: Any, refused: bool
) -> None:
    launched(monkeypatch)
    given = resolved(nproc=0, restarts=2)
    given.origins["restarts"] = Origin(kind)
    given.origins["nproc"] = Origin("default")
    if refused:
        with pytest.raises(OptionsError, match="torchrun --max-restarts"):
            launching.spawned(given, ["a"])
    else:
        assert launching.spawned(given, ["a"]) is None
    assert started == []


def scored(**values: Any) -> Any:
    """Settings of a command that scores."""
    return SimpleNamespace(values=values)


def test_rows_that_an_evaluation_keeps_are_counted_beside_its_output(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    kept = launching._kept_bytes(scored(output=str(output)))
    assert kept is not None
    assert kept() == 0
    (tmp_path / "out.jsonl.partial").write_text("1234")
    (tmp_path / "out.jsonl.partial.other").write_text("12")
    (tmp_path / "another.jsonl.partial").write_text("1")
    assert kept() == 6
    parts = tmp_path / "ranked" / "parts"
    parts.mkdir(parents=True)
    (parts / "rank_0_of_1.jsonl").write_text("123")
    (parts / "rank_0.log").write_text("1")
    kept = launching._kept_bytes(scored(output=str(tmp_path / "ranked")))
    assert kept is not None
    assert kept() == 3
    assert launching._kept_bytes(scored(output="")) is None
    assert launching._kept_bytes(scored(output=str(output), save_path="")) is None


def test_logs_of_ranks_lie_beside_an_output_that_is_a_file(tmp_path: Path) -> None:
    assert launching._log_folder(scored(output=str(tmp_path / "a.json")), None) == tmp_path / "a.json.logs"
    assert launching._log_folder(scored(output=str(tmp_path / "a")), None) == tmp_path / "a" / "logs"
