"""Registry of the equation of each component and of the words that name it in a command.

A component of another file joins with `register_equation`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rft_algos.algorithms import components, corrections
from rft_algos.algorithms.components import Advantage, Correction, Surrogate
from rft_algos.input_checks import refuse

Named = TypeVar("Named", Surrogate, Correction)
Equation = TypeVar("Equation", bound=Callable[..., Any])

_EQUATIONS: dict[type, Callable[..., Any]] = {}
_CLIP_INDICATORS: dict[type, Callable[..., Any]] = {}


def register_equation(choice: type[Advantage | Surrogate | Correction]) -> Callable[[Equation], Equation]:
    """Decorator: the function is the equation of this choice.

    For a subclass of `Advantage`: (choice, batch: RolloutBatch) -> advantages of the sequences, [N] float64.
    For a subclass of `Surrogate`: (choice, tokens: Tokens) -> [T] loss per token, unreduced.
    For a subclass of `Correction`: (choice, log_rho_T, loss_mask_T, segment_ids_T) -> [T] weights.

    Args:
        choice: the type of the choice (no tensors here; [T] is the number of tokens, [N] of sequences).

    Returns:
        The decorator, which gives the function back as it is.
    """

    def join(function: Equation) -> Equation:
        _EQUATIONS[choice] = function
        return function

    return join


def register_clip_mask(choice: type[Surrogate]) -> Callable[[Equation], Equation]:
    """Decorator: the function says at which tokens this surrogate's clip took the gradient away.

    Args:
        choice: the type of the surrogate; the function is (choice, tokens: Tokens) -> [T] bool.

    Returns:
        The decorator, which gives the function back as it is.
    """

    def join(function: Equation) -> Equation:
        _CLIP_INDICATORS[choice] = function
        return function

    return join


def equation_of(choice: Advantage | Surrogate | Correction) -> Callable[..., Any]:
    """The equation of a choice, its own or that of the nearest parent that has one.

    Args:
        choice: the choice (no tensors).

    Returns:
        The function that `register_equation` joined to it.
    """
    for kind in type(choice).__mro__:
        if kind in _EQUATIONS:
            return _EQUATIONS[kind]
    refuse(f"{type(choice).__name__} has no equation: decorate one with @register_equation")


def clip_indicator_of(choice: Surrogate) -> Callable[..., Any] | None:
    """Return the clip mask of a surrogate, or None for one without a clip.

    Args:
        choice: the surrogate (no tensors).

    Returns:
        The function that `register_clip_mask` joined to it.
    """
    # not a parent's: a subclass with an equation of its own may clip other tokens
    return _CLIP_INDICATORS.get(type(choice))


def components_by_flag(kind: type[Named]) -> dict[str, type[Named]]:
    """The components of a kind by the words that name them in a command, in the order of their definitions.

    Args:
        kind: `Surrogate` (words of `--policy_loss`) or `Correction` (words of `--off_policy_correction`); no tensors.

    Returns:
        Those of `rft_algos.algorithms.corrections` and `components`, then others that have an equation.
    """
    # components of other files are known by their equations alone
    known = [*vars(corrections).values(), *vars(components).values(), *_EQUATIONS]
    named = [one for one in known if isinstance(one, type) and issubclass(one, kind)]
    # `vars` finds no inherited words, which name the parent
    return {word: component for component in named for word in vars(component).get("flags", {})}


def component_of(kind: type[Named], word: str) -> Named:
    """The component that a word of a command names, with the parameters that the word sets.

    Args:
        kind: `Surrogate` or `Correction` (no tensors).
        word: one of `components_by_flag(kind)`.

    Returns:
        The component; its other parameters are the published ones.
    """
    component = components_by_flag(kind)[word]
    return component(**component.flags[word])
