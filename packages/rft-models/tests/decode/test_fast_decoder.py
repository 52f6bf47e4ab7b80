"""Both decode paths against the packed training forward, with ragged prompts, copies and dropped rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_models.decode import fast_decoder, row_groups
from rft_models.decode.fast_decoder import FastDecoder, decoder_for
from rft_models.decode.hf_decoder import HfDecoder
from rft_models.families.registry import fast_decode_families, packed_families
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy

Build = Callable[..., Any]
VOCAB = 61
FAST = sorted(fast_decode_families())
EVERY = [(FastDecoder, name) for name in FAST] + [(HfDecoder, name) for name in sorted({*packed_families(), "gpt2"})]


def logits_after(policy: CausalPolicy, tokens: list[int]) -> Tensor:
    """[V] from the training forward of one whole sequence."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        hidden = policy.hidden_states(PackedTokens(ids, torch.arange(len(ids)), torch.zeros_like(ids)))
        return policy.head.logits(hidden[-1:])[0]


def pad(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.full((len(prompts), int(lengths.max())), 7)
    for number, prompt in enumerate(prompts):
        ids[number, : len(prompt)] = torch.tensor(prompt)
    return ids, lengths


class Session:
    """Feeds a decoder and remembers what every row holds, to be held against the training forward."""

    def __init__(self, policy: CausalPolicy, decoder: Any, max_rows: int = 16, max_len: int = 40) -> None:
        self.policy, self.decoder = policy, decoder
        self.cache = decoder.new_cache(max_rows, max_len)
        self.rows: list[list[int]] = []
        self.generator = torch.Generator().manual_seed(5)

    def prefill(self, lengths: list[int], copies: list[int]) -> None:
        prompts = [torch.randint(0, VOCAB, (n,), generator=self.generator).tolist() for n in lengths]
        logits = self.decoder.prefill(self.cache, *pad(prompts), copies)
        for prompt, row, count in zip(prompts, logits, copies, strict=True):
            self.check(row, prompt)
            self.rows += [list(prompt) for _ in range(count)]
        assert self.cache.num_rows == len(self.rows)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            tokens = torch.randint(0, VOCAB, (len(self.rows),), generator=self.generator)
            logits = self.decoder.step(self.cache, tokens)
            for row, token in zip(self.rows, tokens.tolist(), strict=True):
                row.append(token)
            for row, found in zip(self.rows, logits, strict=True):
                self.check(found, row)

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(torch.tensor(rows, dtype=torch.int64))
        self.rows = [self.rows[number] for number in rows]
        assert self.cache.num_rows == len(rows)

    def select(self, rows: list[int]) -> None:
        self.cache.select(torch.tensor(rows, dtype=torch.int64))
        self.rows = [list(self.rows[number]) for number in rows]
        assert self.cache.num_rows == len(rows)

    def check(self, found: Tensor, tokens: list[int]) -> None:
        assert found.dtype is torch.float32
        expected = torch.log_softmax(logits_after(self.policy, tokens), -1)
        torch.testing.assert_close(torch.log_softmax(found, -1), expected, atol=1e-5, rtol=1e-5)


def rows_come_and_go(session: Session) -> None:
    """Every kind of change of a batch, with steps between."""
    session.prefill([4, 9, 1], [2, 1, 3])
    session.step(3)
    session.keep([0, 2, 4])
    session.step()
    session.prefill([11, 2], [1, 2])
    session.step(2)
    session.keep([1, 4, 5])
    session.step()
    session.keep([])
    session.prefill([3, 3], [1, 1])
    session.step(2)
    # as the beams of two prompts: from one row to three, in another order, and one of the prompts gone
    session.select([0, 0, 0, 1, 1])
    session.step(2)
    session.select([2, 0, 2, 4])
    session.step()
    session.select([3, 3])
    session.step()


@pytest.mark.parametrize(("kind", "model_type"), EVERY)
def test_decoding_equals_the_training_forward(kind: type, model_type: str, tiny_model: Build) -> None:
    policy = make_policy(tiny_model(model_type), None, packed=model_type in packed_families())
    rows_come_and_go(Session(policy, kind(policy)))


@pytest.mark.parametrize("model_type", FAST)
def test_rows_that_are_computed_in_blocks_equal_the_training_forward(
    model_type: str, tiny_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(row_groups._WORTH, "cpu", 0)
    policy = make_policy(tiny_model(model_type), None, packed=True)
    session = Session(policy, FastDecoder(policy))
    rows_come_and_go(session)
    session.keep([])
    session.prefill([20, 11, 3, 2], [1, 1, 3, 2])
    session.step(2)
    _, blocks = session.cache.blocks
    assert [(block.rows.start, block.rows.stop) for block in blocks] == [(0, 1), (1, 2), (2, 5), (5, 7)]
    assert [block.prompt_columns for block in blocks] == [20, 11, 3, 2]
    session.prefill([2], [2])
    session.step(4)
    session.keep([1, 2, 4, 7, 8])
    session.step(2)


@pytest.mark.parametrize(("kind", "model_type"), [(FastDecoder, "qwen2"), (HfDecoder, "gpt2")])
def test_rows_that_are_not_there_or_do_not_fit_are_refused(kind: type, model_type: str, tiny_model: Build) -> None:
    policy = make_policy(tiny_model(model_type), None, packed=model_type in packed_families())
    session = Session(policy, kind(policy), max_rows=3)
    session.prefill([2, 3], [1, 1])
    for rows in ([0, 2], [-1], [0, 0, 1, 1]):
        with pytest.raises(ValueError, match=r"3 rows fit, and rows are 0 \.\. 1"):
            session.cache.select(torch.tensor(rows))
    if kind is FastDecoder:
        with pytest.raises(ValueError, match="prompts must stay in their order"):
            session.cache.select(torch.tensor([1, 0]))


@pytest.mark.parametrize("model_type", FAST)
def test_known_families_take_the_fast_path(model_type: str, tiny_model: Build) -> None:
    assert isinstance(decoder_for(make_policy(tiny_model(model_type), None, packed=True)), FastDecoder)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 3}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"num_key_value_heads": 4, "use_sliding_window": False}),
        ("mistral", {"num_key_value_heads": 1, "sliding_window": None}),
    ],
)
def test_variants_of_the_fast_families(model_type: str, changes: dict[str, Any], tiny_model: Build) -> None:
    policy = make_policy(tiny_model(model_type, **changes), None, packed=True)
    session = Session(policy, FastDecoder(policy))
    session.prefill([4, 9], [2, 1])
    session.step(4)


def test_length_dependent_rotary_frequencies_take_the_general_path(tiny_model: Build) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    policy = make_policy(tiny_model("llama", rope_parameters=rope), None, packed=True)
    assert isinstance(decoder_for(policy), HfDecoder)


def test_refresh_takes_over_changed_weights(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2"), None, packed=True)
    decoder = decoder_for(policy)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter.mul_(1.3).add_(0.01)
    decoder.refresh()
    session = Session(policy, decoder)
    session.prefill([5, 3], [1, 2])
    session.step(2)


def test_a_refresh_never_holds_two_sets_of_joined_matrices(tiny_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = FastDecoder(make_policy(tiny_model("qwen2"), None, packed=True))
    alive: list[int] = []
    made = weakref.WeakSet([layer.qkv for layer in decoder._layers])
    num_layers, fuse = len(made), fast_decoder._fuse

    def counted(module: Any) -> Any:
        layer = fuse(module)
        made.add(layer.qkv)
        alive.append(len(made))
        return layer

    monkeypatch.setattr(fast_decoder, "_fuse", counted)
    decoder.refresh()
    assert alive == [num_layers + 1] * num_layers, "of every layer, and one twice"


def test_rows_of_an_earlier_use_leave_no_trace_even_if_they_were_not_finite(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("llama"), None, packed=True)
    session = Session(policy, FastDecoder(policy))
    with torch.inference_mode():
        for layer in (*session.cache.keys, *session.cache.values):
            layer.fill_(torch.nan)
    session.prefill([6, 2], [2, 2])
    session.step(3)
    session.keep([0, 3])
    session.prefill([4], [2])
    session.step(3)


@pytest.mark.parametrize("kind", [FastDecoder, HfDecoder])
def test_a_full_cache_and_wrong_rows_are_refused(kind: type, tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2"), None, packed=True)
    session = Session(policy, kind(policy), max_rows=3, max_len=5)
    session.prefill([4], [2])
    with pytest.raises(ValueError, match="3 rows of 5 tokens, asked for 4 of 4"):
        session.prefill([4], [2])
    session.step()
    with pytest.raises(ValueError, match="asked for 2 of 6"):
        session.step()
    with pytest.raises(ValueError, match="ascend"):
        session.cache.keep(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="ascend"):
        session.cache.keep(torch.tensor([2]))
    with pytest.raises(ValueError, match="asked for 0 of 97"):
        session.decoder.new_cache(1, 97)


def test_a_model_with_recurrent_state_is_refused_with_the_reason(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2"), None, packed=True)
    policy.model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(OptionsError, match="linear_attention") as caught:
        HfDecoder(policy)
    assert caught.value.problem.code == "models.no_decode"
