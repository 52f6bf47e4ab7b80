"""A run looked over before it starts: its data are read and rendered, its reward is tried, no weights are loaded."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from rft.build.constraint import constraint_of
from rft.build.environment import enter_environment
from rft.build.images import tokenizer_with_images
from rft.build.rewards import check_reward
from rft.build.rl_data import RlData, rl_data
from rft.pretraining.stage import PretrainData, pretrain_data
from rft.settings import DpoSettings, PretrainSettings, RlSettings, RmSettings, SftSettings
from rft.stages.preference_data import PreferenceData, preference_data
from rft.stages.rm import RmInputs, rm_inputs
from rft.stages.sft import SftData, sft_data
from rft_core.errors import ServiceError
from rft_models.files.directories import existing_directory
from rft_models.loading.context_length import model_facts
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer
from rft_trainer.batches.packing import pack
from rft_trainer.records.scores import Score
from rft_trainer.rewards.user_function import RewardTrial

_WIDTH = 100
_SHOWN = 64
"""Tokens of the first window of a text that are shown."""


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """A row as the model sees it."""

    title: str
    pieces: list[str]
    """Text of each token."""
    learned: list[bool]
    """Whether the loss counts the token."""


@dataclass(frozen=True, slots=True)
class TriedReward:
    """A reward function or a rule that was called on one row."""

    trial: RewardTrial

    def lines(self) -> list[str]:
        """Return what it was given, returned and printed, for people."""
        trial = self.trial
        width = max(map(len, trial.arguments), default=0)
        lines = [f"reward called on one row: {trial.written}" + (f"  ({trial.place})" if trial.place else "")]
        lines += [f"  {name:<{width}} = {_shown(value)}" for name, value in trial.arguments.items()]
        pairs = zip(trial.responses, trial.scores, strict=True)
        lines += [f"  {_shown(response)} -> {_score_text(score)}" for response, score in pairs]
        lines += [trial.traceback] if trial.traceback else []
        lines += [f"look at this: {note}" for note in trial.notes]
        return [*lines, "printed, which in a run is in logs/reward-0.log:", trial.printed] if trial.printed else lines

    def require_score(self) -> None:
        """Refuse a function of the user that gave no score for any response; a rule may lack this row's label.

        Raises:
            ServiceError: it gave none.
        """
        trial = self.trial
        if not trial.place or any(score.value is not None for score in trial.scores):
            return
        raise ServiceError(
            code="reward.trial",
            what=f"the reward {trial.written} gave no score: {trial.scores[-1].detail}",
            where=trial.place,
            why="it was called as in a run, with the first row; a run in which so many responses have no score ends",
            state="nothing was started",
            do=f"correct {trial.place}, then the same command",
        )


def _score_text(score: Score) -> str:
    if score.value is None:
        return f"no score ({score.failure or score.status}): {score.detail}"
    return f"{score.value:g}" + (f"  {dict(score.breakdown)}" if score.breakdown else "")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."


class Checked(Protocol):
    """Data of a run, as its start would read them."""

    @property
    def data(self) -> Any:
        """Rows and numbers for the plan page of the command."""
        ...

    def check_reward(self) -> list[TriedReward]:
        """Try what scores responses, where something does, as the start would; return a call of each function."""
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

    def check_reward(self) -> list[TriedReward]:
        """Try function and servers as the start would; no reward model's weights are loaded."""
        if self.settings.judge.judge_pretrain:
            existing_directory(self.settings.judge.judge_pretrain)
        return [TriedReward(trial) for trial in check_reward(self.settings, self.data.all_prompts())]

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

    def check_reward(self) -> list[TriedReward]:
        """Return nothing at once: nothing scores demonstrations."""
        return []

    def first_example(self) -> TokenizedExample:
        """Return the first demonstration token by token, and which of its tokens are learned."""
        sample = self.data.samples[0]
        title = f"demonstration {sample.sample_id} as the model sees it ({sample.num_tokens} tokens):"
        learned = [bool(mask) for mask in pack([sample]).loss_mask_T]
        return TokenizedExample(title, [self.tokenizer.decode([token]) for token in sample.token_ids], learned)


@dataclass(frozen=True, slots=True)
class RmCheck:
    """Pairs, or labelled steps, of a reward model's run, as its start would read them."""

    data: RmInputs

    def check_reward(self) -> list[TriedReward]:
        """Return nothing: the rows are labelled already."""
        return []

    def first_example(self) -> TokenizedExample:
        """Return the better text of the first pair token by token, or the first row of steps.

        The score is read at the last token; of steps at the tokens in the loss.
        """
        sample = self.data.pairs.units[0][0]
        read = "the score is read at the end" if self.data.spec.steps is None else "scores are read where steps end"
        title = f"{sample.sample_id} as the model sees it ({sample.num_tokens} tokens; {read}):"
        pieces = [self.data.tokenizer.decode([token]) for token in sample.token_ids]
        return TokenizedExample(title, pieces, [bool(mask) for mask in pack([sample]).loss_mask_T])


@dataclass(frozen=True, slots=True)
class DpoCheck:
    """Data of a run on preferences, as its start would read them."""

    tokenizer: HfTokenizer
    data: PreferenceData

    def check_reward(self) -> list[TriedReward]:
        """Return nothing: nothing scores preferences."""
        return []

    def first_example(self) -> TokenizedExample:
        """Return the first chosen, or labelled, response token by token, and which of its tokens are learned."""
        sample = self.data.training.samples[0]
        title = f"{sample.sample_id} as the model sees it ({sample.num_tokens} tokens):"
        learned = [bool(mask) for mask in pack([sample]).loss_mask_T]
        return TokenizedExample(title, [self.tokenizer.decode([token]) for token in sample.token_ids], learned)


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


def check_dpo(settings: DpoSettings, world_size: int) -> DpoCheck:
    """Read and render the rows of a run on preferences; their number does not depend on `world_size`.

    Raises:
        OptionsError, DataError: as the start would.
    """
    tokenizer = tokenizer_with_images(settings.model, settings.images)
    return DpoCheck(tokenizer, preference_data(settings, tokenizer, model_facts(settings.model.pretrain).max_positions))


def check_rm(settings: RmSettings, world_size: int) -> RmCheck:
    """Read and encode the rows of a reward model's run; their number does not depend on `world_size`.

    Raises:
        OptionsError, DataError: as the start would.
    """
    return RmCheck(rm_inputs(settings))


def check_pretrain(settings: PretrainSettings, world_size: int) -> PretrainCheck:
    """Read and count the texts of a run; their number does not depend on `world_size`.

    Raises:
        OptionsError, DataError: as the start would.
    """
    tokenizer = load_tokenizer(settings.model.pretrain)
    return PretrainCheck(
        tokenizer, pretrain_data(settings, tokenizer, model_facts(settings.model.pretrain).max_positions)
    )
