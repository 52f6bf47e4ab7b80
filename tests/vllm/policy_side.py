"""The trainer's side of these tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

MAX_LEN = 192


class Policy:
    """The trainer's side: a transformers model, its tensors by checkpoint name, and its log-probs."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32).eval()

    def tensors(self):
        return self.model.named_parameters()

    def change(self, seed: int, size: float = 0.1) -> None:
        """Every parameter moves."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in self.model.named_parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)

    def logits(self, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        """[N, V]: those that each token of the completion was drawn from."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *completion]])).logits[0].float()
        return logits[len(prompt) - 1 : -1]

    def logprobs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        rows: list[list[float]] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            table = (self.logits(prompt, completion) / temperature).log_softmax(-1)
            rows.append(table.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist())
        return rows
