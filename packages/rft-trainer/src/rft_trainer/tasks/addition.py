"""Addition task of two-digit numbers, with known answers and enough problems for a small model.

The prompt is "dd+dd=" and the answer three digits with leading zeros ("07+45=" -> "052"), so all
prompts and all answers have one length. There are 10,000 ordered problems. What is held out for
evaluation is held out in both orders, since a model that has seen b+a can recall a+b.
"""

from __future__ import annotations

from dataclasses import dataclass

from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key, permutation, uniforms
from rft_trainer.data.prompts import PromptRow

NUM_OPERANDS = 100
NUM_PAIRS = NUM_OPERANDS * (NUM_OPERANDS + 1) // 2
SOURCE = "arithmetic"


@dataclass(frozen=True, slots=True, order=True)
class Addition:
    """The problem first + second, each 0 to 99."""

    first: int
    second: int

    @property
    def prompt(self) -> str:
        return f"{self.first:02d}+{self.second:02d}="

    @property
    def answer(self) -> str:
        return f"{self.first + self.second:03d}"

    @property
    def swapped(self) -> Addition:
        return Addition(self.second, self.first)

    def as_row(self) -> PromptRow:
        """Return the problem as a prompt; label and output are the answer, the index is 100 first + second."""
        index = NUM_OPERANDS * self.first + self.second
        return PromptRow(f"{SOURCE}:{index}", self.prompt, None, self.answer, self.answer, SOURCE, index)


@dataclass(frozen=True, slots=True)
class ArithmeticSplit:
    """Problems for training and for evaluation; no problem of one is in the other, in either order."""

    train: tuple[Addition, ...]
    held_out: tuple[Addition, ...]

    def held_out_rows(self) -> list[PromptRow]:
        return [problem.as_row() for problem in self.held_out]


def all_problems() -> list[Addition]:
    """Return the 10,000 ordered problems, 00+00 to 99+99."""
    return [Addition(a, b) for a in range(NUM_OPERANDS) for b in range(NUM_OPERANDS)]


def split(seed: int, num_held_out: int = 500) -> ArithmeticSplit:
    """Hold out `num_held_out` problems of distinct unordered pairs; train on all others but their twins.

    With 500 held out about 9,010 remain to train on. Depends on (seed, num_held_out) only.
    Raises `OptionsError` unless 1 <= num_held_out < 5,050.
    """
    if not 1 <= num_held_out < NUM_PAIRS:
        raise OptionsError(
            code="data.num_held_out",
            what=f"num_held_out = {num_held_out}; allowed are 1 to {NUM_PAIRS - 1}",
            where="num_held_out",
            why=f"there are {NUM_PAIRS} unordered pairs, and training needs at least one",
            do="num_held_out 500",
        )
    pairs = [Addition(a, b) for a in range(NUM_OPERANDS) for b in range(a, NUM_OPERANDS)]
    chosen = permutation(derive_key(seed, "arithmetic_held_out"), NUM_PAIRS)[:num_held_out].tolist()
    # which order of a pair is asked: always a <= b would test half of the problems
    coins = uniforms([derive_key(seed, "arithmetic_orientation")], num_held_out)[0].tolist()
    held_out = [pairs[i] if coin < 0.5 else pairs[i].swapped for i, coin in zip(chosen, coins, strict=True)]
    excluded = {problem for pair in held_out for problem in (pair, pair.swapped)}
    train = [problem for problem in all_problems() if problem not in excluded]
    return ArithmeticSplit(tuple(train), tuple(held_out))
