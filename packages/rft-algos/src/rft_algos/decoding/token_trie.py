"""A finite set of token sequences as a prefix tree: which token may come next, for many prefixes at once.

The tree is three flat tensors (states in the order of their depth, the edges of a state side by
side and sorted by token), so that what a batch of prefixes allows is one gather. It fails closed:
a token that no sequence continues with is an error, never an unconstrained step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from rft_core.errors import OptionsError

ROOT = 0
"""State of the empty prefix."""
_MOST_SHOWN = 8
"""Tokens of a list that a message shows."""

TextOf = Callable[[Sequence[int]], str]
"""The text of token ids, as a tokenizer decodes them."""


@dataclass(frozen=True, slots=True)
class TokenTrie:
    """The tree of a set of sequences; build it with `of`.

    Example: of [[5, 1], [5, 2], [7, 1]] the root allows 5 and 7, and after 5 come 1 and 2.
    """

    offsets_S1: Tensor
    """[S + 1] int64: the edges of state s are offsets[s] .. offsets[s + 1]."""
    tokens_E: Tensor
    """[E] int64, ascending within a state."""
    children_E: Tensor
    """[E] int64: the state behind each edge."""
    num_sequences: int
    depth: int
    """Tokens of the longest sequence."""
    most_children: int
    """Of any state."""
    shortest: int
    """Tokens of the shortest sequence."""

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> TokenTrie:
        """The tree of distinct sequences, none of which begins another.

        Args:
            sequences: token ids, 0 or above, at least one each. Where one may be followed by more text, let all
                end with the same stop token.

        Returns:
            The tree, on the CPU.

        Raises:
            OptionsError: no sequence, an empty one, a negative id, two that are equal, or one that begins another.
        """
        _check(sequences)
        lengths_N = torch.tensor([len(sequence) for sequence in sequences])
        width = int(lengths_N.max())
        tokens_NW = torch.full((len(sequences), width), -1)
        # the tokens in one line fall into the places of the mask, row by row
        tokens_NW[torch.arange(width) < lengths_N[:, None]] = torch.tensor([t for s in sequences for t in s])
        # state and token as one number, so that `unique` finds all edges of a depth at once
        stride = int(tokens_NW.max()) + 1
        states_N = torch.zeros(len(sequences), dtype=torch.int64)
        keys: list[Tensor] = []
        num_states = 1
        for step, tokens_N in enumerate(tokens_NW.unbind(1)):
            going_N = lengths_N > step
            edges, inverse = _distinct(states_N[going_N] * stride + tokens_N[going_N])
            states_N = states_N.masked_scatter(going_N, num_states + inverse)
            keys.append(edges)
            num_states += edges.shape[0]
        keys_E = torch.cat(keys)  # in the order of states, because deeper ones have higher numbers
        counts_S = torch.bincount(keys_E // stride, minlength=num_states)
        _refuse_overlaps(sequences, states_N, counts_S)
        offsets_S1 = torch.cat([torch.zeros(1, dtype=torch.int64), counts_S.cumsum(0)])
        children_E = torch.arange(1, num_states)
        sizes = {"depth": width, "most_children": int(counts_S.max()), "shortest": int(lengths_N.min())}
        return cls(offsets_S1, keys_E % stride, children_E, len(sequences), **sizes)

    def as_lists(self) -> dict[str, Any]:
        """The tree as plain numbers and lists of them, for a message; `from_lists` reads it."""
        return {
            field.name: _integers(value) if isinstance(value := getattr(self, field.name), Tensor) else value
            for field in fields(self)
        }

    @classmethod
    def from_lists(cls, message: Mapping[str, Any]) -> TokenTrie:
        """The reverse of `as_lists`.

        Args:
            message: what `as_lists` gave.

        Returns:
            The tree, on the CPU.
        """
        values: dict[str, Any] = {name: torch.tensor(v) if isinstance(v, list) else v for name, v in message.items()}
        return cls(**values)

    @property
    def num_states(self) -> int:
        """S, the root included."""
        return self.offsets_S1.shape[0] - 1

    def to(self, device: torch.device | str) -> TokenTrie:
        """The same tree on a device."""
        names = ("offsets_S1", "tokens_E", "children_E")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def is_end(self, states: Tensor) -> Tensor:
        """Mask the states in which a sequence is complete, so that nothing may follow.

        Args:
            states: [...] int64 states.

        Returns:
            [...] bool.
        """
        return self.offsets_S1[states + 1] == self.offsets_S1[states]

    def allowed(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens that may come next, for every state as many places as the widest state has.

        Args:
            states: [...] int64 states.

        Returns:
            tokens [..., C] int64 ascending, the states behind them [..., C], and [..., C] bool: whether there is
            such an edge; token and state are 0 where not.
        """
        first = self.offsets_S1[states]
        places = first[..., None] + torch.arange(self.most_children, device=states.device)
        there = places < self.offsets_S1[states + 1][..., None]
        # places past the last edge of a state read edge 0 and are zeroed below
        places = torch.where(there, places, 0)
        return self.tokens_E[places] * there, self.children_E[places] * there, there

    def mask(self, states: Tensor, vocab_size: int) -> Tensor:
        """[..., V] bool over the vocabulary: the tokens that may come next.

        Args:
            states: [...] int64 states.
            vocab_size: V.

        Returns:
            The mask; all false where a sequence is complete.
        """
        tokens, _, there = self.allowed(states)
        # added and not written, because unused places stand for token 0 as well
        counts = torch.zeros((*states.shape, vocab_size), dtype=torch.int32, device=states.device)
        return counts.scatter_add_(-1, tokens, there.int()) > 0

    def advance(self, states: Tensor, tokens: Tensor, *, text: TextOf | None = None) -> Tensor:
        """The states behind one token more.

        Args:
            states: [...] int64 states.
            tokens: [...] int64.
            text: returns the text of token ids, which an error then shows beside them.

        Returns:
            [...] int64 states.

        Raises:
            OptionsError: a token that no sequence continues with.
        """
        allowed, behind, there = self.allowed(states)
        here = there & (allowed == tokens[..., None])
        if not bool(here.any(-1).all()):
            raise _unknown(states, tokens, allowed, there, here, text)
        return (behind * here).sum(-1)

    def state_of(self, prefix: Sequence[int]) -> int:
        """The state after a prefix.

        Args:
            prefix: token ids, perhaps none.

        Returns:
            Its state.

        Raises:
            OptionsError: no sequence begins like this.
        """
        state = torch.tensor([ROOT], device=self.tokens_E.device)
        for token in prefix:
            state = self.advance(state, torch.tensor([token], device=state.device))
        return int(state)


def _check(sequences: Sequence[Sequence[int]]) -> None:
    if not sequences:
        raise _refusal("no sequences", "a constraint without a sequence allows nothing", "give at least one sequence")
    for number, sequence in enumerate(sequences):
        if not len(sequence):
            raise _refusal(f"sequence {number} is empty", "it would be complete at once", f"leave {number} out")
        if min(sequence) < 0:
            what = f"sequence {number} holds token {min(sequence)}"
            raise _refusal(what, "token ids are 0 or above", "encode it with the tokenizer of the model")


def _refuse_overlaps(sequences: Sequence[Sequence[int]], states_N: Tensor, counts_S: Tensor) -> None:
    first: dict[int, int] = {}
    for number, state in enumerate(_integers(states_N)):
        if state in first:
            what = f"sequences {first[state]} and {number} are equal: {_shown(sequences[number])}"
            raise _refusal(what, "one sequence of tokens must name one thing", f"leave {number} out")
        first[state] = number
    goes_on_N = counts_S[states_N] > 0
    if bool(goes_on_N.any()):
        number = int(goes_on_N.nonzero()[0])
        what = f"sequence {number}, {_shown(sequences[number])}, begins another one"
        raise _refusal(what, "after it both stopping and going on would be right", "end all with the stop token")


def _unknown(
    states: Tensor, tokens: Tensor, allowed: Tensor, there: Tensor, here: Tensor, text: TextOf | None
) -> OptionsError:
    index = tuple(_integers((~here.any(-1)).nonzero()[0]))
    possible = _integers(allowed[index][there[index]])
    token, spelt = str(int(tokens[index])), ""
    if text is not None:
        token = f"{token} {text([int(tokens[index])])!r}"
        spelt = f", spelt {', '.join(repr(text([one])) for one in possible[:_MOST_SHOWN])}" if possible else ""
    return OptionsError(
        code="trie.unknown_prefix",
        what=f"token {token} does not continue any sequence here; what does: {_shown(possible)}{spelt}",
        where=f"state {int(states[index])} of the token tree",
        why="a constraint that meets an unknown prefix would have to let anything through",
        do="decode with the tokenizer and the sequences that the tree was made of",
    )


def _refusal(what: str, why: str, remedy: str) -> OptionsError:
    return OptionsError(code="trie.sequences", what=what, where="sequences of the token tree", why=why, do=remedy)


def _distinct(values_N: Tensor) -> tuple[Tensor, Tensor]:
    distinct = values_N.unique(return_inverse=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast(tuple[Tensor, Tensor], distinct)


def _integers(tensor_N: Tensor) -> list[int]:
    return tensor_N.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _shown(tokens: Sequence[int]) -> str:
    """The first tokens of a list that may be long."""
    return str(list(tokens[:_MOST_SHOWN])).replace("]", ", ...]" if len(tokens) > _MOST_SHOWN else "]")
