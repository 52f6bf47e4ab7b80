"""Who starts the ranks, and what the settings say to each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.process import launching
from rft.process.launching import files_of, models_of, requested_run, share_of, spawned
from rft.resolved import Resolved
from rft_cli.config.resolve import resolve
from rft_core.errors import OptionsError
from rft_dist.launch.spawn import Ended

TWO = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be started; it is said to have ended well."""
    found: list[Any] = []

    def note(command: Any, nproc: int, *, log_folder: Path, **_: Any) -> Ended:
        found.append((list(command), nproc, log_folder))
        return Ended(0, None, (0,) * nproc, ())

    monkeypatch.setattr(launching, "spawn_ranks", note)
    for name in (*TWO, "LOCAL_WORLD_SIZE", "RFT_NPROC", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return found


def rl(*words: str) -> Resolved[Any]:
    return resolve("rl", ["--pretrain", "m", *words])


def test_nproc_starts_that_many_ranks_of_the_same_words(calls: list[Any]) -> None:
    words = ["rl", "--pretrain", "m", "--nproc", "3", "--save_path", "here"]
    program = ["python", "-m", "rft_cli.main", *words]
    assert spawned(rl("--nproc", "3", "--save_path", "here"), program) == 0
    ((command, nproc, folder),) = calls
    assert command == program
    assert (nproc, folder) == (3, Path("here/logs"))


@pytest.mark.parametrize("words", [(), ("--nproc", "0"), ("--nproc", "1")])
def test_without_a_number_above_one_this_process_goes_on(words: tuple[str, ...], calls: list[Any]) -> None:
    assert spawned(rl(*words), ["rl", *words]) is None
    assert calls == []


def test_a_rank_does_not_start_ranks(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_NPROC", "2")
    assert spawned(rl("--nproc", "2"), ["rl"]) is None
    assert calls == []


def test_ranks_of_a_launcher_agree_with_the_flag_or_are_refused(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (TWO | {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}).items():
        monkeypatch.setenv(name, value)
    assert spawned(rl("--nproc", "2"), ["rl"]) is None
    with pytest.raises(OptionsError, match="nproc = 4, LOCAL_WORLD_SIZE = 2") as caught:
        spawned(rl("--nproc", "4"), ["rl"])
    assert caught.value.problem.code == "launch.two_launchers"
    stored = tmp_path / "config.yaml"
    stored.write_text("nproc: 4\n")
    assert spawned(rl("--config", str(stored)), ["rl"]) is None, "a run may go on with another number of ranks"
    assert calls == []


def test_a_failed_rank_is_shown_with_the_end_of_its_output(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "output_rank_1.log"
    log.write_text("error  the cause\n")
    monkeypatch.setattr(launching, "spawn_ranks", lambda *_, **__: Ended(4, 1, (9, 4), (log,)))
    assert spawned(rl("--nproc", "2", "--save_path", str(tmp_path)), ["rl"]) == 4
    shown = "\n".join(record.getMessage() for record in caplog.records)
    assert "rank 1 ended with exit code 4; exit codes of all ranks: (9, 4)" in shown
    assert "error  the cause" in shown


def test_the_files_that_are_compared_are_data_and_code_of_a_persons_own() -> None:
    values = rl("--prompt_data", "a.jsonl,b.jsonl", "--eval_data", "c.jsonl", "--reward", "my.py:score").values
    files = files_of(values)
    assert files == {
        "prompt_data 1": "a.jsonl",
        "prompt_data 2": "b.jsonl",
        "eval_data 1": "c.jsonl",
        "reward": "my.py",
    }
    assert share_of(values).size == values["train_batch_size"]


def test_a_run_asks_for_its_ranks_and_names_what_they_compare(tmp_path: Path) -> None:
    words = ["--pretrain", "m", "--save_path", str(tmp_path / "run"), "--nproc", "2", "--tp_size", "2"]
    request = requested_run(resolve("sft", words))
    assert request.directory == tmp_path / "run"
    assert (request.nproc.value, request.nproc.origin) == (2, "command line")
    assert (request.tp_size.value, request.tp_size.origin) == (2, "tp_size: command line")
    assert (request.sp_size.value, request.sp_size.origin) == (1, "sp_size: default")
    assert request.models() == {"pretrain": "m"}
    assert requested_run(resolve("sft", words), tmp_path / "earlier").directory == tmp_path / "earlier"


def test_every_model_of_a_run_is_compared_by_the_setting_that_names_it() -> None:
    values = rl("--reward_pretrain", "a=one,b=two", "--critic_pretrain", "c").values
    assert models_of(values) == {
        "pretrain": "m",
        "critic_pretrain": "c",
        "reward_pretrain a": "one",
        "reward_pretrain b": "two",
    }
