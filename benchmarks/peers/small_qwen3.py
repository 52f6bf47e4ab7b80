"""A Qwen3 decoder in plain torch and the loop of nanoGPT around it: what a careful person writes by hand.

Fused attention with `is_causal`, torch's own RMSNorm, gate and up in one matrix, one cross-entropy over all logits,
fused AdamW, clipping, gradients set to None. It takes the weights of a Hugging Face directory of the family `qwen3`
with tied embeddings, so that a run can be compared with others step by step. The code is this project's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention with norms of queries and keys, and a gated feed-forward part, each behind a norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Make room for the weights."""
        super().__init__()
        width, self.head = config["hidden_size"], config["head_dim"]
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.inner, self.eps = config["intermediate_size"], config["rms_norm_eps"]
        self.first, self.second = nn.RMSNorm(width, self.eps), nn.RMSNorm(width, self.eps)
        self.query_norm, self.key_norm = nn.RMSNorm(self.head, self.eps), nn.RMSNorm(self.head, self.eps)
        self.joined = nn.Linear(width, (self.heads + 2 * self.groups) * self.head, bias=False)
        self.out = nn.Linear(self.heads * self.head, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * self.inner, bias=False), nn.Linear(self.inner, width, bias=False)

    def forward(self, hidden_BTD: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        batch, length, _ = hidden_BTD.shape
        parts = self.joined(self.first(hidden_BTD)).view(batch, length, -1, self.head).transpose(1, 2)
        query, key, value = parts.split([self.heads, self.groups, self.groups], dim=1)
        query, key = turned(self.query_norm(query), cosine, sine), turned(self.key_norm(key), cosine, sine)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden_BTD = hidden_BTD + self.out(seen.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.up(self.second(hidden_BTD)).split(self.inner, dim=-1)
        return hidden_BTD + self.down(functional.silu(gate) * up)


class SmallQwen3(nn.Module):
    """Tokens to the logits of the next ones."""

    def __init__(self, directory: Path, context: int) -> None:
        """Read the weights of a Hugging Face directory."""
        super().__init__()
        config = json.loads((directory / "config.json").read_text())
        self.tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.blocks = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        half = torch.arange(0, config["head_dim"], 2) / config["head_dim"]
        angles = torch.outer(torch.arange(context), config["rope_parameters"]["rope_theta"] ** -half).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self.load_state_dict(own_names(load_file(directory / "model.safetensors"), len(self.blocks)))

    def forward(self, ids_BT: Tensor) -> Tensor:
        """[B, T] ids -> [B, T, V] logits."""
        hidden_BTD, length = self.tokens(ids_BT), ids_BT.shape[1]
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD, self.cosine[:length], self.sine[:length])
        return functional.linear(self.norm(hidden_BTD), self.tokens.weight)


def turned(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions of [B, H, T, D] states."""
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


def own_names(saved: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Weights of a Hugging Face directory under the names of `SmallQwen3`."""
    found = {"tokens.weight": saved["model.embed_tokens.weight"], "norm.weight": saved["model.norm.weight"]}
    for layer in range(num_layers):
        old, new = f"model.layers.{layer}.", f"blocks.{layer}."
        for ours, theirs in {
            "first": ["input_layernorm"],
            "second": ["post_attention_layernorm"],
            "query_norm": ["self_attn.q_norm"],
            "key_norm": ["self_attn.k_norm"],
            "joined": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "out": ["self_attn.o_proj"],
            "up": ["mlp.gate_proj", "mlp.up_proj"],
            "down": ["mlp.down_proj"],
        }.items():
            found[f"{new}{ours}.weight"] = torch.cat([saved[f"{old}{name}.weight"] for name in theirs])
    return found


def train(
    directory: Path,
    batches: list[Tensor],
    rate: float,
    betas: tuple[float, float],
    ended: Callable[[], None],
    *,
    device: str = "cpu",
    autocast: torch.dtype | None = None,
    compiled: bool = False,
) -> list[float]:
    """One step on each [B, T + 1] batch; calls `ended` after each, and returns the losses.

    On a GPU batches wait in page-locked memory, as nanoGPT's do; `autocast` is the type of the products.
    """
    model: nn.Module = SmallQwen3(directory, batches[0].shape[1]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, weight_decay=0.0, fused=True)
    parameters = list(model.parameters())
    model = torch.compile(model) if compiled else model  # type: ignore[assignment]
    if device == "cuda":
        batches = [ids.pin_memory() for ids in batches]
    losses: list[float] = []
    for ids in batches:
        ids = ids.to(device, non_blocking=True)
        with torch.autocast(device, autocast, enabled=autocast is not None):
            loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        ended()
    return losses
