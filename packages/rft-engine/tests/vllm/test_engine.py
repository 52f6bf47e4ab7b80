"""The vLLM adapter against a double that keeps vLLM's protocol; the real one is tested in tests/vllm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_vllm import VOCAB, FakeVllm, fake_logits, fake_tensors, write_fake_model
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError, PreflightError, ServiceError
from rft_engine.lifecycle import EngineState
from rft_engine.native.engine import NativeEngine
from rft_engine.process.settings import EngineDeadlines
from rft_engine.vllm.engine import VllmEngine
from rft_engine.vllm.runtime import InstalledVllm
from rft_engine.vllm.settings import VllmSettings, llm_arguments
from rft_engine.weight_sync.logprob_probe import check_logprob_parity

PROMPTS = [[1], [2, 3, 4], [5, 1], [6, 6, 2, 1, 3, 4, 5, 0, 9, 10, 7, 8, 2], [0, 3]]
KEYS = [[100 * p + s for s in range(n)] for p, n in enumerate([3, 1, 4, 2, 5])]


class Policy:
    """The trainer's tensors, and its log-probs."""

    def __init__(self, seed: int = 0) -> None:
        self.values = fake_tensors(seed)

    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        return list(self.values.items())

    def change(self, seed: int) -> None:
        self.values = fake_tensors(seed)

    def logprobs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        return [
            [
                float((fake_logits(self.values, [*prompt, *completion[:t]]) / temperature).log_softmax(-1)[token])
                for t, token in enumerate(completion)
            ]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]


class TableModel:
    """The double's model as the native engine asks for it."""

    vocab_size, max_positions = VOCAB, 0

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def new_cache(self, max_rows: int, max_len: int):
        return HistoryCache(max_rows)

    def prefill(self, cache, token_ids_PL, lengths_P, copies_P):
        rows = [row[:length].tolist() for row, length in zip(token_ids_PL, lengths_P.tolist(), strict=True)]
        cache.rows += [list(row) for row, copies in zip(rows, copies_P, strict=True) for _ in range(copies)]
        return torch.stack([fake_logits(self._policy.values, row) for row in rows])

    def step(self, cache, token_ids_B):
        for row, token in zip(cache.rows, token_ids_B.tolist(), strict=True):
            row.append(token)
        return torch.stack([fake_logits(self._policy.values, row) for row in cache.rows])

    def refresh(self) -> None: ...


class HistoryCache:
    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.rows: list[list[int]] = []

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def keep(self, rows: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows.tolist()]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake") / "model")


def make(model_dir: Path, policy: Policy, *, runtime: FakeVllm | None = None, **settings):
    runtime = runtime or FakeVllm()
    sizes = {"max_rows": 4, "max_len": 64, **settings}
    return VllmEngine(VllmSettings(model_dir=model_dir, **sizes), policy.tensors, runtime=runtime), runtime


def flat(answers):
    return [completion for row in answers for completion in row]


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 4, "min_p": 0.05},
    {"temperature": 0.0, "stop_token_ids": [3]},
    {"temperature": 1.0, "stop_token_ids": [3, 5, 7]},
    {"temperature": 1.0, "stop_token_ids": [1, 2, 3, 4, 5], "min_new_tokens": 6},
    {"temperature": 1.0, "first_token_temperature": 10.0},
    {"temperature": 0.8, "first_token_temperature": 5.0, "stop_token_ids": [1, 2, 3], "min_new_tokens": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_a_key_gives_what_it_gives_in_the_native_engine(model_dir: Path, options, max_rows: int) -> None:
    policy = Policy()
    engine, _ = make(model_dir, policy, max_rows=max_rows)
    native = NativeEngine(TableModel(policy), max_rows=8, max_len=64)
    ours = flat(engine.generate(PROMPTS, KEYS, SamplingOptions(max_new_tokens=12, **options)))
    theirs = flat(native.generate(PROMPTS, KEYS, SamplingOptions(max_new_tokens=12, **options)))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.finish_reason == other.finish_reason
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert mine.log_kept_mass == pytest.approx(other.log_kept_mass, abs=1e-5)


def test_stats_count_tokens_prompts_and_steps(model_dir: Path) -> None:
    engine, runtime = make(model_dir, Policy(), max_rows=2)
    engine.generate([[1, 2, 3]], [[1, 2, 3]], SamplingOptions(temperature=1.0, max_new_tokens=5))
    stats = engine.stats()
    assert stats.num_generated_tokens == 15
    assert stats.num_prefill_tokens <= 3 + 2, "the second and third sample find the prompt in the cache"
    assert stats.num_decode_steps == runtime.llm.llm_engine.num_steps == 10
    assert stats.mean_occupancy == pytest.approx(15 / 20)
    assert engine.generate([[1]], [[]], SamplingOptions(temperature=1.0, max_new_tokens=5)) == [[]]
    assert engine.stats().num_generated_tokens == 0


def test_every_setting_reaches_vllm(model_dir: Path) -> None:
    settings = VllmSettings(
        model_dir=model_dir,
        max_rows=7,
        max_len=99,
        dtype="bfloat16",
        tensor_parallel_size=2,
        memory_utilization=0.4,
        quantization="fp8",
        enable_sleep=True,
        enforce_eager=True,
        seed=3,
    )
    sent = llm_arguments(settings, is_cpu=False)
    expected = {
        "max_num_seqs": 7,
        "max_model_len": 99,
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.4,
        "quantization": "fp8",
        "enable_sleep_mode": True,
        "enforce_eager": True,
        "seed": 3,
    }
    assert {name: sent[name] for name in expected} == expected


def test_auto_keeps_the_directorys_dtype(tmp_path: Path) -> None:
    """vLLM's own "auto" rounds float32 to bfloat16."""
    path = write_fake_model(tmp_path / "model", dtype="float32")
    sent = llm_arguments(VllmSettings(model_dir=path, max_rows=4, max_len=64), is_cpu=True)
    assert sent["dtype"] == "float32"


def test_the_cpus_cache_holds_every_row_at_full_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    path = write_fake_model(tmp_path / "model", num_hidden_layers=8, num_key_value_heads=1)
    sent = llm_arguments(VllmSettings(model_dir=path, max_rows=16, max_len=1024), is_cpu=True)
    of_token = 2 * 8 * 1 * 32 * 4  # keys and values, layers, heads, head size, bytes
    assert sent["kv_cache_memory_bytes"] == of_token * 16 * (1024 + 128)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"enable_sleep": True}, "engine.vllm.sleep"),
        ({"quantization": "fp8"}, "engine.vllm.quantization"),
        ({"transport": "ipc"}, "engine.vllm.transport"),
        ({"transport": "nccl"}, "engine.vllm.transport"),
    ],
)
def test_what_the_cpu_build_cannot_do_is_refused_before_it_starts(model_dir: Path, settings, code: str) -> None:
    runtime = FakeVllm()
    with pytest.raises(OptionsError) as caught:
        make(model_dir, Policy(), runtime=runtime, **settings)
    assert caught.value.problem.code == code
    assert caught.value.problem.do
    assert runtime.llm is None


def test_heads_that_the_cpu_kernels_do_not_know_are_refused(tmp_path: Path) -> None:
    path = write_fake_model(tmp_path / "model", head_dim=16)
    with pytest.raises(OptionsError, match="of 16") as caught:
        make(path, Policy())
    assert caught.value.problem.code == "engine.vllm.head_size"


def test_experts_are_refused_on_a_cpu(tmp_path: Path) -> None:
    path = write_fake_model(tmp_path / "model", num_experts=4)
    with pytest.raises(OptionsError, match="4 experts") as caught:
        make(path, Policy())
    assert caught.value.problem.code == "engine.vllm.experts"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_rows": 0},
        {"max_len": 1},
        {"tensor_parallel_size": 0},
        {"memory_utilization": 0.0},
        {"memory_utilization": 1.5},
        {"quantization": "awq"},
    ],
)
def test_settings_out_of_range_are_refused(model_dir: Path, fields) -> None:
    with pytest.raises(OptionsError) as caught:
        VllmSettings(**{"model_dir": model_dir, "max_rows": 4, "max_len": 64, **fields})
    assert caught.value.problem.code == f"engine.vllm.{next(iter(fields))}"


def test_without_vllm_the_error_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError) as caught:
        InstalledVllm()
    assert "--extra vllm" in caught.value.problem.do


def test_another_release_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util
    import sys

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin="vllm/__init__.py"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.9"))
    with pytest.raises(PreflightError, match=r"0\.31\.9") as caught:
        InstalledVllm()
    assert caught.value.problem.code == "engine.vllm.version"


def test_a_start_without_memory_says_what_to_lower(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(self: FakeVllm, arguments: dict[str, object]) -> None:
        raise ValueError("Available memory (3.1/16.0 GiB) is less than requested memory for kv (8.0 GiB)")

    monkeypatch.setattr(FakeVllm, "make_llm", too_large)
    with pytest.raises(ServiceError) as caught:
        make(model_dir, Policy(), memory_utilization=0.5)
    assert caught.value.problem.code == "engine.vllm.start"
    assert "3.1/16.0 GiB" in caught.value.problem.what
    assert caught.value.problem.do.startswith("--engine_mem_util 0.25")


@pytest.mark.parametrize("is_cpu", [True, False])
def test_an_update_is_served_and_agrees_with_the_policy(model_dir: Path, is_cpu: bool) -> None:
    policy = Policy()
    engine, _ = make(model_dir, policy, runtime=FakeVllm(is_cpu=is_cpu))
    before = flat(engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=8)))
    for version in (1, 4):
        policy.change(version)
        engine.load_weights(version)
        gap = check_logprob_parity(engine, policy.logprobs)
        assert gap.maximum < 1e-5
        assert gap.weight_version == version
    after = flat(engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=8)))
    assert {c.weight_version for c in after} == {4}
    assert [c.token_ids for c in before] != [c.token_ids for c in after]


def test_refresh_brings_changed_tensors_under_the_same_version(model_dir: Path) -> None:
    policy = Policy()
    engine, _ = make(model_dir, policy)
    engine.load_weights(1)
    policy.change(7)
    engine.refresh()
    assert engine.weight_version == 1
    assert check_logprob_parity(engine, policy.logprobs).maximum < 1e-5


PLANTED = {
    "skip": "engine.logprob_parity",
    "half": "engine.logprob_parity",
    "tied": "engine.logprob_parity",
    "overwritten": "engine.logprob_parity",
    "replica": "engine.logprob_parity",
    "keeps_prefix": "engine.logprob_parity",
    "refuses_reset": "engine.vllm.prefix_cache",
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fault", PLANTED)
def test_a_stale_engine_is_caught_in_the_step_in_which_it_becomes_stale(model_dir: Path, fault: str, seed: int) -> None:
    policy = Policy()
    runtime = FakeVllm(is_cpu=False)
    parallel = 2 if fault == "replica" else 1
    engine, _ = make(model_dir, policy, runtime=runtime, tensor_parallel_size=parallel, max_len=24)
    engine.load_weights(1)
    check_logprob_parity(engine, policy.logprobs)
    runtime.faults.add(fault)
    policy.change(100 + seed)

    def one_step() -> None:
        engine.load_weights(2)
        check_logprob_parity(engine, policy.logprobs)

    with pytest.raises(ServiceError) as caught:
        one_step()
    assert caught.value.problem.code == PLANTED[fault]
    if fault in ("keeps_prefix", "refuses_reset"):
        return
    assert "version 2" in caught.value.problem.what
    assert "served version 1" in caught.value.problem.where
    assert ".weight" in caught.value.problem.what, "it names tensors"
    with pytest.raises(ServiceError) as caught:
        engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=1))
    assert caught.value.problem.code == "engine.weights.unfinished"
    runtime.faults.clear()
    engine.load_weights(2)
    assert check_logprob_parity(engine, policy.logprobs).maximum < 1e-5


def test_a_head_that_is_not_packed_again_is_caught_by_the_probe(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own fault on a CPU: every parameter shows the new values, the head multiplies with the old."""
    monkeypatch.setattr("rft_engine.vllm.worker_extension.repack_tied", lambda model: 0)
    policy = Policy()
    engine, _ = make(model_dir, policy)
    policy.change(3)
    engine.load_weights(1)
    with pytest.raises(ServiceError) as caught:
        check_logprob_parity(engine, policy.logprobs)
    assert caught.value.problem.code == "engine.logprob_parity"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors[:-1], "model.norm.weight"),
        (lambda tensors: [*tensors, tensors[-1]], "twice"),
        (lambda tensors: tensors[1:], "embed_tokens"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(model_dir: Path, change, words: str) -> None:
    policy = Policy()
    settings = VllmSettings(model_dir=model_dir, max_rows=4, max_len=64)
    engine = VllmEngine(settings, lambda: change(policy.tensors()), runtime=FakeVllm())
    with pytest.raises(ServiceError, match=words) as caught:
        engine.load_weights(1)
    assert caught.value.problem.code == "engine.weights.incomplete"
    assert engine.weight_version == 0
    with pytest.raises(ServiceError) as caught:
        engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=1))
    assert caught.value.problem.code == "engine.weights.unfinished"


@pytest.mark.parametrize("names", [["head"], ["embedding", "head"], ["head", "embedding"]], ids="-".join)
def test_a_tied_matrix_may_come_under_either_name_or_both(model_dir: Path, names: list[str]) -> None:
    policy = Policy(5)
    full = {"head": "lm_head.weight", "embedding": "model.embed_tokens.weight"}

    def tensors():
        rest = dict(policy.values)
        matrix = rest.pop("model.embed_tokens.weight")
        return [*rest.items(), *((full[name], matrix) for name in names)]

    settings = VllmSettings(model_dir=model_dir, max_rows=4, max_len=64)
    engine = VllmEngine(settings, tensors, runtime=FakeVllm())
    engine.load_weights(1)
    assert check_logprob_parity(engine, policy.logprobs).maximum < 1e-5


def test_versions_only_increase_and_an_old_one_changes_nothing(model_dir: Path) -> None:
    policy = Policy()
    engine, _ = make(model_dir, policy)
    engine.load_weights(3)
    policy.change(9)
    with pytest.raises(ServiceError) as caught:
        engine.load_weights(3)
    assert caught.value.problem.code == "engine.weights.not_newer"
    engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=2))


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_wake_serves_again(model_dir: Path, level: int) -> None:
    policy = Policy()
    engine, runtime = make(model_dir, policy, runtime=FakeVllm(is_cpu=False), enable_sleep=True)
    engine.load_weights(1)
    engine.sleep(level)
    engine.sleep(level)
    assert runtime.llm.calls == [f"sleep {level}"]
    with pytest.raises(ServiceError, match="asleep") as caught:
        engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=1))
    assert caught.value.problem.code == "engine.state"
    engine.wake()
    engine.wake()
    assert runtime.llm.calls == [f"sleep {level}", "wake ['kv_cache', 'weights']"]
    if level == 2:
        with pytest.raises(ServiceError) as caught:
            engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=1))
        assert caught.value.problem.code == "engine.state"
        engine.refresh()
    assert engine.state is EngineState.READY
    if level == 2:
        assert check_logprob_parity(engine, policy.logprobs).maximum < 1e-5


def test_an_update_asleep_wakes_the_weights_alone_and_the_cache_later(model_dir: Path) -> None:
    policy = Policy()
    engine, runtime = make(model_dir, policy, runtime=FakeVllm(is_cpu=False), enable_sleep=True)
    engine.sleep(2)
    policy.change(1)
    engine.load_weights(1)
    engine.wake()
    assert runtime.llm.calls == ["sleep 2", "wake ['weights']", "wake ['kv_cache']"]
    assert check_logprob_parity(engine, policy.logprobs).maximum < 1e-5


def test_sleep_is_refused_where_it_would_have_no_effect(model_dir: Path) -> None:
    on_cpu, _ = make(model_dir, Policy())
    with pytest.raises(OptionsError) as caught:
        on_cpu.sleep(1)
    assert caught.value.problem.code == "engine.vllm.sleep"
    assert caught.value.problem.do == "--disable_engine_sleep"
    not_enabled, runtime = make(model_dir, Policy(), runtime=FakeVllm(is_cpu=False))
    with pytest.raises(ServiceError, match="enable_sleep") as caught:
        not_enabled.sleep(1)
    assert caught.value.problem.code == "engine.vllm.sleep"
    for engine in (on_cpu, not_enabled):
        assert engine.state is EngineState.READY
    assert runtime.llm.calls == []


def test_a_closed_engine_stays_closed(model_dir: Path) -> None:
    engine, runtime = make(model_dir, Policy())
    engine.close()
    engine.close()
    assert runtime.is_shut_down
    for call in (engine.refresh, lambda: engine.load_weights(1), engine.wake, engine.sleep):
        with pytest.raises(ServiceError, match="closed") as caught:
            call()
        assert caught.value.problem.code == "engine.state"
    with pytest.raises(ServiceError, match="closed") as caught:
        engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=1))
    assert caught.value.problem.code == "engine.state"


def test_a_call_past_its_deadline_leaves_the_engine_usable(model_dir: Path) -> None:
    deadlines = EngineDeadlines(generate=1e-9)
    engine, runtime = make(model_dir, Policy(), deadlines=deadlines)
    with pytest.raises(ServiceError) as caught:
        engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=20))
    assert caught.value.problem.code == "engine.deadline"
    assert "of 15 samples" in caught.value.problem.what
    assert not runtime.llm.llm_engine.has_unfinished_requests()


def test_a_token_that_was_not_drawn_is_an_error(model_dir: Path) -> None:
    engine, _ = make(model_dir, Policy(), runtime=FakeVllm(faults=["wrong_token"]))
    with pytest.raises(ServiceError) as caught:
        engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=3))
    assert caught.value.problem.code == "engine.vllm.not_drawn"


@pytest.mark.parametrize(
    ("prompts", "keys", "code"),
    [
        ([[]], [[1]], "engine.empty_prompt"),
        ([[1] * 60], [[1]], "engine.prompt_too_long"),
        ([[VOCAB]], [[1]], "engine.unknown_token"),
        ([[-1]], [[1]], "engine.unknown_token"),
        ([[1], [2]], [[1]], "engine.sample_keys"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(model_dir: Path, prompts, keys, code: str) -> None:
    engine, runtime = make(model_dir, Policy())
    with pytest.raises(OptionsError) as caught:
        engine.generate(prompts, keys, SamplingOptions(temperature=1.0, max_new_tokens=5))
    assert caught.value.problem.code == code
    assert runtime.llm.llm_engine.num_steps == 0


def test_the_probe_allows_a_stated_gap_and_not_more(model_dir: Path) -> None:
    policy = Policy()
    engine, _ = make(model_dir, policy)

    def off_by(size: float):
        return lambda p, c: [[value + size for value in row] for row in policy.logprobs(p, c)]

    assert check_logprob_parity(engine, off_by(9e-4)).maximum == pytest.approx(9e-4, rel=0.05)
    for wrong in (off_by(1.1e-3), off_by(float("nan"))):
        with pytest.raises(ServiceError) as caught:
            check_logprob_parity(engine, wrong)
        assert caught.value.problem.code == "engine.logprob_parity"
