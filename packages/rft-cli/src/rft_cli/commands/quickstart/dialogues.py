"""The quickstarts of conversations: dialogues as files, and a small model whose tokenizer covers them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pages need no torch
    from rft_trainer.tasks.calculator_dialogues import Dialogues, Row

_VOCABULARY = 320
"""256 bytes, two special tokens, and the words of the dialogues."""

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""One line a message; the assistant's ends with the end token alone, as a sampled turn does."""


def prepare_calculator(path: Path, seed: int) -> str:
    """Questions, demonstrations that mostly guess, and an untrained model."""
    from rft_trainer.tasks.calculator_dialogues import SHARE_CALLS, SHARE_MALFORMED, calculator

    made = _prepare(path, seed, calculator)
    return (
        f"{len(made.train):,} products of two-digit numbers to train on, {len(made.held_out)} held out; of the "
        f"demonstrated dialogues {SHARE_CALLS:.0%} call the calculator, {SHARE_MALFORMED:.0%} garble the call, the "
        f"others guess; a decoder was built in {path}\n"
    )


def prepare_guess_number(path: Path, seed: int) -> str:
    """Numbers to be guessed, demonstrations of which most heed no answer, and an untrained model."""
    from rft_trainer.tasks.guess_number_dialogues import (
        GAME,
        SHARE_HEEDFUL,
        blind_chance,
        guess_number,
        heedful_chance,
    )

    made = _prepare(path, seed, guess_number)
    any_of_them, allowed = float(blind_chance()), float(heedful_chance())
    return (
        f"{len(made.train):,} numbers to be guessed in {GAME.turns} turns, from ranges of {GAME.width}, and "
        f"{len(made.held_out)} from other ranges held out; different guesses in any order win {any_of_them:.1%} of the "
        f"games, any guesses that the answers allow {allowed:.1%}; of the demonstrated dialogues "
        f"{SHARE_HEEDFUL:.0%} heed the answers; a decoder was built in {path}\n"
    )


def _prepare(path: Path, seed: int, make: Callable[[int], Dialogues]) -> Dialogues:
    from rft_models.tiny_models.text import build_bpe_tokenizer, build_decoder

    made = make(seed)
    for name, rows in (("train", made.train), ("heldout", made.held_out), ("dialogues", made.demonstrations)):
        file = path / "data" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_bpe_tokenizer(_texts(made.demonstrations[:2_000]), _VOCABULARY)
    tokenizer.chat_template = _TEMPLATE
    build_decoder(
        path / "untrained",
        tokenizer,
        hidden=128,
        layers=2,
        heads=4,
        kv_heads=4,
        ffn=384,
        max_positions=256,
        seed=seed,
    )
    return made


def _texts(rows: Sequence[Row]) -> list[str]:
    """Return the dialogues as the chat template writes them, so that the words of the template become tokens too."""
    return [
        "".join(f"{message['role']}: {message['content']}\n" for message in row["input"])
        + f"assistant: {row['output']}"
        for row in rows
    ]
