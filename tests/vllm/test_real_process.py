"""vLLM's CPU build in a process of its own: weights through shared memory, and its death in the middle of work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from policy_side import MAX_LEN, Policy
from safetensors import safe_open

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.vllm.process import VllmProcessEngine
from rft_engine.vllm.settings import VllmSettings
from rft_engine.weight_sync.logprob_probe import check_logprob_parity
from rft_engine.weight_sync.weight_file import read_weight_file, write_weight_file

GAP = 1e-4
PROMPTS = [[2, 3, 4], [5, 6]]
KEYS = [list(range(100, 112)), list(range(200, 212))]
LONG = SamplingOptions(temperature=1.0, max_new_tokens=150)


class Pair:
    def __init__(self, model_dir: Path, log_path: Path) -> None:
        self.policy = Policy(model_dir)
        settings = VllmSettings(model_dir=model_dir, max_rows=4, max_len=MAX_LEN, enforce_eager=True)
        environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        self.engine = VllmProcessEngine(settings, self.policy.tensors, environment=environment, log_path=log_path)


@pytest.fixture(scope="module")
def pair(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(model_dir, tmp_path_factory.mktemp("logs") / "engine.log")
    yield made
    made.engine.close()


def tokens(answers):
    return [[completion.token_ids for completion in row] for row in answers]


def test_an_update_reaches_the_other_process(pair: Pair) -> None:
    before = tokens(pair.engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=16)))
    pair.policy.change(1)
    pair.engine.load_weights(1)
    gap = check_logprob_parity(pair.engine, pair.policy.logprobs)
    print(f"largest gap of the probe {gap.maximum:.2e}")
    assert gap.maximum < GAP
    assert tokens(pair.engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=16))) != before
    assert not list(Path("/dev/shm").glob("rft-*/rft-weights-*")), "the file is gone when it has been read"


def test_a_process_killed_in_the_middle_is_replaced_and_the_tokens_are_the_same(pair: Pair) -> None:
    wanted = tokens(pair.engine.generate(PROMPTS, KEYS, LONG))
    seconds = pair.engine.stats().seconds
    dead = pair.engine.pid
    killer = threading.Timer(0.5 * seconds, lambda: os.killpg(dead, signal.SIGKILL))
    killer.start()
    answers = pair.engine.generate(PROMPTS, KEYS, LONG)
    killer.join()
    assert pair.engine.pid != dead
    assert pair.engine.num_restarts == 1
    assert tokens(answers) == wanted
    assert {c.weight_version for row in answers for c in row} == {pair.engine.weight_version}
    assert check_logprob_parity(pair.engine, pair.policy.logprobs).maximum < GAP


def test_the_file_is_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7).to(torch.bfloat16), "c": torch.zeros(0, 4)}
    write_weight_file(tmp_path / "w.safetensors", tensors.items())
    ours = read_weight_file(tmp_path / "w.safetensors")
    with safe_open(str(tmp_path / "w.safetensors"), framework="pt") as theirs:
        assert set(theirs.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(theirs.get_tensor(name), tensor)
            assert torch.equal(ours[name], tensor)
