"""Errors of weights: those of another version than the policy's, those that are incomplete, and unfinished loads."""

from __future__ import annotations

from collections.abc import Sequence

from rft_core.errors import ServiceError

WRONG_VERSION = "tokens would carry the version of weights that did not sample them"
"""The rule that weights of another version break."""

_MOST_NAMED = 5


def first_names(names: Sequence[str]) -> str:
    """Join the first five names, and say how many more there are."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def parity_error(what: str, *, where: str, state: str, do: str, why: str = WRONG_VERSION) -> ServiceError:
    """Return the error that an engine does not compute with the policy's weights, however that was found."""
    return ServiceError(code="engine.logprob_parity", what=what, where=where, why=why, state=state, do=do)


def require_version(asked: int, served: int) -> None:
    """Raise `ServiceError` where a call asks for weights of another version than the library serves."""
    if asked != served:
        raise parity_error(
            f"generation with weights of version {asked} was requested",
            where=f"this engine serves version {served}",
            state="no sample was drawn",
            do=f"load_weights({asked})",
        )


def incomplete_error(names: Sequence[str], *, model: str, where: str, why: str, state: str, do: str) -> ServiceError:
    """Return the error that the tensors to load are not those of `model`; `names` says which."""
    return ServiceError(
        code="engine.weights.incomplete",
        what=f"weights to load are not those of {model}: {first_names(names)}",
        where=where,
        why=why,
        state=state,
        do=do,
    )


def unfinished_error(version: int, where: str) -> ServiceError:
    """Return the error of a copy whose last load broke off, or that none has succeeded for."""
    return ServiceError(
        code="engine.weights.unfinished",
        what=f"weights of version {version} were not loaded in full",
        where=where,
        why="its tensors may be missing, or partly old and partly new",
        state="the engine refuses to generate until a load succeeds",
        do=f"load_weights({version})" if version else "refresh()",
    )
