"""vLLM's CPU build in this process: tokens, log-probs and weights, beside the policy's own forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from policy_side import MAX_LEN, Policy

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError
from rft_engine.native.engine import NativeEngine
from rft_engine.vllm.engine import VllmEngine
from rft_engine.vllm.settings import VllmSettings
from rft_engine.weight_sync.logprob_probe import check_logprob_parity
from rft_models.decode.fast_decoder import decoder_for
from rft_models.policy.load import load_policy

GAP = 1e-4
"""Log-probs of two implementations in float32."""

PROMPTS = [[2, 3, 4], [5], [6, 7, 8, 9, 10, 11], [3] * 140]
KEYS = [[11, 12, 13], [21], [31, 32], [41, 42]]


class Pair:
    def __init__(self, model_dir: Path) -> None:
        self.policy = Policy(model_dir)
        settings = VllmSettings(model_dir=model_dir, max_rows=16, max_len=MAX_LEN, enforce_eager=True)
        self.engine = VllmEngine(settings, self.policy.tensors)


@pytest.fixture(scope="module")
def pair(model_dir: Path) -> Iterator[Pair]:
    made = Pair(model_dir)
    yield made
    made.engine.close()


def flat(answers):
    return [completion for row in answers for completion in row]


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 12, "min_p": 0.02},
    {"temperature": 0.0},
    {"temperature": 1.0, "first_token_temperature": 10.0},
    {"temperature": 1.3, "stop_token_ids": [7, 8], "min_new_tokens": 5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_logprobs_and_kept_mass_are_those_of_the_native_engine(pair: Pair, model_dir: Path, options) -> None:
    native = NativeEngine(decoder_for(load_policy(model_dir)), max_rows=16, max_len=MAX_LEN)
    restored = Policy(model_dir)
    pair.policy.model.load_state_dict(restored.model.state_dict())
    pair.engine.load_weights(pair.engine.weight_version + 1)
    ours = flat(pair.engine.generate(PROMPTS, KEYS, SamplingOptions(max_new_tokens=24, **options)))
    theirs = flat(native.generate(PROMPTS, KEYS, SamplingOptions(max_new_tokens=24, **options)))
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert [c.finish_reason for c in ours] == [c.finish_reason for c in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=GAP)
        assert mine.log_kept_mass == pytest.approx(other.log_kept_mass, abs=GAP)


SEQUENCES = [[5, 9, 2], [5, 9, 3, 2], [7, 2], [11, 12, 13, 14, 2], [11, 12, 10, 2], [6, 2], [5, 8, 2]]
LIMITED = [
    {"budgets": [[1 + (7 * key) % 12 for key in keys] for keys in KEYS], "stop_token_ids": [7, 8]},
    {"constraint": TokenTrie.of(SEQUENCES), "stop_token_ids": [2]},
    {"constraint": TokenTrie.of(SEQUENCES), "temperature": 0.0},
    {"constraint": TokenTrie.of([[5, 6, 7], [7, 7, 8], [7, 6, 5]]), "temperature": 2.5, "top_p": 0.9},
]


@pytest.mark.parametrize("options", LIMITED, ids=["budgets", "ended", "greedy", "even"])
def test_budgets_and_constraints_are_those_of_the_native_engine(pair: Pair, model_dir: Path, options) -> None:
    native = NativeEngine(decoder_for(load_policy(model_dir)), max_rows=16, max_len=MAX_LEN)
    pair.policy.model.load_state_dict(Policy(model_dir).model.state_dict())
    pair.engine.load_weights(pair.engine.weight_version + 1)
    limits = {name: options[name] for name in ("budgets", "constraint") if name in options}
    rest = {name: value for name, value in options.items() if name not in limits}
    asked = SamplingOptions(**{"temperature": 1.0, "max_new_tokens": 12, **rest})
    ours, theirs = (flat(engine.generate(PROMPTS, KEYS, asked, **limits)) for engine in (pair.engine, native))
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert [c.finish_reason for c in ours] == [c.finish_reason for c in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=GAP)
        assert mine.log_kept_mass == pytest.approx(other.log_kept_mass, abs=GAP)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_policys_forward(pair: Pair, temperature: float) -> None:
    answers = pair.engine.generate(
        PROMPTS, KEYS, SamplingOptions(temperature=temperature, top_p=0.9, max_new_tokens=32)
    )
    gaps = []
    for prompt, row in zip(PROMPTS, answers, strict=True):
        expected = pair.policy.logprobs([prompt] * len(row), [c.token_ids for c in row], temperature)
        gaps += [abs(a - b) for c, e in zip(row, expected, strict=True) for a, b in zip(c.logprobs, e, strict=True)]
    print(f"largest gap at temperature {temperature}: {max(gaps):.2e} over {len(gaps)} tokens")
    assert max(gaps) < GAP


def test_a_sample_depends_on_its_key_and_not_on_its_company(pair: Pair) -> None:
    whole = pair.engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=24))
    for prompt, keys, row in zip(PROMPTS, KEYS, whole, strict=True):
        for key, completion in zip(keys, row, strict=True):
            [[alone]] = pair.engine.generate([prompt], [[key]], SamplingOptions(temperature=1.0, max_new_tokens=24))
            assert alone.token_ids == completion.token_ids


def test_more_samples_than_rows_are_all_drawn(pair: Pair) -> None:
    keys = list(range(100, 150))
    [many] = pair.engine.generate([[2, 3]], [keys], SamplingOptions(temperature=1.0, max_new_tokens=8))
    [few] = pair.engine.generate([[2, 3]], [keys[40:42]], SamplingOptions(temperature=1.0, max_new_tokens=8))
    assert len(many) == 50
    assert [c.token_ids for c in many[40:42]] == [c.token_ids for c in few]


def test_after_an_update_text_changes_and_the_probe_agrees_again(pair: Pair) -> None:
    before = flat(pair.engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=24)))
    for seed in range(3):
        pair.policy.change(seed)
        version = pair.engine.weight_version + 1
        pair.engine.load_weights(version)
        gap = check_logprob_parity(pair.engine, pair.policy.logprobs)
        print(f"version {version}: largest gap of the probe {gap.maximum:.2e}")
        assert gap.maximum < GAP
        assert gap.weight_version == version
    after = flat(pair.engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=24)))
    assert all(c.weight_version == pair.engine.weight_version for c in after)
    assert [c.token_ids for c in before] != [c.token_ids for c in after]


def test_the_engine_holds_a_copy(pair: Pair) -> None:
    """What is trained between two updates does not leak into samples."""
    before = flat(pair.engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=12)))
    kept = {name: value.clone() for name, value in pair.policy.model.state_dict().items()}
    pair.policy.change(99, size=0.5)
    after = flat(pair.engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=12)))
    pair.policy.model.load_state_dict(kept)
    assert [c.token_ids for c in before] == [c.token_ids for c in after]


def test_the_digests_that_are_compared_cover_all_but_repacked_matrices(pair: Pair) -> None:
    pair.policy.change(5)
    pair.engine.load_weights(pair.engine.weight_version + 1)
    held = pair.engine._backend.rpc("rft_fingerprints", [pair.engine._source.shapes])[0]
    left_out = {name.rsplit(".", 2)[-2] for name in pair.engine._source.sent.keys() - held.keys()}
    assert left_out <= {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert any(name.endswith("k_proj.bias") for name in held), "rows of a fused tensor are found"
    assert any(name.endswith("embed_tokens.weight") for name in held), "and those of a padded one"


def test_the_cpu_build_refuses_to_sleep(pair: Pair, model_dir: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        pair.engine.sleep(1)
    assert caught.value.problem.do == "--disable_engine_sleep"
    assert pair.engine.generate([[2]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=2))


def test_torchs_threads_can_still_be_set(pair: Pair) -> None:
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
