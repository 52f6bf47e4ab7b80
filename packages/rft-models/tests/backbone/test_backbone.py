"""What a decoder is handed for packed and padded rows, and which states come back, by a decoder of running means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import OptionsError, PreflightError
from rft_core.packed_tokens import PackedTokens
from rft_models.attention.packed import PackedLayout
from rft_models.backbone import backbone as module
from rft_models.backbone.backbone import Backbone, States
from rft_models.vision.packed_rows import RowInputs

LENGTHS = (4, 1, 7, 4, 2)


class Decoder(nn.Module):
    """The state of a token is the mean of (id, position) over its segment so far; a router gives them as they are."""

    def __init__(self, *, dropout: float = 0.0, attention_dropout: float | None = None, heads: int = 2) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.inner = nn.Identity()
        self.inner.attention_dropout = attention_dropout  # type: ignore[assignment]
        self.config = SimpleNamespace(model_type="qwen2", num_attention_heads=heads, num_key_value_heads=heads)
        self.calls: list[dict[str, Any]] = []
        self.attentions: list[str] = []

    def set_attn_implementation(self, name: str) -> None:
        self.attentions.append(name)

    def forward(self, input_ids: Tensor, position_ids: Tensor, packed_layout: Any = None, **options: Any) -> Any:
        self.calls.append({"input_ids": input_ids, "position_ids": position_ids, "layout": packed_layout, **options})
        return self.output(input_ids, position_ids, packed_layout, **options)

    def output(self, input_ids: Tensor, position_ids: Tensor, layout: Any, **options: Any) -> Any:
        values = torch.stack([input_ids, position_ids], -1).double()
        if layout is None:
            states = values.cumsum(1) / torch.arange(1, values.shape[1] + 1)[None, :, None]
        else:
            zeros = torch.zeros_like(values[0, :, None])
            states = layout.attend(zeros, zeros, values[0, :, None], scaling=1.0)[:, 0][None]
        given = options.get("output_router_logits", False)
        return SimpleNamespace(last_hidden_state=states, router_logits=(values, 10 * values) if given else None)


class WithoutPositions(Decoder):
    """A decoder that counts positions itself."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:  # type: ignore[override]
        self.calls.append({"input_ids": input_ids, "attention_mask": attention_mask})
        positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        return self.output(input_ids, positions, None)


def tokens_of(lengths: tuple[int, ...] = LENGTHS, mask: bool = False) -> PackedTokens:
    ids = torch.arange(sum(lengths)) * 7 % 31
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return PackedTokens(ids, positions, segments, positions > 0 if mask else None)


def running_means(tokens: PackedTokens) -> Tensor:
    values = torch.stack([tokens.token_ids_T, tokens.positions_T], -1).double()
    parts = [values[tokens.segment_ids_T == number] for number in tokens.segment_ids_T.unique().tolist()]
    return torch.cat([part.cumsum(0) / torch.arange(1, len(part) + 1)[:, None] for part in parts])


def samples_of_a_prompt() -> PackedTokens:
    """Three segments of one prompt of 6 tokens and an own one each."""
    ids = torch.tensor([token for own in (20, 21, 22) for token in (5, 6, 7, 8, 9, 10, own)])
    positions = torch.arange(7).repeat(3)
    return PackedTokens(ids, positions, torch.arange(3).repeat_interleave(7), positions == 6)


@pytest.mark.parametrize("lengths", [LENGTHS, (3, 3), (5,), (1, 9, 9, 1, 1)])
@pytest.mark.parametrize("packed", [True, False])
def test_every_token_has_the_state_of_its_segment(lengths: tuple[int, ...], packed: bool) -> None:
    tokens = tokens_of(lengths)
    backbone = Backbone(Decoder(), packed=packed)
    torch.testing.assert_close(backbone.hidden_states(tokens), running_means(tokens))
    found = backbone.states(tokens)
    torch.testing.assert_close(found.hidden_KD, running_means(tokens))
    assert found[1:] == (None, None, 0)


def test_a_packed_row_is_one_call_with_a_layout_and_no_mask() -> None:
    decoder, tokens, kernel = Decoder(), tokens_of(), SimpleNamespace(takes=lambda *_, **__: False)
    Backbone(decoder, packed=True, kernel=kernel).hidden_states(tokens)  # type: ignore[arg-type]
    [call] = decoder.calls
    assert call.keys() == {"input_ids", "position_ids", "layout", "attention_mask", "use_cache"}
    assert call["input_ids"].tolist() == [tokens.token_ids_T.tolist()]
    assert call["position_ids"].tolist() == [tokens.positions_T.tolist()]
    assert call["attention_mask"].shape == (1, 1, 1, 1)
    assert call["use_cache"] is False
    assert call["layout"].lengths == LENGTHS
    assert call["layout"].kernel is kernel


def test_padded_blocks_have_a_mask_of_their_real_tokens() -> None:
    decoder, tokens = Decoder(), tokens_of()
    Backbone(decoder, packed=False).hidden_states(tokens)
    seen = []
    for call in decoder.calls:
        mask = call["attention_mask"]
        assert call.keys() == {"input_ids", "position_ids", "layout", "attention_mask", "use_cache"}
        assert (mask.dtype, mask.shape, call["use_cache"]) == (torch.int64, call["input_ids"].shape, False)
        assert call["position_ids"].shape == mask.shape
        real = mask.sum(1).tolist()
        assert mask.tolist() == [[1] * length + [0] * (mask.shape[1] - length) for length in real]
        seen += real
    assert seen == sorted(LENGTHS, reverse=True)
    decoder.calls.clear()
    Backbone(decoder, packed=False).hidden_states(tokens_of((3, 3)))
    [call] = decoder.calls
    assert (call["attention_mask"].dtype, call["attention_mask"].tolist()) == (torch.int64, [[1, 1, 1]] * 2)


def test_a_decoder_without_positions_is_handed_none() -> None:
    backbone, tokens = Backbone(WithoutPositions(), packed=False), tokens_of()
    torch.testing.assert_close(backbone.hidden_states(tokens), running_means(tokens))
    assert [backbone.accepts(name) for name in ("input_ids", "position_ids", "cache_position")] == [True, False, False]


@pytest.mark.parametrize("packed", [True, False])
def test_logits_of_routers_come_in_the_order_of_the_states(packed: bool) -> None:
    tokens, decoder = tokens_of(), Decoder()
    routed: list[Tensor] = []
    Backbone(decoder, packed=packed).states(tokens, routed=routed)
    expected = torch.stack([tokens.token_ids_T, tokens.positions_T], -1).double()
    assert [layer.tolist() for layer in routed] == [expected.tolist(), (10 * expected).tolist()]
    assert all(call["output_router_logits"] is True for call in decoder.calls)
    shared: list[Tensor] = []
    found = Backbone(Decoder(), packed=True).states(samples_of_a_prompt(), routed=shared)
    assert [len(layer) for layer in shared] == [len(found.hidden_KD)] * 2


@pytest.mark.parametrize(
    ("packed", "training", "dropout", "attention_dropout", "masked", "shares"),
    [
        (True, False, 0.0, None, True, True),
        (True, True, 0.0, None, True, True),
        (True, False, 0.5, 0.5, True, True),
        (True, True, 0.5, None, True, False),
        (True, True, 0.0, 0.5, True, False),
        (True, True, 0.0, 0.0, True, True),
        (True, False, 0.0, None, False, False),
        (False, False, 0.0, None, True, False),
    ],
)
def test_a_shared_prompt_runs_once_unless_copies_drop_other_entries(
    packed: bool, training: bool, dropout: float, attention_dropout: float | None, masked: bool, shares: bool
) -> None:
    decoder = Decoder(dropout=dropout, attention_dropout=attention_dropout).train(training)
    tokens = samples_of_a_prompt()
    given = tokens if masked else PackedTokens(tokens.token_ids_T, tokens.positions_T, tokens.segment_ids_T)
    found = Backbone(decoder, packed=packed).states(given)
    assert (found.place_T is not None) == shares
    assert len(found.hidden_KD) == (6 + 3 if shares else 21)
    states = found.hidden_KD if found.place_T is None else found.hidden_KD[found.place_T]
    torch.testing.assert_close(states, running_means(tokens))


def test_the_kernel_is_handed_to_shared_prompts_too() -> None:
    decoder, kernel = Decoder(), SimpleNamespace(takes=lambda *_, **__: False)
    Backbone(decoder, packed=True, kernel=kernel).states(samples_of_a_prompt())  # type: ignore[arg-type]
    assert decoder.calls[0]["layout"].kernel is kernel


def test_dropout_that_was_put_in_later_is_found_when_it_is_looked_for() -> None:
    decoder = Decoder().train()
    backbone = Backbone(decoder, packed=True)
    decoder.dropout.p = 0.1
    assert backbone.states(samples_of_a_prompt()).place_T is not None
    backbone.look_for_dropout()
    assert backbone.states(samples_of_a_prompt()).place_T is None


def test_images_need_a_tower_and_are_its_to_lay_out() -> None:
    tokens = tokens_of((2, 3))
    plain = PackedTokens(tokens.token_ids_T, tokens.positions_T, tokens.segment_ids_T, mm_inputs=[None, None])
    pictured = PackedTokens(tokens.token_ids_T, tokens.positions_T, tokens.segment_ids_T, mm_inputs=[None, "an image"])
    backbone = Backbone(Decoder(), packed=True)
    torch.testing.assert_close(backbone.hidden_states(plain), running_means(tokens))
    with pytest.raises((OptionsError, PreflightError)):
        backbone.hidden_states(pictured)
    asked: list[tuple[Any, ...]] = []

    def row(*words: Any) -> RowInputs:
        asked.append(words)
        return RowInputs(*words[2:])

    tower: Any = SimpleNamespace(row=row)
    for given, lengths in ((pictured, (2, 3)), (tokens, [])):
        found = Backbone(Decoder(), packed=True, tower=tower).hidden_states(given)
        torch.testing.assert_close(found, running_means(tokens))
        assert asked.pop() == (given.mm_inputs, lengths, given.token_ids_T, given.positions_T)


class TwoRanks:
    """The second of two ranks, as far as a backbone asks."""

    size, rank = 2, 1

    def merge(self, values: Tensor) -> Tensor:
        """What the others would add is not there."""
        return values


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_runs_its_own_rows_with_their_layout(mode: Any, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    row_tokens = samples_of_a_prompt() if shared else tokens_of((4, 3), mask=True)
    num_rows = 9 if shared else 7
    ranks: Any = TwoRanks()
    own_layout = PackedLayout.from_lengths([3])

    class Shards:
        def __init__(self, *words: Any) -> None:
            made.append(words)

        def of(self, layout: Any, number: int, device: torch.device) -> Any:
            made.append((type(layout).__name__, layout.kernel, number, device))
            places = lambda place_T: ("placed", place_T)  # noqa: E731
            return SimpleNamespace(rows=slice(2, 5), layout=own_layout, places=places, here=(2, 5))

    kernel: Any = SimpleNamespace()
    decoder = Decoder()
    backbone = Backbone(decoder, packed=True, kernel=kernel)
    backbone.split_over(ranks, "here", mode)
    monkeypatch.setattr(module, "SequenceShards", Shards)
    found = backbone.states(row_tokens)
    name = "SharedLayout" if shared else "PackedLayout"
    assert made == [(ranks, mode == "ring"), (name, kernel, num_rows, torch.device("cpu"))]
    [call] = decoder.calls
    assert call["layout"] is own_layout
    assert call["input_ids"].tolist() == [row_tokens.token_ids_T[2:5].tolist()]
    assert len(found.hidden_KD) == 3
    place: Any = found.place_T
    assert place[0] == "placed"
    assert (place[1] is None) != shared
    assert (found.here, found.num_rows) == ((2, 5), num_rows)


def test_values_of_own_rows_stand_in_their_places_among_all() -> None:
    backbone = Backbone(Decoder(), packed=True)
    values, states = torch.tensor([1.0, 2.0, 3.0]), States(torch.zeros(3, 1), None, (2, 5), 7)
    assert backbone.all_rows(values, states) is values
    ranks: Any = TwoRanks()
    backbone.split_over(ranks, "here")
    assert backbone.all_rows(values, states).tolist() == [0, 0, 1, 2, 3, 0, 0]
    assert backbone.all_rows(values, States(torch.zeros(3, 1), None)) is values


def test_rows_are_shared_by_several_ranks_of_a_packed_decoder() -> None:
    assert Backbone(Decoder(), packed=True).by_ring is False
    alone: Any = SimpleNamespace(size=1)
    for packed in (True, False):
        backbone = Backbone(Decoder(), packed=packed)
        backbone.split_over(alone, "here", "ring")
        assert (backbone.split, backbone.by_ring) == (None, False)
    ranks: Any = TwoRanks()
    for heads, by_ring in ((2, False), (3, True)):
        backbone = Backbone(Decoder(heads=heads), packed=True)
        backbone.split_over(ranks, "here")
        assert (backbone.split, backbone.by_ring) == (ranks, by_ring)
    backbone = Backbone(Decoder(), packed=False)
    with pytest.raises(OptionsError) as caught:
        backbone.split_over(ranks, "here")
    assert caught.value.problem.code == "models.split_native"
    assert backbone.split is None


@pytest.mark.parametrize(("packed", "attentions"), [(True, ["eager", "rft_packed"]), (False, [])])
def test_own_states_are_those_of_the_decoders_own_attention(packed: bool, attentions: list[str]) -> None:
    class Counting(Decoder):
        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:  # type: ignore[override]
            assert use_cache is False
            assert self.attentions == attentions[:1]
            return self.output(input_ids, torch.arange(input_ids.shape[1])[None], None)

    decoder, tokens = Counting(), tokens_of((5,))
    found = Backbone(decoder, packed=packed).own_states(tokens.token_ids_T)
    torch.testing.assert_close(found, running_means(tokens))
    assert decoder.attentions == attentions
