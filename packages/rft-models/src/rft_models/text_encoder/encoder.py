"""A Hugging Face directory as an encoder of texts: its backbone's last states, pooled to one vector a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rft_core.errors import DataError
from rft_models.files.directories import checked_model_directory, read_json
from rft_models.loading.transformers_loading import load_model, native_attention
from rft_models.own_decoder.dropout import turn_off_dropout
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer

Pooling = Literal["mean", "last"]


@dataclass(frozen=True)
class TextEncoder:
    """Encoder of texts; `load_text_encoder` makes one."""

    model: Any
    tokenizer: HfTokenizer
    pooling: Pooling
    max_tokens: int
    """Tokens of a text that are read, special ones among them; what is beyond is cut off."""
    device: str = "cpu"

    @property
    def dim(self) -> int:
        """Return the numbers of a vector."""
        return int(self.model.config.get_text_config().hidden_size)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], *, batch_size: int) -> Iterator[tuple[list[int], Tensor]]:
        """Yield (places, [B, dim] float32 on the CPU) of batches of texts; a batch holds texts of similar lengths.

        Which texts share a batch changes a vector by roundings only: padding is masked.
        """
        rows = [self._tokens(text) for text in texts]
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place]))
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            yield places, self._pooled([rows[place] for place in places])

    def _tokens(self, text: str) -> list[int]:
        hf = self.tokenizer.hf_tokenizer
        ids = list(hf.encode(text, add_special_tokens=True, truncation=True, max_length=self.max_tokens))
        # a text without a token, such as an empty one for a tokenizer without special tokens
        return ids or [self.tokenizer.pad_id]

    def _pooled(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, rows))
        ids_BT = torch.full((len(rows), longest), self.tokenizer.pad_id)
        mask_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
        for row, ids in enumerate(rows):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            mask_BT[row, : len(ids)] = 1
        ids_BT, mask_BT = ids_BT.to(self.device), mask_BT.to(self.device)
        states_BTD = self.model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state.float()
        return pool(states_BTD, mask_BT, self.pooling).cpu()


def pool(states_BTD: Tensor, mask_BT: Tensor, pooling: Pooling) -> Tensor:
    """Return [B, D]: the mean over the tokens of each text, or the state of its last one; padding is on the right."""
    if pooling == "last":
        last_B = mask_BT.sum(1) - 1
        return states_BTD[torch.arange(len(last_B), device=last_B.device), last_B]
    return (states_BTD * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)


def stated_pooling(directory: str | Path) -> Pooling | None:
    """Return the pooling that a sentence encoder's directory states in `1_Pooling/config.json`; None without one.

    Raises:
        DataError: it states another one than the mean or the last token.
    """
    file = Path(directory) / "1_Pooling" / "config.json"
    if not file.is_file():
        return None
    config = read_json(file)
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    named: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
    if len(chosen) == 1 and chosen[0] in named:
        return named[chosen[0]]
    raise DataError(
        code="models.pooling",
        what=f"the encoder pools by {', '.join(chosen) or 'nothing'}",
        where=str(file),
        why="vectors are the mean of a text's states or the state of its last token",
        do="--pooling mean, or --pooling last, to pool otherwise than it was trained to",
    )


def load_text_encoder(
    directory: str | Path,
    *,
    pooling: Pooling | Literal["auto"] = "auto",
    max_tokens: int = 512,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> TextEncoder:
    """Load the backbone of a Hugging Face directory and its tokenizer; local files, no code from the directory.

    Args:
        directory: of a model with `config.json`, safetensors and a tokenizer.
        pooling: "auto" = what the directory states (`1_Pooling`), else the last token for a decoder and the mean for
            an encoder that sees both sides.
        max_tokens: tokens of a text that are read, at most; fewer where the model has fewer positions.

    Raises:
        DataError: no such directory, damaged files, or no vector of one state can be made with it.
    """
    path, config = checked_model_directory(directory)
    model = load_model(path, dtype, native_attention(config), auto_class="AutoModel").to(device)
    turn_off_dropout(model)
    model.eval()
    model.requires_grad_(False)
    if pooling == "auto":
        is_decoder = any("CausalLM" in name for name in config.get("architectures") or [])
        pooling = stated_pooling(path) or ("last" if is_decoder else "mean")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokens = min(max_tokens, positions) if isinstance(positions, int) and positions > 0 else max_tokens
    return TextEncoder(model, load_tokenizer(path), pooling, tokens, device)
