"""The engine in a process of its own, with the double of vLLM in it: deadlines, deaths, typed errors."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVllm, fake_logits, fake_tensors, write_fake_model

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.child_process import error_fields
from rft_core.errors import OptionsError, ServiceError
from rft_engine.lifecycle import EngineState
from rft_engine.process.client import EngineDied, EngineProcess
from rft_engine.process.requests import SampleResult
from rft_engine.process.settings import EngineDeadlines
from rft_engine.vllm.engine import VllmEngine
from rft_engine.vllm.local import LocalVllm
from rft_engine.vllm.process import VllmProcessEngine
from rft_engine.vllm.settings import VllmSettings
from rft_engine.weight_sync.logprob_probe import check_logprob_parity

PROMPTS, KEYS = [[1, 2], [3]], [list(range(10)), list(range(50, 60))]
ASKED = SamplingOptions(temperature=1.0, max_new_tokens=6)

DOUBLES = str(Path(__file__).parents[1] / "doubles")


def worker(make: str = "FakeVllm()", before: str = "") -> list[str]:
    """A command that serves the double in the place of vLLM."""
    code = (
        "import os, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {DOUBLES!r})\n"
        "from rft_engine.vllm import worker as vllm_worker\n"
        "from fake_vllm import FakeVllm\n"
        f"{before}\n"
        f"vllm_worker.serve(int(sys.argv[1]), int(sys.argv[2]), lambda: {make})\n"
    )
    return [sys.executable, "-c", code]


class Policy:
    def __init__(self) -> None:
        self.values = fake_tensors(0)

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
def make(model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., VllmProcessEngine]]:
    engines: list[VllmProcessEngine] = []

    def start(policy: Policy, command: list[str] | None = None, **settings) -> VllmProcessEngine:
        known = VllmSettings(**{"model_dir": model_dir, "max_rows": 4, "max_len": 32, **settings})
        engines.append(
            VllmProcessEngine(known, policy.tensors, command=command or worker(), log_path=tmp_path / "engine.log")
        )
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
        assert not engine._backend.is_alive


def tokens(answers):
    return [[completion.token_ids for completion in row] for row in answers]


def test_a_death_in_the_middle_is_mended_with_the_same_tokens_and_weights(
    make, model_dir: Path, tmp_path: Path
) -> None:
    """The worker ends itself after four of twenty samples, the first time only."""
    policy = Policy()
    policy.values = fake_tensors(8)
    settings = VllmSettings(model_dir=model_dir, max_rows=4, max_len=32)
    whole = VllmEngine(settings, policy.tensors, runtime=FakeVllm())
    whole.load_weights(3)
    wanted = tokens(whole.generate(PROMPTS, KEYS, ASKED))
    flag = tmp_path / "started"
    once = "FakeVllm(die_after=None if flag.exists() else (flag.touch(), 4)[1])"
    engine = make(policy, worker(once, f"flag = Path({str(flag)!r})"))
    engine.load_weights(3)
    first = engine.pid
    answers = engine.generate(PROMPTS, KEYS, ASKED)
    assert tokens(answers) == wanted
    assert {c.weight_version for row in answers for c in row} == {3}
    assert engine.num_restarts == 1
    assert engine.pid != first
    assert check_logprob_parity(engine, policy.logprobs).maximum < 1e-5
    assert engine.stats().num_generated_tokens == 8


def test_a_hanging_process_is_ended_at_the_deadline(make) -> None:
    deadlines = EngineDeadlines(generate=0.3, other=0.3)
    engine = make(Policy(), worker("FakeVllm(faults=['hang'])"), deadlines=deadlines)
    started = time.monotonic()
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, ASKED)
    assert caught.value.problem.code == "engine.deadline"
    assert time.monotonic() - started < 30.0
    assert not engine._backend.is_alive


def test_a_process_that_cannot_start_is_an_error_at_once(make) -> None:
    with pytest.raises(EngineDied) as caught:
        make(Policy(), [sys.executable, "-c", "print('no such device'); raise SystemExit(3)"])
    assert "exit code 3" in caught.value.problem.what
    assert "no such device" in caught.value.problem.where


def test_the_process_ends_with_its_owner(model_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {DOUBLES!r})\n"
        "from rft_engine.process.client import EngineProcess\n"
        f"child = EngineProcess({worker()!r}, {{}}, Path({str(tmp_path / 'log')!r}))\n"
        "print(child.pid, flush=True)\n"
        "import os; os._exit(0)\n"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} outlived its owner")


ECHO = """
import json, os, sys
requests, answers = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
for line in requests:
    request = json.loads(line)
    if request["do"] == "count":
        for number in range(request["to"]):
            answers.write(json.dumps({"item": number}) + "\\n")
    answers.write(json.dumps({"reply": len(request.get("text", ""))}) + "\\n")
    answers.flush()
"""


def test_a_typed_error_inside_the_process_is_the_same_error_outside(tmp_path: Path) -> None:
    error = OptionsError(code="a.b", what="found", where="there", why="rule", state="unchanged", do="this")
    fields = json.dumps(error_fields(error))
    code = ECHO.replace('{"reply": len(request.get("text", ""))}', f'{{"error": {fields}}}')
    process = EngineProcess([sys.executable, "-c", code], {}, tmp_path / "log")
    try:
        with pytest.raises(OptionsError) as caught:
            process.call("anything", 60.0)
        assert caught.value.problem == error.problem
        assert process.is_alive
    finally:
        process.kill()


def test_messages_larger_than_a_pipe_pass_in_both_directions(tmp_path: Path) -> None:
    process = EngineProcess([sys.executable, "-c", ECHO], {}, tmp_path / "log")
    try:
        assert process.call("measure", 60.0, text="x" * 3_000_000) == 3_000_000
        assert list(process.stream("count", 60.0, to=50_000)) == list(range(50_000))
        assert process.call("measure", 60.0, text="again") == 5
    finally:
        process.kill()


def test_a_process_that_reads_nothing_does_not_block_its_owner(tmp_path: Path) -> None:
    process = EngineProcess([sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "log")
    with pytest.raises(ServiceError) as caught:
        process.call("measure", 0.5, text="x" * 3_000_000)
    assert caught.value.problem.code == "engine.deadline"
    with pytest.raises(EngineDied):
        process.call("measure", 0.5)


class Mortal(LocalVllm):
    """The double in this process, which dies on demand as a process does."""

    dead = False
    dies_after: int | None = None
    spoil: Any = None
    asked: Sequence[tuple[int, int]] = ()

    @property
    def is_alive(self) -> bool:
        return not self.dead

    def _die(self) -> None:
        self.dead = True
        raise EngineDied(code="engine.died", what="died", where="here", why="a test")

    def generate(self, call, seconds):
        self.asked = call.requests
        for number, result in enumerate(super().generate(call, seconds)):
            if self.dies_after is not None and number >= self.dies_after:
                self._die()
            yield self.spoil(result) if self.spoil and isinstance(result, SampleResult) else result

    def rpc(self, method, arguments=(), seconds=None):
        if self.dead:
            self._die()
        return super().rpc(method, arguments, seconds)

    def sleep(self, level: int) -> None:
        if self.dead:
            self._die()
        super().sleep(level)


class MortalEngine(VllmProcessEngine):
    """`VllmProcessEngine` whose process is a `Mortal`."""

    def _start(self) -> Mortal:
        return Mortal(self._settings, FakeVllm(is_cpu=False), in_process=False)


@pytest.fixture
def mortal(model_dir: Path, tmp_path: Path) -> tuple[MortalEngine, Policy]:
    policy = Policy()
    settings = VllmSettings(model_dir=model_dir, max_rows=4, max_len=32, transport="file")
    return MortalEngine(settings, policy.tensors, log_path=tmp_path / "log"), policy


def test_a_process_that_always_dies_is_given_up(mortal, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = mortal
    monkeypatch.setattr(Mortal, "dies_after", 0)
    with pytest.raises(EngineDied):
        engine.generate(PROMPTS, KEYS, ASKED)
    assert engine.num_restarts == 3


def test_finished_samples_are_kept_and_only_the_others_asked_again(mortal) -> None:
    engine, _ = mortal
    wanted = tokens(engine.generate(PROMPTS, KEYS, ASKED))
    first = engine._backend
    first.dies_after = 7
    assert tokens(engine.generate(PROMPTS, KEYS, ASKED)) == wanted
    assert len(engine._backend.asked) == 13
    first.dead, engine._backend.dead = True, True
    engine.load_weights(1)
    assert tokens(engine.generate(PROMPTS, KEYS, ASKED)) == wanted
    assert engine.num_restarts == 2


def test_a_policy_that_moved_on_is_not_served_under_the_old_version(mortal) -> None:
    engine, policy = mortal
    engine.load_weights(1)
    policy.values = fake_tensors(2)
    engine._backend.dead = True
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, ASKED)
    assert caught.value.problem.code == "engine.logprob_parity"
    engine.load_weights(2)
    assert check_logprob_parity(engine, policy.logprobs).maximum < 1e-5


def test_a_call_for_other_weights_is_refused_by_the_process_itself(mortal) -> None:
    engine, _ = mortal
    engine.load_weights(1)
    engine._backend.version = 0
    with pytest.raises(ServiceError, match="version 1") as caught:
        engine.generate(PROMPTS, KEYS, ASKED)
    assert caught.value.problem.code == "engine.logprob_parity"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda r: replace(r, token_ids=[*r.token_ids[:-1], 99]), "outside 0 to 10"),
        (lambda r: replace(r, logprobs=[float("nan")] * 6), "not finite"),
        (lambda r: replace(r, logprobs=r.logprobs[:-1]), "5 log-probs"),
        (lambda r: replace(r, token_ids=r.token_ids * 2), "12 tokens"),
        (lambda r: replace(r, token_ids=[], logprobs=[], log_kept_mass=[]), "0 tokens"),
        (lambda r: replace(r, version=5), "version 5"),
        (lambda r: replace(r, finish_reason="abort"), "'abort'"),
        (lambda r: replace(r, finish_reason="stop"), "'stop'"),
        (
            lambda r: replace(r, token_ids=r.token_ids[:3], logprobs=[-1.0] * 3, log_kept_mass=[0.0] * 3),
            "without a stop token",
        ),
    ],
)
def test_an_answer_that_cannot_be_a_sample_is_an_error(mortal, spoil, words: str) -> None:
    engine, _ = mortal
    engine._backend.spoil = spoil
    with pytest.raises(ServiceError, match=words) as caught:
        engine.generate(PROMPTS, KEYS, ASKED)
    assert caught.value.problem.code == "engine.garbage"


def run_sequence(model_dir: Path, tmp_path: Path, seed: int) -> None:
    """Twelve random operations; a plain account of state, version and weights says what must happen."""
    chance = random.Random(seed)
    policy = Policy()
    settings = VllmSettings(model_dir=model_dir, max_rows=2, max_len=16, enable_sleep=True, transport="file")
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
            engine._backend.dead = True
        elif operation == "kill_later":
            engine._backend.dies_after = chance.randrange(3)
        elif state == "ready" and has_weights:
            [row] = engine.generate([[1, 2]], [[7, 8, 9]], SamplingOptions(temperature=1.0, max_new_tokens=2))
            policy_then = Policy()
            policy_then.values = served[version]
            expected = policy_then.logprobs([[1, 2]] * 3, [c.token_ids for c in row])
            for completion, logprobs in zip(row, expected, strict=True):
                assert completion.weight_version == version
                assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)
        else:
            with pytest.raises(ServiceError):
                engine.generate([[1, 2]], [[7]], SamplingOptions(temperature=1.0, max_new_tokens=2))
        assert (engine.state is EngineState.READY) == (state == "ready")
        assert engine.weight_version == version
    engine.close()


@pytest.mark.parametrize("block", range(4))
def test_no_sequence_of_operations_serves_old_or_absent_weights(model_dir: Path, tmp_path: Path, block: int) -> None:
    for seed in range(50 * block, 50 * (block + 1)):
        run_sequence(model_dir, tmp_path, seed)


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_ten_thousand_sequences_of_operations(model_dir: Path, tmp_path: Path) -> None:
    for seed in range(10_000):
        run_sequence(model_dir, tmp_path, seed)
