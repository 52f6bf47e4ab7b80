"""Decoding constraint of a command: the sequences of an installed task, as a tree, and where none can be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from rft.build.engines import choose_engine
from rft.process.machine import choose_device
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.installed_tasks.discovery import bad_result, called, find_task
from rft_trainer.protocols import RefreshableEngine
from rft_trainer.rollouts.constrained import ConstrainedEngine

_FLAG = "--constraint"
_CODE = "task.constraint"


def within(engine: Any, trie: TokenTrie | None) -> Any:
    """Return the engine with its completions drawn within a tree; the engine itself without one."""
    drawing: RefreshableEngine = engine
    return drawing if trie is None else ConstrainedEngine(drawing, trie)


def constraint_of(settings: Any, tokenizer: HfTokenizer) -> TokenTrie | None:
    """Return the tree of the sequences that `--constraint` names, for the settings of rl, eval or generate.

    Raises:
        OptionsError: no such task, sequences that make no tree or are too long, or rollouts that cannot be constrained.
        DataError: the task's function raises, or gives something else than sequences of token ids.
    """
    if not settings.sampling.constraint:
        return None
    name, _, argument = settings.sampling.constraint.partition(":")
    task = find_task(name, flag=_FLAG, part="constraint")
    _refuse_rollouts(settings)
    sequences = called(name, task.constraint, (tokenizer, argument), code=_CODE)
    wrong = next((index for index, sequence in enumerate(sequences) if not _is_tokens(sequence)), None)
    if wrong is not None:
        what = f"sequence {wrong + 1} of {task.constraint} is {str(sequences[wrong])[:80]!r}, and no list of token ids"
        raise bad_result(name, what, code=_CODE, place=task.constraint)
    trie = TokenTrie.of(sequences)
    _refuse_lengths(trie, settings.sampling.generate_max_len, name)
    return trie


def _is_tokens(sequence: Any) -> bool:
    if not isinstance(sequence, Sequence) or not sequence:
        return False
    return all(isinstance(token, int) for token in cast("Sequence[object]", sequence))


def _refuse_lengths(trie: TokenTrie, longest: int, name: str) -> None:
    if trie.depth > longest:
        raise OptionsError(
            code="constraint.too_long",
            what=f"the longest sequence of {name} has {trie.depth} tokens, generate_max_len = {longest}",
            where=f"{_FLAG}, --generate_max_len",
            why="a response is a whole sequence of the constraint",
            do=f"--generate_max_len {trie.depth}",
        )


def _refuse_rollouts(settings: Any) -> None:
    """Refuse rollouts that are drawn otherwise than by one call of an engine that takes a tree."""
    for asked, flag, why, do in _others(settings):
        raise OptionsError(
            code="constraint.unsupported",
            what=f"constraint = {settings.sampling.constraint} with {asked}",
            where=f"{_FLAG}, {flag}",
            why=why,
            do=do,
        )


def _others(settings: Any) -> Iterator[tuple[str, str, str, str]]:
    """(what it does not go with, its flag, why, remedy), the first that applies first."""
    # groups that a command lacks have nothing to refuse
    staleness = getattr(getattr(settings, "async_rollouts", None), "max_staleness", 0)
    if staleness:
        why = "a sample that runs ahead may go on under newer weights, and its place in the tree is not kept"
        yield f"max_staleness = {staleness}", "--max_staleness", why, "--max_staleness 0"
    environment = getattr(getattr(settings, "conversation", None), "environment", "")
    if environment:
        why = "the turns of a conversation are free texts"
        yield f"environment = {environment}", "--environment", why, "leave --environment out"
    chosen = choose_engine(settings.engine, choose_device(settings.model.device, 0))
    if not chosen.can.supports_constraint:
        why = f"{chosen.name} draws from the whole vocabulary"
        yield f"engine_type {chosen.name}", "--engine_type", why, "--engine_type native"
