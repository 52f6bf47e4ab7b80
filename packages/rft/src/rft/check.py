"""A run looked over before it starts: its data are read and rendered, its reward is tried, no weights are loaded."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from rft.build.environment import enter_environment
from rft.build.images import tokenizer_with_images
from rft.build.rewards import check_reward
from rft.build.rl_data import RlData, rl_data
from rft.settings import RlSettings, SftSettings
from rft.sft import SftData, sft_data
from rft_models.loading.context_length import model_facts
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.batches.packing import pack


@dataclass(frozen=True, slots=True)
class RlCheck:
    """Data of an RL run, as its start would read them."""

    settings: RlSettings
    tokenizer: HfTokenizer
    data: RlData

    @classmethod
    def of(cls, settings: RlSettings, world_size: int) -> RlCheck:
        """Read and render the data for `world_size` ranks.

        Raises:
            OptionsError, DataError: as the start would.
        """
        tokenizer = tokenizer_with_images(settings.model, settings.images)
        model_facts(settings.model.pretrain)
        # before the data are rendered: its tools become part of the prompts
        with ExitStack() as opened:
            enter_environment(settings.conversation, tokenizer, opened)
            data = rl_data(settings, tokenizer, world_size)
        return cls(settings, tokenizer, data)

    def check_reward(self) -> None:
        """Try function and servers as the start would; no reward model's weights are loaded."""
        check_reward(self.settings)

    def first_prompt(self) -> list[str]:
        """Return the first prompt as the model sees it, token by token."""
        return [self.tokenizer.decode([token]) for token in self.data.prompts[0].token_ids]


@dataclass(frozen=True, slots=True)
class SftCheck:
    """Data of a supervised run, as its start would read them."""

    tokenizer: HfTokenizer
    data: SftData

    @classmethod
    def of(cls, settings: SftSettings) -> SftCheck:
        """Read and render the data.

        Raises:
            OptionsError, DataError: as the start would.
        """
        tokenizer = tokenizer_with_images(settings.model, settings.images)
        return cls(tokenizer, sft_data(settings, tokenizer, model_facts(settings.model.pretrain).max_positions))

    def first_sample(self) -> tuple[list[str], list[bool]]:
        """Return the first demonstration token by token, and which of its tokens are learned."""
        sample = self.data.samples[0]
        learned = [bool(mask) for mask in pack([sample]).loss_mask_T]
        return [self.tokenizer.decode([token]) for token in sample.token_ids], learned
