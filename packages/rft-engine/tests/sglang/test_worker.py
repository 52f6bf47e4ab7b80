"""SGLang's worker process with the double in it: deadlines, deaths, and sequences of operations."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_sglang import FakeSglang
from fake_vllm import fake_logits, fake_tensors, write_fake_model

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError, ServiceError
from rft_engine.lifecycle import EngineState
from rft_engine.process.client import EngineDied
from rft_engine.process.settings import EngineDeadlines
from rft_engine.sglang.engine import SglangEngine
from rft_engine.sglang.local import LocalSglang
from rft_engine.sglang.pinned_api import surface, version
from rft_engine.sglang.settings import SglangSettings
from rft_engine.weight_sync.fused_parameters import find_parameters
from rft_engine.weight_sync.logprob_probe import check_logprob_parity

PROMPTS, KEYS = [[1, 2], [3]], [list(range(10)), list(range(50, 60))]
ASKED = SamplingOptions(temperature=1.0, max_new_tokens=6)

DOUBLES = str(Path(__file__).parents[1] / "doubles")


def worker(make: str = "FakeSglang()", before: str = "") -> list[str]:
    """A command that serves the double in the place of SGLang."""
    code = (
        "import os, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {DOUBLES!r})\n"
        "from rft_engine.sglang import worker as sglang_worker\n"
        "from fake_sglang import FakeSglang\n"
        f"{before}\n"
        f"sglang_worker.serve(int(sys.argv[1]), int(sys.argv[2]), lambda: {make})\n"
    )
    return [sys.executable, "-c", code]


class Policy:
    def __init__(self, seed: int = 0) -> None:
        self.values = fake_tensors(seed)

    def tensors(self):
        return list(self.values.items())

    def logprobs(self, prompts, completions):
        return [
            [
                float(fake_logits(self.values, [*prompt, *completion[:t]]).log_softmax(-1)[token])
                for t, token in enumerate(completion)
            ]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake") / "model")


@pytest.fixture
def make(model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., SglangEngine]]:
    engines: list[SglangEngine] = []

    def start(policy: Policy, command: list[str], **settings: Any) -> SglangEngine:
        known = SglangSettings(**{"model_dir": model_dir, "max_rows": 4, "max_len": 200, **settings})
        engines.append(SglangEngine(known, policy.tensors, command=command, log_path=tmp_path / "engine.log"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
        assert not engine._backend.is_alive


def tokens(answers):
    return [[completion.token_ids for completion in row] for row in answers]


def test_a_death_in_the_middle_is_mended_with_the_same_tokens_and_weights(make, tmp_path: Path) -> None:
    """The worker ends itself after four of twenty samples, the first time only; nothing of it is seen outside."""
    policy = Policy(8)
    flag = tmp_path / "started"
    once = "FakeSglang(die_after=None if flag.exists() else (flag.touch(), 4)[1])"
    engine = make(policy, worker(once, f"flag = Path({str(flag)!r})"), enable_sleep=True)
    engine.load_weights(3)
    first = engine.pid
    answers = engine.generate(PROMPTS, KEYS, ASKED)
    assert (engine.num_restarts, engine.pid != first) == (1, True)
    assert {c.weight_version for row in answers for c in row} == {3}
    assert tokens(engine.generate(PROMPTS, KEYS, ASKED)) == tokens(answers)
    assert check_logprob_parity(engine, policy.logprobs).maximum < 1e-5
    engine.sleep(1)
    engine.wake()
    assert tokens(engine.generate(PROMPTS, KEYS, ASKED)) == tokens(answers)
    assert engine.stats().num_generated_tokens == 120
    with pytest.raises(OptionsError) as caught:
        engine.generate(PROMPTS, KEYS, replace(ASKED, min_p=0.1))
    assert caught.value.problem.code == "engine.sglang.min_p"


def test_a_call_that_hangs_is_aborted_and_the_process_lives(make) -> None:
    engine = make(Policy(), worker("FakeSglang(faults=['hang'])"), deadlines=EngineDeadlines(generate=0.3, other=60.0))
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, ASKED)
    assert caught.value.problem.code == "engine.deadline"
    assert "0 of 20 samples" in caught.value.problem.what
    assert engine._backend.is_alive


def test_a_process_that_is_stuck_is_ended_at_the_deadline(make) -> None:
    engine = make(Policy(), worker("FakeSglang(faults=['stuck'])"), deadlines=EngineDeadlines(generate=0.3, other=0.3))
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, ASKED)
    assert caught.value.problem.code == "engine.deadline"
    assert not engine._backend.is_alive


def test_a_worker_without_sglang_says_how_to_install_it(model_dir: Path, tmp_path: Path) -> None:
    settings = SglangSettings(model_dir=model_dir, max_rows=2, max_len=16)
    with pytest.raises(Exception, match="--extra sglang") as caught:
        SglangEngine(settings, Policy().tensors, log_path=tmp_path / "engine.log")
    assert caught.value.problem.code == "engine.sglang.missing"
    assert type(caught.value).__name__ == "PreflightError"


class Mortal(LocalSglang):
    """The double in this process, which dies on demand as a process does."""

    dead = False
    dies_after: int | None = None

    @property
    def is_alive(self) -> bool:
        return super().is_alive and not self.dead

    def _die(self) -> None:
        self.dead = True
        raise EngineDied(code="engine.died", what="died", where="here", why="a test")

    def generate(self, call, seconds):
        for number, result in enumerate(super().generate(call, seconds)):
            if self.dies_after is not None and number >= self.dies_after:
                self._die()
            yield result

    def rpc(self, method, arguments=(), seconds=None):
        if self.dead:
            self._die()
        return super().rpc(method, arguments, seconds)

    def sleep(self, level: int) -> None:
        if self.dead:
            self._die()
        super().sleep(level)


class MortalEngine(SglangEngine):
    """`SglangEngine` whose process is a `Mortal`."""

    def _start(self) -> Any:
        return Mortal(self._settings, FakeSglang())  # pyright: ignore[reportArgumentType]


def run_sequence(model_dir: Path, tmp_path: Path, seed: int) -> None:
    """Twelve random operations; a plain account of state, version and weights says what must happen."""
    chance = random.Random(seed)
    policy = Policy()
    settings = SglangSettings(model_dir=model_dir, max_rows=2, max_len=16, enable_sleep=True)
    engine = MortalEngine(settings, policy.tensors, log_path=tmp_path / "log")
    state, version, has_weights = "ready", 0, True
    served = {0: dict(policy.values)}
    for _ in range(12):
        operation = chance.choice(["generate", "generate", "sleep", "wake", "update", "refresh", "kill", "kill_later"])
        if operation == "sleep":
            level = chance.choice([1, 2])
            engine.sleep(level)
            has_weights = has_weights and level != 2
            state = "asleep"
        elif operation == "wake":
            engine.wake()
            state = "ready"
        elif operation == "update":
            policy.values, version = fake_tensors(chance.randrange(50)), version + 1
            engine.load_weights(version)
            served[version], has_weights = dict(policy.values), True
        elif operation == "refresh":
            engine.refresh()
            served[version], has_weights = dict(policy.values), True
        elif operation == "kill":
            engine._backend.dead = True  # pyright: ignore[reportAttributeAccessIssue]
        elif operation == "kill_later":
            engine._backend.dies_after = chance.randrange(3)  # pyright: ignore[reportAttributeAccessIssue]
        elif state == "ready" and has_weights:
            [row] = engine.generate([[1, 2]], [[7, 8, 9]], SamplingOptions(temperature=1.0, max_new_tokens=2))
            then = Policy()
            then.values = served[version]
            expected = then.logprobs([[1, 2]] * 3, [c.token_ids for c in row])
            for completion, logprobs in zip(row, expected, strict=True):
                assert completion.weight_version == version
                assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)
        else:
            with pytest.raises(ServiceError):
                engine.generate([[1, 2]], [[7]], SamplingOptions(temperature=1.0, max_new_tokens=2))
        assert (engine.state is EngineState.READY) == (state == "ready")
        assert engine.weight_version == version
    engine.close()


def test_no_sequence_of_operations_serves_old_or_absent_weights(model_dir: Path, tmp_path: Path) -> None:
    for seed in range(100):
        run_sequence(model_dir, tmp_path, seed)


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_ten_thousand_sequences_of_operations(model_dir: Path, tmp_path: Path) -> None:
    for seed in range(10_000):
        run_sequence(model_dir, tmp_path, seed)


def test_the_snapshot_is_of_the_release_in_the_lock_file() -> None:
    lock = Path(__file__).parents[4] / "uv.lock"
    found = re.search(r'name = "sglang"\nversion = "([^"]+)"', lock.read_text())
    assert found is not None
    assert found[1] == version(), "python ci/sglang_surface.py"
    assert len(surface()["bodies"]) > 20


SHAPES = {f"layers.0.{part}_proj.weight": [4, 6] for part in ("q", "k", "v", "gate", "up")}
FUSIONS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Fused:
    """A model that holds q, k, v and gate, up as two matrices."""

    def __init__(self, cut: int) -> None:
        self.parameters = {
            "layers.0.qkv_proj.weight": torch.arange(72.0).reshape(12, 6)[: 12 // cut],
            "layers.0.gate_up_proj.weight": torch.arange(48.0).reshape(8, 6)[: 8 // cut],
        }

    def named_parameters(self):
        return self.parameters.items()


@pytest.mark.parametrize(("name", "first"), [("q", 0), ("k", 24), ("v", 48), ("gate", 0), ("up", 24)])
def test_a_part_of_a_fused_matrix_is_found_where_it_is_whole(name: str, first: int) -> None:
    found = find_parameters(Fused(1), SHAPES, FUSIONS).get(f"layers.0.{name}_proj.weight")
    assert found is not None
    assert torch.equal(found, torch.arange(first, first + 24.0).reshape(4, 6))


@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "up"])
def test_a_part_of_a_matrix_that_is_cut_over_gpus_is_not_compared(name: str) -> None:
    """Half of q, k and v is six rows: enough for q, but the second half of them is of k."""
    assert find_parameters(Fused(2), SHAPES, FUSIONS).get(f"layers.0.{name}_proj.weight") is None
