"""The SGLang adapter on a double that keeps the release's protocol: draws, log-probs, updates, sleep, refusals."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_sglang
import pytest
import torch
from fake_sglang import FakeEngine, FakeSglang
from fake_vllm import VOCAB, fake_logits, fake_tensors, write_fake_model

from rft_algos.decoding import sampling
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core import keyed_random
from rft_core.errors import OptionsError, PreflightError, ServiceError
from rft_engine.lifecycle import EngineState
from rft_engine.process.gpu_processes import Device, DeviceProcess
from rft_engine.sglang import weight_loader
from rft_engine.sglang.engine import SglangEngine
from rft_engine.sglang.local import LocalSglang, log_kept_mass
from rft_engine.sglang.pinned_api import signature, surface, unknown_fields
from rft_engine.sglang.runtime import InstalledSglang
from rft_engine.sglang.settings import LOADER, SglangSettings, end_tokens, engine_arguments
from rft_engine.weight_sync.logprob_probe import check_logprob_parity

PROMPTS, KEYS = [[1, 2], [3]], [[10, 11, 12], [20, -21]]
ASKED = SamplingOptions(temperature=1.0, max_new_tokens=5)


class InThisProcess(SglangEngine):
    """`SglangEngine` without its process."""

    double: FakeSglang

    def _start(self) -> Any:
        return LocalSglang(self._settings, self.double)  # pyright: ignore[reportArgumentType]


class Policy:
    """The trainer's side: tensors, and log-probs of the double's model."""

    def __init__(self, seed: int = 0) -> None:
        self.values = fake_tensors(seed)

    def tensors(self):
        return list(self.values.items())

    def row(self, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        return (fake_logits(self.values, tokens) / temperature).log_softmax(-1)

    def logprobs(self, prompts, completions):
        return [
            [float(self.row([*prompt, *completion[:t]])[token]) for t, token in enumerate(completion)]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake") / "model")


Make = Callable[..., InThisProcess]


@pytest.fixture
def make(model_dir: Path) -> Iterator[Make]:
    engines: list[InThisProcess] = []

    def start(policy: Policy | None = None, faults: Sequence[str] = (), **settings: Any) -> InThisProcess:
        kind = type("RunStart", (InThisProcess,), {"double": FakeSglang(faults=faults)})
        sizes = {"model_dir": model_dir, "max_rows": 4, "max_len": 200}
        engines.append(kind(SglangSettings(**{**sizes, **settings}), (policy or Policy()).tensors))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def root(engine: InThisProcess) -> FakeEngine:
    found = engine.double.engine
    assert found is not None
    return found


def tokens(answers):
    return [[completion.token_ids for completion in row] for row in answers]


def test_the_double_has_the_signatures_of_the_release() -> None:
    """Names and defaults that the double declares are those of the release; none that it requires is lacking."""
    checked = 0
    for kind in (FakeEngine, fake_sglang.FakeRequests):
        for method in vars(kind).values():
            name = getattr(method, "released_as", None)
            if name is None or name == "Engine.__init__":
                continue
            checked += 1
            declared, released = inspect.signature(method).parameters, signature(name).parameters
            assert declared.keys() <= released.keys(), name
            for parameter in declared.values():
                given = released[parameter.name].default
                if parameter.default is not parameter.empty:
                    assert repr(parameter.default) == given, f"{name}({parameter.name})"
            required = {p.name for p in released.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
            assert required <= declared.keys(), name
    assert checked == len(surface()["calls"]) - 1


@pytest.mark.parametrize("given", [{"input_tokens": [1]}, {"input_ids": [1], "seed": 3}])
def test_a_call_that_the_release_does_not_know_fails(make: Make, given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        root(make()).async_generate(**given)


def test_fields_and_attributes_that_are_used_are_in_the_snapshot(make: Make) -> None:
    arguments = root(make(memory_utilization=0.4, enable_sleep=True)).arguments
    assert not unknown_fields("ServerArgs", arguments)
    assert unknown_fields("ServerArgs", {"max_num_seqs": 4}) == ["max_num_seqs"]
    assert {"loop", "tokenizer_manager"} <= set(surface()["attributes"]["Engine"])
    assert "success" in surface()["fields"]["FlushCacheReqOutput"]
    assert not unknown_fields("ResumeMemoryOccupationReqInput", {"tags": None})


def test_settings_reach_sglang(make: Make, model_dir: Path) -> None:
    given = engine_arguments(
        SglangSettings(model_dir=model_dir, max_rows=7, max_len=40, tensor_parallel_size=2, memory_utilization=0.3)
    )
    assert given == {
        "model_path": str(model_dir),
        "dtype": "float32",
        "attention_backend": "triton",
        "context_length": 42,
        "max_running_requests": 7,
        "tp_size": 2,
        "mem_fraction_static": 0.3,
        "disable_cuda_graph": False,
        "random_seed": 0,
        "enable_deterministic_inference": True,
        "enable_memory_saver": False,
        "enable_weights_cpu_backup": False,
        "custom_weight_loader": ["rft_engine.sglang.weight_loader.exchange"],
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "log_level": "error",
    }
    module, _, name = LOADER.rpartition(".")
    assert (module, getattr(weight_loader, name)) == (weight_loader.__name__, weight_loader.exchange)
    assert "attention_backend" not in engine_arguments(
        SglangSettings(model_dir=model_dir, max_rows=1, max_len=8, dtype="bfloat16")
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_a_key_gives_its_tokens_in_any_company_with_the_log_probs_of_the_temperature(
    make: Make, temperature: float
) -> None:
    policy = Policy(3)
    engine = make(policy)
    engine.load_weights(1)
    asked = replace(ASKED, temperature=temperature)
    together = engine.generate(PROMPTS, KEYS, asked)
    alone = [[engine.generate([p], [[k]], asked)[0][0] for k in ks] for p, ks in zip(PROMPTS, KEYS, strict=True)]
    assert tokens(together) == tokens(alone)
    for prompt, row in zip(PROMPTS, together, strict=True):
        for completion in row:
            assert completion.log_kept_mass == (0.0,) * 5
            assert (completion.finish_reason, completion.weight_version) == ("length", 1)
            for t, token in enumerate(completion.token_ids):
                expected = float(policy.row([*prompt, *completion.token_ids[:t]], temperature)[token])
                assert completion.logprobs[t] == pytest.approx(expected, abs=1e-5)


def test_the_draw_has_the_distribution_of_the_model(make: Make) -> None:
    """4000 keys: the share of each first token is its probability, within 4 standard deviations."""
    policy = Policy(2)
    engine = make(policy)
    engine.load_weights(1)
    num = 4000
    keys = [keyed_random.derive_key(0, "draws", i) for i in range(num)]
    [drawn] = engine.generate([[4]], [keys], SamplingOptions(temperature=1.0, max_new_tokens=1))
    counts = Counter(completion.token_ids[0] for completion in drawn)
    for token, probability in enumerate(policy.row([4]).exp().tolist()):
        spread = math.sqrt(num * probability * (1 - probability))
        assert abs(counts[token] - num * probability) < 4 * spread + 1


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (5, 0.8), (VOCAB, 0.6), (200, 0.6), (2, 0.01)])
def test_the_mass_that_top_k_and_top_p_kept_is_computed(make: Make, top_k: int, top_p: float) -> None:
    """Against rft_algos' own top-k, and top-p of the whole, in float64."""
    policy = Policy(5)
    engine = make(policy)
    engine.load_weights(1)
    [drawn] = engine.generate(
        [[6]], [list(range(40))], SamplingOptions(temperature=0.9, max_new_tokens=1, top_k=top_k, top_p=top_p)
    )
    row_V = policy.row([6], 0.9).double()
    order = row_V.argsort(descending=True)[:top_k].tolist()
    kept = [v for i, v in enumerate(order) if float(row_V[order[:i]].exp().sum()) <= top_p]
    mass = float(row_V[kept].exp().sum())
    assert {completion.token_ids[0] for completion in drawn} <= set(kept)
    assert all(completion.log_kept_mass[0] == pytest.approx(math.log(mass), abs=1e-5) for completion in drawn)
    assert all(c.logprobs[0] == pytest.approx(float(row_V[c.token_ids[0]]), abs=1e-5) for c in drawn)
    if top_p == 1.0:
        ours = sampling.kept_tokens(row_V.float().unsqueeze(0), 1.0, top_k, 0.0)[0]
        assert set(kept) == set(ours.nonzero().squeeze(1).tolist())


def test_a_token_kept_by_rounding_alone_belongs_to_the_mass() -> None:
    top = [(math.log(p), token, None) for token, p in ((7, 0.5), (3, 0.3), (1, 0.2))]
    assert log_kept_mass(top, 7, 0.5 - 1e-9) == pytest.approx(math.log(0.5))
    assert log_kept_mass(top, 3, 0.5 - 1e-9) == pytest.approx(math.log(0.8))
    assert log_kept_mass(top, 7, 0.79) == pytest.approx(math.log(0.8))
    assert log_kept_mass(top, 7, 0.81) == pytest.approx(0.0, abs=1e-12)


def test_greedy_takes_the_likeliest_with_log_probs_of_temperature_1(make: Make) -> None:
    policy = Policy(1)
    engine = make(policy)
    engine.load_weights(1)
    [[completion]] = engine.generate(
        [[2, 5]], [[9]], SamplingOptions(temperature=0.0, max_new_tokens=4, top_k=3, top_p=0.5)
    )
    for t, token in enumerate(completion.token_ids):
        row = policy.row([2, 5, *completion.token_ids[:t]])
        assert token == int(row.argmax())
        assert completion.logprobs[t] == pytest.approx(float(row.max()), abs=1e-5)
    assert completion.log_kept_mass == (0.0,) * 4


def test_stop_tokens_end_a_sample_and_budgets_bound_it(make: Make) -> None:
    engine = make(Policy(4))
    engine.load_weights(1)
    free = engine.generate([[1]], [[5, 6, 7, 8]], SamplingOptions(temperature=1.0, max_new_tokens=12))[0]
    stop = free[0].token_ids[3]
    stopped = engine.generate(
        [[1]], [[5, 6, 7, 8]], SamplingOptions(temperature=1.0, max_new_tokens=12, stop_token_ids=(stop,))
    )[0]
    for whole, part in zip(free, stopped, strict=True):
        end = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else 12
        assert part.token_ids == whole.token_ids[:end]
        assert part.finish_reason == ("stop" if stop in whole.token_ids else "length")
    budgets = [[1, 2, 12, 7]]
    cut = engine.generate([[1]], [[5, 6, 7, 8]], SamplingOptions(temperature=1.0, max_new_tokens=12), budgets=budgets)[
        0
    ]
    assert [c.token_ids for c in cut] == [w.token_ids[:b] for w, b in zip(free, budgets[0], strict=True)]


def test_the_whole_of_max_len_can_be_used(make: Make) -> None:
    engine = make(max_len=9)
    engine.load_weights(1)
    [[completion]] = engine.generate([[1, 2, 3]], [[4]], SamplingOptions(temperature=1.0, max_new_tokens=6))
    assert len(completion.token_ids) == 6


def test_end_tokens_of_the_directory_are_sglang_s_own_stops(tmp_path: Path, make: Make) -> None:
    model_dir = write_fake_model(tmp_path / "model", eos_token_id=[3, 4])
    (model_dir / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert end_tokens(model_dir) == {3, 4, 7}
    engine = make(model_dir=model_dir)
    engine.load_weights(1)
    with pytest.raises(OptionsError) as caught:
        engine.generate(PROMPTS, KEYS, replace(ASKED, stop_token_ids=(3,)))
    assert caught.value.problem.do == "stop_token_ids=[3, 4, 7]"
    free = engine.generate([[1]], [list(range(20))], SamplingOptions(temperature=1.0, max_new_tokens=12))[0]
    assert all(completion.finish_reason == "length" for completion in free)
    assert any({3, 4, 7} & set(completion.token_ids) for completion in free)
    engine.generate(PROMPTS, KEYS, replace(ASKED, stop_token_ids=(3, 4, 7)))


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 257}, "top_k"),
        ({"top_k": 1}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"min_new_tokens": 2, "stop_token_ids": [3]}, "min_new_tokens"),
        ({"first_token_temperature": 10.0}, "first_token_temperature"),
    ],
)
def test_what_sglang_cannot_draw_is_refused_with_a_remedy(make: Make, option: dict[str, Any], name: str) -> None:
    engine = make()
    engine.load_weights(1)
    with pytest.raises(OptionsError) as caught:
        engine.generate(PROMPTS, KEYS, replace(ASKED, **option))
    problem = caught.value.problem
    assert problem.code == f"engine.sglang.{name}"
    assert problem.why
    assert problem.do
    assert engine.generate(PROMPTS, KEYS, ASKED)


def test_a_token_trie_is_refused(make: Make) -> None:
    engine = make()
    engine.load_weights(1)
    trie = TokenTrie.of([[1, 2], [3, 4]])
    with pytest.raises(OptionsError) as caught:
        engine.generate(PROMPTS, KEYS, ASKED, constraint=trie)
    assert caught.value.problem.code == "engine.sglang.constraint"


@pytest.mark.parametrize(
    ("field", "value"), [("quantization", "fp8"), ("transport", "ipc"), ("transport", "nccl"), ("max_rows", 0)]
)
def test_settings_that_sglang_cannot_carry_out_are_refused(model_dir: Path, field: str, value: object) -> None:
    with pytest.raises(OptionsError):
        SglangSettings(**{"model_dir": model_dir, "max_rows": 2, "max_len": 8, field: value})


def test_a_length_beyond_the_model_s_positions_is_refused_with_the_one_that_fits(tmp_path: Path, make: Make) -> None:
    model_dir = write_fake_model(tmp_path / "model", max_position_embeddings=64)
    assert make(model_dir=model_dir, max_len=62).max_len == 62
    with pytest.raises(OptionsError) as caught:
        make(model_dir=model_dir, max_len=63)
    assert caught.value.problem.do == "max_len=62"


def test_new_weights_change_the_text_and_agree_with_the_policy(make: Make) -> None:
    policy = Policy(0)
    engine = make(policy)
    engine.load_weights(1)
    first = tokens(engine.generate(PROMPTS, KEYS, ASKED))
    policy.values = fake_tensors(9)
    engine.load_weights(2)
    assert check_logprob_parity(engine, policy.logprobs).maximum < 1e-5
    second = engine.generate(PROMPTS, KEYS, ASKED)
    assert tokens(second) != first
    assert {completion.weight_version for row in second for completion in row} == {2}
    assert root(engine).calls[-3:] == ["update flush=True", "update flush=False", "flush"]
    assert root(engine).num_sessions == 2


def load_and_check(engine: InThisProcess, policy: Policy, version: int) -> float:
    """What the training loop does before it asks for a rollout."""
    engine.load_weights(version)
    return check_logprob_parity(engine, policy.logprobs).maximum


FAULTS = ("skip", "half", "tied", "overwritten", "overwritten_later", "keeps_prefix")


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_of_an_update_are_caught_in_the_same_step(make: Make, fault: str) -> None:
    """20 placements each: model seed, and the update in which it happens; updates before and after are served."""
    for seed, faulty in itertools.product(range(10), (2, 3)):
        policy = Policy(seed)
        engine = make(policy, max_len=40)
        for version in range(1, faulty + 2):
            policy.values = fake_tensors(100 * seed + version)
            engine.double.faults.clear()
            if version == faulty:
                engine.double.faults.add(fault)
                with pytest.raises(ServiceError) as caught:
                    load_and_check(engine, policy, version)
                assert caught.value.problem.code == "engine.logprob_parity", (seed, version)
                assert f"{version}" in caught.value.problem.what + caught.value.problem.where
                continue
            assert load_and_check(engine, policy, version) < 1e-5
        assert engine.weight_version == faulty + 1


def test_one_worker_of_two_that_missed_an_update_is_seen(make: Make) -> None:
    engine = make(Policy(6), tensor_parallel_size=2)
    engine.double.faults.add("replica")
    with pytest.raises(ServiceError, match=r"5 of 5 tensors that worker [01] holds") as caught:
        engine.load_weights(1)
    assert caught.value.problem.code == "engine.logprob_parity"
    engine.double.faults.clear()
    engine.load_weights(2)
    assert engine.generate(PROMPTS, KEYS, ASKED)


def test_a_prefix_cache_that_is_not_dropped_or_a_worker_s_error_ends_the_load(make: Make) -> None:
    engine = make(Policy(6))
    for fault, code in (("refuses_flush", "engine.sglang.prefix_cache"), ("load_error", "engine.sglang.update")):
        engine.double.faults.add(fault)
        with pytest.raises(ServiceError) as caught:
            engine.load_weights(1)
        assert caught.value.problem.code == code
        engine.double.faults.clear()
        with pytest.raises(ServiceError) as caught:
            engine.generate(PROMPTS, KEYS, ASKED)
        assert caught.value.problem.code == "engine.weights.unfinished"
    engine.load_weights(1)
    assert engine.generate(PROMPTS, KEYS, ASKED)


def test_a_worker_that_does_not_answer_is_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(Policy(6))
    monkeypatch.setattr(weight_loader, "exchange", lambda model, named_tensors: None)
    with pytest.raises(ServiceError, match="0 of 1") as caught:
        engine.load_weights(1)
    assert caught.value.problem.code == "engine.sglang.update"


def test_sleep_and_wake_are_idempotent_and_in_order(make: Make) -> None:
    policy = Policy(0)
    engine = make(policy, enable_sleep=True)
    engine.load_weights(1)
    wanted = tokens(engine.generate(PROMPTS, KEYS, ASKED))
    engine.sleep(1)
    engine.sleep(1)
    assert engine.state is EngineState.ASLEEP
    with pytest.raises(ServiceError):
        engine.generate(PROMPTS, KEYS, ASKED)
    engine.wake()
    engine.wake()
    assert tokens(engine.generate(PROMPTS, KEYS, ASKED)) == wanted
    memory = [call for call in root(engine).calls if call.startswith(("re",))]
    assert memory == ["release ['kv_cache', 'weights']", "resume ['weights', 'kv_cache']"]


def test_an_update_while_asleep_wakes_the_weights_alone(make: Make) -> None:
    policy = Policy(0)
    engine = make(policy, enable_sleep=True)
    engine.load_weights(1)
    engine.sleep(2)
    engine.wake()
    with pytest.raises(ServiceError, match="were dropped") as caught:
        engine.generate(PROMPTS, KEYS, ASKED)
    assert caught.value.problem.code == "engine.state"
    engine.load_weights(2)
    assert engine.generate(PROMPTS, KEYS, ASKED)
    engine.sleep(2)
    policy.values = fake_tensors(12)
    engine.load_weights(3)
    engine.wake()
    assert check_logprob_parity(engine, policy.logprobs).maximum < 1e-5
    memory = [call for call in root(engine).calls if call.startswith("re")]
    assert memory[-3:] == ["release ['kv_cache', 'weights']", "resume ['weights']", "resume ['kv_cache']"]


def test_sleep_without_the_pool_is_refused(make: Make) -> None:
    engine = make()
    with pytest.raises(OptionsError, match="enable_sleep") as caught:
        engine.sleep()
    assert caught.value.problem.code == "engine.sglang.sleep"
    assert engine.state is EngineState.READY


def test_tokens_without_their_log_probs_are_refused(make: Make) -> None:
    engine = make(faults=["garbage"])
    engine.load_weights(1)
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, ASKED)
    assert caught.value.problem.code == "engine.garbage"


def test_a_deadline_drops_what_is_under_way(model_dir: Path) -> None:
    double = FakeSglang(faults=["hang"])
    local = LocalSglang(SglangSettings(model_dir=model_dir, max_rows=2, max_len=32), double)
    call = _call()
    with pytest.raises(ServiceError, match="0 of 2") as caught:
        list(local.generate(call, 0.05))
    assert caught.value.problem.code == "engine.deadline"
    assert double.engine is not None
    assert double.engine.tokenizer_manager.num_aborts == 1
    local.close()


def test_a_start_that_fails_says_what_to_change(model_dir: Path) -> None:
    settings = SglangSettings(model_dir=model_dir, max_rows=2, max_len=32, memory_utilization=0.8)
    with pytest.raises(ServiceError) as caught:
        LocalSglang(settings, FakeSglang(start_error="Not enough memory. Please try another --mem-fraction-static"))
    assert caught.value.problem.do.startswith("--engine_mem_util 0.4")


@pytest.mark.parametrize(
    ("used", "do"),
    [(50_000, "end process 77 (python), or --engine_mem_util 0.4"), (500, "--engine_mem_util 0.4")],
)
def test_who_holds_the_gpu_is_named_when_the_start_fails_for_memory(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, used: int, do: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = SglangSettings(model_dir=model_dir, max_rows=2, max_len=32, memory_utilization=0.8)
    device = Device(0, "GPU-a", 80_000, 80_000 - used, (DeviceProcess(77, "python", used, "GPU-a"),))
    with pytest.raises(ServiceError) as caught:
        LocalSglang(settings, FakeSglang(start_error="CUDA out of memory. Tried to allocate 2 GiB"), lambda: [device])
    assert caught.value.problem.do.startswith(do)
    assert f"the device is held by pid 77 python {used} MiB" in caught.value.problem.where
    # a start that fails for another reason asks for no list of processes
    with pytest.raises(ServiceError, match="no such option"):
        LocalSglang(settings, FakeSglang(start_error="no such option"), lambda: pytest.fail("asked"))


@pytest.mark.parametrize(
    ("words", "about_memory"), [("CUDA out of memory. Tried to allocate 2 GiB", True), ("x", False)]
)
def test_a_process_that_died_for_memory_says_so(
    model_dir: Path, tmp_path: Path, words: str, about_memory: bool
) -> None:
    settings = SglangSettings(model_dir=model_dir, max_rows=2, max_len=32, memory_utilization=0.8)
    died = f"import sys; print({words!r}, file=sys.stderr, flush=True); sys.exit(1)"
    with pytest.raises(ServiceError) as caught:
        SglangEngine(settings, lambda: [], log_path=tmp_path / "engine.log", command=(sys.executable, "-c", died))
    problem = caught.value.problem
    assert (problem.code == "engine.sglang.start") is about_memory
    assert problem.do.startswith("--engine_mem_util 0.4") is about_memory


def test_sglang_that_is_not_installed_is_named_with_its_command() -> None:
    with pytest.raises(PreflightError) as caught:
        InstalledSglang()
    assert "--extra sglang" in caught.value.problem.do


def _call() -> Any:
    from rft_engine.process.requests import GenerateCall

    options = {"temperature": 1.0, "max_new_tokens": 3, "stop_token_ids": ()}
    return GenerateCall(version=0, options=options, keys=[1, 2], prompts=[[1]], requests=[(0, 0), (1, 0)])
