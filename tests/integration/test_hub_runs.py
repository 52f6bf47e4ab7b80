"""Whole runs whose model and data are named on a hub on loopback: trained, resumed, evaluated, exported to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub.utils import close_session
from support.hub_server import TOKEN, Hub, running_hub

from rft_cli.main import main
from rft_trainer.runs.reader import read_run

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: other
  data_files: other/*
---
"""
SMALL = ["--vocab_size", "280", "--hidden", "16", "--layers", "1", "--heads", "2"]
BATCH = ["--train_batch_size", "4", "--micro_train_batch_size", "4", "--device", "cpu"]


def rows(first: int, count: int) -> bytes:
    numbers = range(first, first + count)
    return b"".join(json.dumps({"question": f"{n}+1?", "answer": f"#### {n + 1}"}).encode() + b"\n" for n in numbers)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a tiny model and rows of sums, for this process and for others that read its variables."""
    constants = huggingface_hub.constants
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_bytes(rows(0, 40))
    assert main(["build", "--texts", "texts.txt", "--save_path", "tiny", *SMALL]) == 0
    with running_hub() as served:
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other-cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        served.add("model", "o/tiny", tmp_path / "tiny")
        files = {"README.md": CARD.encode(), "main/train-0.jsonl": rows(0, 12), "main/test-0.jsonl": rows(20, 4)}
        served.add("dataset", "o/sums", {**files, "other/train.jsonl": rows(50, 4)})
        yield served
    close_session()


def ran(*words: str) -> None:
    assert main(list(words)) == 0


def test_a_run_by_names_goes_on_with_the_commits_that_it_began_with(hub: Hub, tmp_path: Path) -> None:
    by_name = ["--pretrain", "o/tiny", "--prompt_data", "o/sums:main"]
    ran("sft", *by_name, *BATCH, "--max_steps", "1", "--save_path", "run")
    model, data = (hub.repositories[key].refs["main"] for key in (("model", "o/tiny"), ("dataset", "o/sums")))
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert f"pretrain: o/tiny@{model}" in config
    assert f"prompt_data: o/sums:main@{data}" in config
    identity = json.loads((tmp_path / "run" / "identity.json").read_text())
    assert identity["settings"]["pretrain"]["value"] == f"o/tiny@{model}"

    # the branches move on, and a resume asks nothing of the Hub
    for kind, name in (("model", "o/tiny"), ("dataset", "o/sums")):
        repository = hub.repositories[kind, name]
        repository.commit({**repository.commits[repository.refs["main"]], "new.json": b"[]"})
    hub.requests.clear()
    ran("resume", "run", "--max_steps", "2")
    # as does the whole command again, without a revision in it
    ran("sft", *by_name, *BATCH, "--max_steps", "3", "--save_path", "run", "--load_checkpoint")
    assert hub.requests == []
    assert f"o/tiny@{model}" in (tmp_path / "run" / "config.yaml").read_text()
    assert [row["step"] for row in read_run(tmp_path / "run").metrics] == [1, 2, 3]

    # a new run takes the new commits, and fetches what is new alone
    ran("check", "sft", *by_name, *BATCH)
    assert {path.rpartition("/")[2] for path in hub.downloads()} == {"new.json"}


def test_rl_evaluation_and_export_by_names(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--generate_max_len", "4", "--rollout_batch_size", "4", "--n_samples_per_prompt", "2"]
    by_name = ["--pretrain", "o/tiny", "--prompt_data", "o/sums:main", "--eval_data", "o/sums:main"]
    ran("rl", *by_name, *BATCH, *lengths, "--reward", "math", "--max_steps", "1", "--save_path", "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval"]["before"]["n"] == 4
    capsys.readouterr()
    words = ["--eval_data", "o/sums:other:train", "--reward", "math", "--generate_max_len", "2", "--device", "cpu"]
    ran("eval", "--pretrain", "o/tiny", *words)
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["eval/n"] == 4
    assert "downloading" in printed.err
    assert "downloading" not in printed.out

    ran("export", "run", "exported", "--push_to_hub", "me/mine")
    uploaded = hub.repositories["model", "me/mine"]
    assert "model.safetensors" in uploaded.commits[uploaded.refs["main"]]
    capsys.readouterr()
    ran("generate", "--pretrain", "me/mine", "--prompt", "1+1?", "--generate_max_len", "2", "--device", "cpu")
    assert capsys.readouterr().out.startswith("1+1?")


def test_a_check_and_a_plan_ask_for_no_weights(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_name = ["--pretrain", "o/tiny", "--prompt_data", "o/sums:main", "--eval_data", "o/sums:main"]
    lengths = ["--generate_max_len", "4", "--rollout_batch_size", "4", "--n_samples_per_prompt", "2"]
    ran("plan", "rl", *by_name, *BATCH, *lengths)
    ran("check", "rl", *by_name, *BATCH, *lengths, "--reward", "math", "--judge_pretrain", "o/tiny")
    ran("check", "sft", *by_name[:4], *BATCH)
    size = (tmp_path / "tiny" / "model.safetensors").stat().st_size / 1e9
    note = f"note: 1 weight file of o/tiny@{hub.repositories['model', 'o/tiny'].refs['main']}, {size:.3f} GB, listed"
    assert capsys.readouterr().out.count(note) == 2
    names = [path.rpartition("/")[2] for path in hub.downloads()]
    assert "config.json" in names
    assert not [name for name in names if name.endswith(".safetensors")]
    assert not [path for path in hub.requests if "safetensors" in str(path)]

    # what a start would refuse without having read a weight
    repository = hub.repositories["model", "o/tiny"]
    files = repository.commits[repository.refs["main"]]
    large = files["config.json"].replace(b'"vocab_size": 280', b'"vocab_size": 280000000')
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    for changed, message in (
        ({"model.safetensors": None, "pytorch_model.bin": b"p"}, "has no safetensors, only pytorch_model.bin"),
        ({"model.safetensors.index.json": json.dumps(index).encode()}, "2 of 2 weight files are missing"),
        ({"config.json": large}, "280000000"),
    ):
        repository.commit({name: data for name, data in (files | changed).items() if data is not None})
        assert main(["check", "sft", *by_name[:4], *BATCH]) != 0
        assert message in capsys.readouterr().err
    ran("eval", "--pretrain", f"o/tiny@{note.partition('@')[2][:40]}", *by_name[4:], "--reward", "math", *lengths[:2])
    assert "model.safetensors" in {path.rpartition("/")[2] for path in hub.downloads()}


def test_two_ranks_fetch_every_file_once(hub: Hub, tmp_path: Path) -> None:
    words = ["sft", "--pretrain", "o/tiny", "--prompt_data", "o/sums:main", *BATCH, "--micro_train_batch_size", "2"]
    words = [sys.executable, "-m", "rft_cli.main", *words, "--max_steps", "1", "--nproc", "2", "--save_path", "run"]
    done = subprocess.run(
        words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = [path.rpartition("/")[2] for path in hub.downloads()]
    assert sorted(names) == sorted({*names})
    assert "model.safetensors" in names
