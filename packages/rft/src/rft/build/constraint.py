"""Decoding constraint of a command: the sequences of an installed task, as a tree, and where none can be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rft.build.engines import EngineChoice, choose_engine
from rft.process.machine import choose_device
from rft.settings import RlSettings
from rft_algos.advantages.enumerated import probability_weighted
from rft_algos.decoding.token_trie import TokenTrie
from rft_algos.objectives import RolloutBatch
from rft_core.errors import OptionsError
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.installed_tasks.discovery import bad_result, called, find_task
from rft_trainer.protocols import Engine
from rft_trainer.rollouts.constrained import BeamEngine, ConstrainedEngine, RenormalisedEngine
from rft_trainer.scoring.advantages import ComputeAdvantages
from rft_trainer.scoring.constrained_policy import ConstrainedPolicy

_FLAG = "--constraint"
_CODE = "task.constraint"


def within(engine: Any, trie: TokenTrie | None, *, beams: bool = False) -> Any:
    """Return the engine with its completions drawn within a tree, or searched for; the engine itself without one."""
    if trie is None:
        return engine
    return BeamEngine(engine, trie) if beams else ConstrainedEngine(engine, trie)


def rollout_engine(engine: Any, trie: TokenTrie | None, settings: RlSettings) -> Engine:
    """Return what draws or searches for the groups of training, with the log-probs that the loss compares with."""
    found = within(engine, trie, beams=settings.sampling.group_source != "samples")
    return RenormalisedEngine(found) if is_renormalised(settings) else found


def evaluation_engine(source: Any, engine: Any, trie: TokenTrie | None, settings: RlSettings) -> Any:
    """Return what answers held-out prompts: the engine of the rollouts, or a search for the best sequences."""
    return within(engine, trie, beams=True) if settings.evaluation.eval_beams else source


def is_renormalised(settings: RlSettings) -> bool:
    """Return whether probabilities of tokens are shares of what may follow."""
    return bool(settings.sampling.constraint) and settings.sampling.constraint_logprobs == "allowed"


def policy_within(policy: Any, trie: TokenTrie | None, settings: RlSettings) -> Any:
    """Return the policy with its log-probs within the tree where the settings ask for them."""
    return ConstrainedPolicy(policy, trie) if trie is not None and is_renormalised(settings) else policy


def group_advantages(settings: RlSettings) -> ComputeAdvantages | None:
    """Return the advantages of weighted beams; None where the algorithm's own are computed.

    Raises:
        OptionsError: an algorithm whose advantages they cannot take the place of.
    """
    if settings.sampling.group_source != "weighted_beams":
        return None
    return weighted_beam_advantages


def weighted_beam_advantages(batch: RolloutBatch) -> Tensor:
    """Advantage [N] of each beam by its probability within its group, from the log-probs it was searched by."""
    assert batch.behaviour_logprobs_T is not None
    zeros_N = torch.zeros_like(batch.rewards_N, dtype=torch.float64)
    logprobs_N = zeros_N.index_add(0, batch.segment_ids_T, batch.behaviour_logprobs_T.to(torch.float64))
    return probability_weighted(batch.rewards_N, batch.group_ids_N, logprobs_N)


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
    _refuse_groups(trie, settings)
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


def _refuse_groups(trie: TokenTrie, settings: Any) -> None:
    """Refuse groups of more beams than there are sequences: the places too many would stay empty."""
    if getattr(settings.sampling, "group_source", "samples") == "samples":
        return
    size = settings.batch.n_samples_per_prompt
    if size > trie.num_sequences:
        raise OptionsError(
            code="constraint.few_sequences",
            what=f"groups of {size} beams, {settings.sampling.constraint} has {trie.num_sequences} sequences",
            where="--n_samples_per_prompt, --group_source",
            why="the beams of a group are distinct sequences",
            do=f"--n_samples_per_prompt {trie.num_sequences}",
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
    environment = getattr(getattr(settings, "conversation", None), "environment", "")
    if environment:
        why = "the turns of a conversation are free texts"
        yield f"environment = {environment}", "--environment", why, "leave --environment out"
    chosen = choose_engine(settings.engine, choose_device(settings.model.device, 0))
    if not chosen.can.supports_constraint:
        why = f"{chosen.name} draws from the whole vocabulary"
        yield f"engine_type {chosen.name}", "--engine_type", why, "--engine_type native"
    yield from _beams(settings, chosen)


def _beams(settings: Any, chosen: EngineChoice) -> Iterator[tuple[str, str, str, str]]:
    """Where no beams can be searched for, as `_others`."""
    for search in _searches(settings):
        yield from _unsearchable(search, settings, chosen)


@dataclass(frozen=True, slots=True)
class _Search:
    """A setting that asks for beams."""

    asked: str
    flag: str
    without: str
    """What leaves it out."""
    num_beams: int


def _searches(settings: Any) -> Iterator[_Search]:
    group_source = getattr(settings.sampling, "group_source", "samples")
    if group_source != "samples":
        size = settings.batch.n_samples_per_prompt
        yield _Search(f"group_source = {group_source}", "--group_source", "--group_source samples", size)
    for name, group in (("num_beams", settings.sampling), ("eval_beams", getattr(settings, "evaluation", None))):
        if number := getattr(group, name, 0):
            yield _Search(f"{name} = {number}", f"--{name}", f"--{name} 0", number)


def _unsearchable(search: _Search, settings: Any, chosen: EngineChoice) -> Iterator[tuple[str, str, str, str]]:
    asked, flag = search.asked, search.flag
    if not chosen.can.supports_beam_search:
        why = f"{chosen.kind.title} has no beam search within a constraint"
        yield f"{asked} and engine_type {chosen.name}", f"{flag}, --engine_type", why, "--engine_type native"
    staleness = getattr(getattr(settings, "async_rollouts", None), "max_staleness", 0)
    if staleness:
        why = "what runs ahead of the trainer are samples"
        yield f"{asked} and max_staleness = {staleness}", f"{flag}, --max_staleness", why, "--max_staleness 0"
    replicas = getattr(getattr(settings, "replicas", None), "engine_replicas", 1)
    if replicas > 1:
        why = "a beam search is one call of one engine; replicas share samples"
        yield f"{asked} and engine_replicas = {replicas}", f"{flag}, --engine_replicas", why, "--engine_replicas 1"
    if settings.engine.engine_max_rows < search.num_beams:
        why, asked = "all beams of a prompt are decoded together", f"{asked} and engine_max_rows"
        yield f"{asked} = {settings.engine.engine_max_rows}", "--engine_max_rows", why, search.without
