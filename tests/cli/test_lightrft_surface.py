"""What a reader of LightRFT's guides types works here, or is refused by name with the reason."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_dist.launch.environment import REPORTED

ROOT = Path(__file__).parents[2]
FLAGS = (ROOT / "ci" / "lightrft_flags.txt").read_text().splitlines()
TRAIN = ROOT / "examples" / "train.py"
LIBRARIES = {
    "NCCL_TIMEOUT": "1800",
    "NCCL_BACKEND": "gloo",
    "NCCL_DEBUG": "INFO",
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_IB_DISABLE": "1",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "CUDA_LAUNCH_BLOCKING": "1",
    "NODE_RANK": "0",
    "SLURM_NODEID": "0",
}
MEETING = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


@pytest.mark.parametrize("words", FLAGS, ids=str)
def test_a_flag_of_the_guides_is_accepted_or_refused_by_name(words: str, rft_train: Callable[..., Any]) -> None:
    flag = words.split()[0]
    model = [] if flag == "--pretrain" else ["--pretrain", "MODEL"]
    outcome = rft_train("rl", *model, *words.split(), "--print_config", "--json_errors")
    if outcome.code == 0:
        name = flag.removeprefix("--").replace("disable_", "enable_")
        (line,) = [line for line in outcome.out.splitlines() if line.startswith(f"{name}: ")]
        assert line.endswith("# command line")
    else:
        assert outcome.code == 2
        assert outcome.problem["code"] != "option.unknown"
        assert flag.removeprefix("--") in outcome.problem["what"]
        assert outcome.problem["do"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_variable_that_is_set_is_listed_at_the_start_with_its_effect(
    name: str, bench: Any, rft_train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, LIBRARIES[name])
    outcome = rft_train(
        "check", "rl", "--pretrain", bench.model, "--prompt_data", bench.train, "--generate_max_len", "9"
    )
    assert outcome.code == 0, outcome.err
    (line,) = [line for line in outcome.out.splitlines() if line.startswith(f"environment  {name}=")]
    assert line.startswith(f"environment  {name}={LIBRARIES[name]}: ")
    assert "set by" in line


def test_the_variables_of_the_guides_are_those_that_are_known() -> None:
    assert {*LIBRARIES, *MEETING} <= set(REPORTED)


@pytest.mark.parametrize("name", MEETING)
def test_a_part_of_the_variables_that_place_a_process_is_refused(
    name: str, bench: Any, rft_train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    outcome = rft_train("rl", "--pretrain", bench.model, "--prompt_data", bench.train, "--json_errors")
    assert (outcome.code, outcome.problem["code"]) == (3, "launch.partial_environment")
    assert not list(Path().rglob("config.yaml"))


def test_the_script_for_images_refuses_a_model_that_sees_none(bench: Any) -> None:
    words = ["examples/train_vl.py", "--pretrain", str(bench.model), "--prompt_data", str(bench.train)]
    words += ["--mixed_mm_data", "--packing_samples", "--json_errors"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    problem = json.loads(done.stderr.splitlines()[-1])["problem"]
    assert (done.returncode, problem["code"]) == (4, "vision.other_model")
    assert "qwen2_5_vl" in problem["why"]


@pytest.fixture(scope="module")
def alone(base_words: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory, call: Callable[..., Any]) -> Path:
    """The run that every launched form must repeat."""
    path = tmp_path_factory.mktemp("alone") / "run"
    assert call("rl", *base_words["rl"], "--save_path", path).code == 0
    return path


def rewards(run: Path) -> list[float]:
    """Mean reward of each step."""
    return [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.xdist_group("launch")
def test_the_entry_file_under_torchrun_repeats_the_run_of_one_process(
    alone: Path, base_words: dict[str, list[str]], tmp_path: Path
) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(TRAIN), *base_words["rl"]]
    done = subprocess.run(
        [sys.executable, *words, "--save_path", str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("environment  WORLD_SIZE=2") == 1, "one rank prints"
    assert rewards(tmp_path / "run") == pytest.approx(rewards(alone), abs=1e-12)


@pytest.mark.xdist_group("launch")
def test_the_entry_file_started_by_hand_once_a_rank_repeats_the_run_of_one_process(
    alone: Path, base_words: dict[str, list[str]], tmp_path: Path
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(TRAIN), *base_words["rl"], "--save_path", str(tmp_path / "run")]
    ranks = [
        subprocess.Popen(words, env=shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=300)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert rewards(tmp_path / "run") == pytest.approx(rewards(alone), abs=1e-12)
