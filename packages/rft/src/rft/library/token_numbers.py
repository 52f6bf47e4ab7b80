"""Texts and numbers of the tokens of one group of answers, for pages that show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rft.library.run import Run
from rft_core.errors import RftError
from rft_trainer.rollout_files.token_records import TokenRecord

Numbers = Sequence[float] | None


@dataclass(frozen=True, slots=True)
class ShadedTokens:
    """The texts of an answer's tokens, and a number each."""

    pieces: Sequence[str]
    numbers: Sequence[float]


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """The answers of a group whose tokens have numbers, by the number of their sample."""

    answers: Mapping[int, ShadedTokens] = field(default_factory=dict[int, ShadedTokens])
    why_none: str = ""
    """Why there are none; empty where there are some."""


def _gaps(record: TokenRecord) -> Numbers:
    if record.trainer_logprobs is None:
        return None
    return [own - engine for own, engine in zip(record.trainer_logprobs, record.engine_logprobs, strict=True)]


QUANTITIES: dict[str, Callable[[TokenRecord], Numbers]] = {
    "advantage": lambda record: record.advantages,
    "entropy": lambda record: record.entropies,
    "gap": _gaps,
    "surprise": lambda record: [-logprob for logprob in record.engine_logprobs],
}
"""By name: advantage; entropy, in nats; gap, the trainer's log-prob less the engine's; surprise, minus the log-prob."""


def group_tokens(run: Run, step: int, prompt_id: str, quantity: str) -> GroupTokens:
    """Return the tokens of the answers to a prompt in a step, each with a number of `QUANTITIES`.

    Nothing is raised: a run without records or tokenizer can be shown without them.
    """
    from rft_models.tokenization.token_pieces import token_pieces

    try:
        records = [one for one in run.tokens(step) if one.prompt_id == prompt_id]
        tokenizer = run.tokenizer()
    except RftError as error:
        return GroupTokens(why_none=f"tokens are not coloured: {error.problem.what}")

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    numbers = {record.sample: QUANTITIES[quantity](record) for record in records}
    answers = {
        record.sample: ShadedTokens(token_pieces(decode, record.token_ids), found)
        for record in records
        if (found := numbers[record.sample]) is not None
    }
    why = "" if answers else f"the answers of this group have no {quantity}: they were left out of the step"
    return GroupTokens(answers, why)
