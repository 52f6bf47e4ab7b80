"""A run looked over before it starts: its data are read and rendered, its reward is tried, no weights are loaded."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from rft.build.constraint import constraint_of
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
class TokenizedExample:
    """A row as the model sees it."""

    title: str
    pieces: list[str]
    """Text of each token."""
    learned: list[bool]
    """Whether the loss counts the token."""


class Checked(Protocol):
    """Data of a run, as its start would read them."""

    @property
    def data(self) -> Any:
        """Rows and numbers for the plan page of the command."""
        ...

    def check_reward(self) -> None:
        """Try what scores responses, where something does, as the start would."""
        ...

    def first_example(self) -> TokenizedExample:
        """Return the first row as the model sees it."""
        ...


@dataclass(frozen=True, slots=True)
class RlCheck:
    """Data of an RL run, as its start would read them."""

    settings: RlSettings
    tokenizer: HfTokenizer
    data: RlData

    def check_reward(self) -> None:
        """Try function and servers as the start would; no reward model's weights are loaded."""
        check_reward(self.settings)

    def first_example(self) -> TokenizedExample:
        """Return the first prompt token by token; what is learned comes after it."""
        prompt = self.data.prompts[0]
        pieces = [self.tokenizer.decode([token]) for token in prompt.token_ids]
        title = f"prompt {prompt.prompt_id} as the model sees it ({len(pieces)} tokens; label {prompt.label!r}):"
        return TokenizedExample(title, [*pieces, "<response>"], [False] * len(pieces) + [True])


@dataclass(frozen=True, slots=True)
class SftCheck:
    """Data of a supervised run, as its start would read them."""

    tokenizer: HfTokenizer
    data: SftData

    def check_reward(self) -> None:
        """Return at once: nothing scores demonstrations."""

    def first_example(self) -> TokenizedExample:
        """Return the first demonstration token by token, and which of its tokens are learned."""
        sample = self.data.samples[0]
        title = f"demonstration {sample.sample_id} as the model sees it ({sample.num_tokens} tokens):"
        learned = [bool(mask) for mask in pack([sample]).loss_mask_T]
        return TokenizedExample(title, [self.tokenizer.decode([token]) for token in sample.token_ids], learned)


def check_rl(settings: RlSettings, world_size: int) -> RlCheck:
    """Read and render the data of an RL run for `world_size` ranks.

    Raises:
        OptionsError, DataError: as the start would.
    """
    tokenizer = tokenizer_with_images(settings.model, settings.images)
    model_facts(settings.model.pretrain)
    # before the data are rendered: its tools become part of the prompts
    with ExitStack() as opened:
        enter_environment(settings.conversation, tokenizer, opened)
        data = rl_data(settings, tokenizer, world_size)
    constraint_of(settings, tokenizer)
    return RlCheck(settings, tokenizer, data)


def check_sft(settings: SftSettings, world_size: int) -> SftCheck:
    """Read and render the data of a supervised run; their number does not depend on `world_size`.

    Raises:
        OptionsError, DataError: as the start would.
    """
    tokenizer = tokenizer_with_images(settings.model, settings.images)
    return SftCheck(tokenizer, sft_data(settings, tokenizer, model_facts(settings.model.pretrain).max_positions))
