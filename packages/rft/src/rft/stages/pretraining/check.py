"""A pre-training run looked over before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from rft.check import TokenizedExample, TriedReward
from rft.settings import PretrainSettings
from rft.stages.pretraining.stage import PretrainData, pretrain_data
from rft_models.loading.context_length import model_facts
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer
from rft_trainer.batches.packing import pack

_SHOWN = 64
"""Tokens of the first window that are shown."""


@dataclass(frozen=True, slots=True)
class PretrainCheck:
    """Texts of a run, as its start would read them."""

    tokenizer: HfTokenizer
    data: PretrainData

    def check_reward(self) -> list[TriedReward]:
        """Return nothing: nothing scores texts."""
        return []

    def first_example(self) -> TokenizedExample:
        """Return the beginning of the first window token by token, and which of its tokens are learned."""
        sample = self.data.rows.training[0][0]
        shown = sample.token_ids[:_SHOWN]
        rest = f", the first {len(shown)} of {sample.num_tokens} tokens" if len(shown) < sample.num_tokens else ""
        title = f"{sample.sample_id} as the model sees it{rest}:"
        learned = [bool(mask) for mask in pack([sample]).loss_mask_T][: len(shown)]
        return TokenizedExample(title, [self.tokenizer.decode([token]) for token in shown], learned)


def check_pretrain(settings: PretrainSettings, world_size: int) -> PretrainCheck:
    """Read and count the texts of a run; their number does not depend on `world_size`.

    Raises:
        OptionsError, DataError: as the start would.
    """
    tokenizer = load_tokenizer(settings.model.pretrain)
    return PretrainCheck(
        tokenizer, pretrain_data(settings, tokenizer, model_facts(settings.model.pretrain).max_positions)
    )
