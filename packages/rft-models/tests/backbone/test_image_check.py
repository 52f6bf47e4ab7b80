"""The segments with images that forwards are tried on: states and logits of packed rows against the model's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import PreflightError
from rft_core.packed_tokens import PackedTokens
from rft_models.backbone.image_check import check_image_states, media_probe
from rft_models.backbone.logits_check import check_logits

CPU = torch.device("cpu")
VOCAB = 61


class Tower:
    """A tower whose image number n has n + 2 placeholders of token 7."""

    image_token_id = 7

    def probe(self, seed: int) -> Any:
        """The image of a seed."""
        return SimpleNamespace(num_tokens=seed + 2, seed=seed)

    def own_inputs(self, tokens_L: Tensor, media: Any) -> dict[str, Any]:
        """What the model's own forward takes for an image."""
        return {"pixels": media.seed + len(tokens_L)}


class Model(nn.Module):
    """The output of a token is its id, and with an image that image's number of pixels more."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="qwen2")
        self.table = nn.Embedding(VOCAB, 3)
        self.attentions: list[str] = []
        self.seen: list[tuple[list[int], int]] = []

    def get_input_embeddings(self) -> nn.Embedding:
        """A table of that many rows."""
        return self.table

    def set_attn_implementation(self, name: str) -> None:
        """Note the name."""
        self.attentions.append(name)

    def forward(self, input_ids: Tensor, use_cache: bool, pixels: int = 0) -> Any:
        assert not self.training
        assert not torch.is_grad_enabled()
        assert use_cache is False
        assert self.attentions[-1:] != ["rft_packed"]
        self.seen.append((input_ids[0].tolist(), pixels))
        states = (input_ids + pixels).bfloat16()[..., None].expand(-1, -1, 4)
        return SimpleNamespace(logits=states, last_hidden_state=states)


PICTURED = [[2, 7, 7, 0, 5, 3], [2, 7, 7, 7, 0, 5]]
PIXELS = [0 + 6, 1 + 6]


def packed(tokens: PackedTokens) -> Tensor:
    """The same of a packed row."""
    assert tokens.mm_inputs is not None
    sizes = torch.unique_consecutive(tokens.segment_ids_T, return_counts=True)[1].tolist()
    pixels = [0 if media is None else media.seed + size for media, size in zip(tokens.mm_inputs, sizes, strict=True)]
    return (tokens.token_ids_T + torch.tensor(pixels)[tokens.segment_ids_T]).float()[:, None].expand(-1, 4)


def test_segments_hold_their_image_behind_the_first_text_and_no_other_placeholder() -> None:
    tower: Any = Tower()
    probe = media_probe(tower, VOCAB, CPU)
    assert [tokens.tolist() for tokens in probe.segments] == PICTURED
    assert probe.tokens.token_ids_T.tolist() == PICTURED[0] + PICTURED[1]
    assert [media.seed for media in probe.mm_inputs] == [0, 1]
    bare: Any = Tower()
    bare.image_token_id = 0
    assert media_probe(bare, VOCAB, CPU).segments[0].tolist() == [2, 0, 0, 7, 12, 17]


@pytest.mark.parametrize("is_packed", [True, False])
def test_states_with_images_are_those_of_the_models_own_forward(is_packed: bool) -> None:
    model, tower = Model().train(), Tower()
    switched = ["eager", "rft_packed"] if is_packed else []

    def run(error: float) -> None:
        model.attentions, model.seen = [], []
        backbone: Any = SimpleNamespace(packed=is_packed, hidden_states=lambda tokens: packed(tokens) + error)
        known: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "where": "here"}
        model.set_attn_implementation = lambda name: model.attentions.append("" if name == "rft_packed" else name)  # type: ignore[method-assign]
        check_image_states(model, backbone, tower, **known)  # type: ignore[arg-type]

    run(0.0)
    assert model.seen == list(zip(PICTURED, PIXELS, strict=True))
    assert len(model.attentions) == 2 * len(switched)
    assert model.training
    with pytest.raises(PreflightError) as caught:
        run(1.0)
    assert caught.value.problem.code == "models.forward_differs"


@pytest.mark.parametrize("has_tower", [True, False])
def test_logits_of_text_and_of_images_are_those_of_the_models_own_forward(has_tower: bool) -> None:
    model = Model().train()
    tower: Any = Tower() if has_tower else None
    text = [[3, 10, 17], [4, 11, 18, 25, 32]]
    asked: list[int] = []

    def run(text_error: float, image_error: float) -> None:
        model.attentions, model.seen = [], []

        def logits(tokens: PackedTokens) -> Tensor:
            assert not model.training
            assert not torch.is_grad_enabled()
            asked.append(tokens.num_tokens)
            return packed(tokens) + (text_error if tokens.num_tokens == 8 else image_error)

        known: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "where": "here"}
        model.set_attn_implementation = lambda name: model.attentions.append("" if name == "rft_packed" else name)  # type: ignore[method-assign]
        check_logits(model, tower, logits, VOCAB, packed=True, **known)

    run(0.0, 0.0)
    plain = [(tokens, 0) for tokens in text]
    assert model.seen == plain + (list(zip(PICTURED, PIXELS, strict=True)) if has_tower else [])
    assert asked == ([8, 12] if has_tower else [8])
    assert model.attentions == ["eager", ""] * len(asked)
    assert model.training
    for errors in ((1.0, 0.0), (0.0, 1.0)):
        if errors[0] or has_tower:
            with pytest.raises(PreflightError) as caught:
                run(*errors)
            assert caught.value.problem.code == "models.forward_differs"
