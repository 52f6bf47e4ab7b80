"""Losses of the library for a loop of one's own: those that the built-in loops minimise."""

from __future__ import annotations

from dataclasses import asdict

from rft.build.algorithm import algorithm_type
from rft_algos.algorithms.published import PolicyAlgorithm, Sft
from rft_core.errors import OptionsError
from rft_trainer.loops.sft import TokenLikelihood
from rft_trainer.update.policy_objective import PolicyObjective


def objective(algorithm: str | PolicyAlgorithm) -> PolicyObjective | TokenLikelihood:
    """Return the loss of an algorithm, to be given to `trainer.forward_backward`.

    Args:
        algorithm: a name of `--advantage_estimator` with its published numbers, such as "grpo" or "dapo"; "sft" for
            the likelihood of demonstrations; or a record with numbers of its own, such as
            `rft_algos.algorithms.published.Grpo(kl_place="none")`.

    Raises:
        OptionsError: no algorithm of that name.
    """
    if algorithm == Sft.name:
        return TokenLikelihood()
    return PolicyObjective(_published(algorithm) if isinstance(algorithm, str) else algorithm)


def _published(name: str) -> PolicyAlgorithm:
    try:
        return algorithm_type(name)()
    except OptionsError as error:
        # its remedy is a flag, which a program has no place for
        flag, _, nearest = error.problem.do.partition(" ")
        # where nothing is near, words that describe a name
        meant = f"rft.objective {nearest}" if " " in nearest else f'rft.objective("{nearest}")'
        do = meant if flag == "--advantage_estimator" else error.problem.do
        raise OptionsError(**{**asdict(error.problem), "where": "rft.objective", "do": do}) from None
