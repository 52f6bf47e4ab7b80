"""Generation by transformers' `generate` with RFT's own sampling, for comparison and for models without a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rft_models.attention.hf_interface import native_attention_mode
from rft_models.layers.eval_mode import eval_mode
from rft_models.vision.decode_inputs import generation_inputs

if TYPE_CHECKING:
    from rft_models.policy.causal_policy import CausalPolicy


class HfGenerator:
    """Left-padded rows through the model's own attention and cache; shares the policy's weights."""

    def __init__(self, policy: CausalPolicy) -> None:
        config = policy.model.config.get_text_config(decoder=True)
        self._policy = policy
        self.vocab_size = policy.head.weight.shape[0]
        self.max_positions = int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", 0))

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        pick: Callable[[Tensor, int], Tensor],
        ended: Callable[[], Tensor],
        media: Sequence[Any] | None = None,
    ) -> None:
        """Continue every row until it has ended or has `max_new_tokens`.

        Args:
            prompts: token ids, at least one each.
            max_new_tokens: tokens of the longest continuation.
            pick: ([B, V] float32 logits, tokens so far) -> [B] int64 the next tokens; also for rows that ended.
            ended: [B] bool after each token: the row needs no more.
            media: the images of each row, None where it has none.
        """
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        longest = max(map(len, prompts))
        ids_BL = torch.zeros((len(prompts), longest), dtype=torch.int64)
        real_BL = torch.zeros_like(ids_BL)
        for row, prompt in enumerate(prompts):
            ids_BL[row, longest - len(prompt) :] = torch.tensor(prompt)
            real_BL[row, longest - len(prompt) :] = 1
        model, device = self._policy.model, self._policy.device
        images = generation_inputs(self._policy.tower, media, real_BL.sum(1).tolist(), longest)
        # every field that changes what is generated is set: what is left open would come from the model's own file
        settings = GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_new_tokens,
            max_length=None,
            min_length=0,
            repetition_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
            bos_token_id=None,
            use_cache=True,
        )
        own = model.generation_config
        # of the model too: `generate` fills what its argument leaves open from there
        model.generation_config = settings
        try:
            with eval_mode(model), native_attention_mode(model, packed=self._policy.packed):
                model.generate(
                    input_ids=ids_BL.to(device),
                    attention_mask=real_BL.to(device),
                    **images,
                    generation_config=settings,
                    logits_processor=LogitsProcessorList([_Picked(pick, longest)]),
                    stopping_criteria=StoppingCriteriaList([_Ended(ended)]),
                )
        finally:
            model.generation_config = own


class _Picked:
    """Logits processor that leaves one token a row for the greedy choice."""

    def __init__(self, pick: Callable[[Tensor, int], Tensor], num_prompt: int) -> None:
        self._pick, self._num_prompt = pick, num_prompt

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        tokens_B = self._pick(scores.float(), input_ids.shape[1] - self._num_prompt)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_B[:, None], 0.0)


class _Ended:
    """Stopping criterion that takes the rows that are done from a function, in place of stop tokens."""

    def __init__(self, ended: Callable[[], Tensor]) -> None:
        self._ended = ended

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Tensor:
        return self._ended()
