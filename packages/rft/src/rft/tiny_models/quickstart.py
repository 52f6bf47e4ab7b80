"""Tasks of the quickstart: their data files, and an untrained model for each.

The same seed writes the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_models.tiny_models.text import (
    build_bpe_tokenizer,
    build_character_model,
    build_character_tokenizer,
    build_decoder,
)
from rft_models.tiny_models.vision import VisionSizes, build_vision_model
from rft_models.vision.image_files import require_image_packages
from rft_trainer.tasks import addition, calculator_dialogues, drawn_images, guess_number_dialogues
from rft_trainer.tasks.calculator_dialogues import Dialogues, Row

ALPHABET = "0123456789+="
"""Characters of the additions."""
NUM_HELD_OUT = 500
NUM_DRAWN, NUM_DRAWN_HELD_OUT = 4_000, 400
_DIALOGUE_VOCABULARY = 320
"""256 bytes, two special tokens, and the words of the dialogues."""

DIALOGUE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Chat template of one line a message; the assistant's ends with the end token alone, as a sampled turn does."""


@dataclass(frozen=True, slots=True)
class TaskData:
    """Rows that were written, and what scores mean on them."""

    num_train: int
    num_held_out: int
    figures: Mapping[str, Any]
    """Of the task: sizes, shares of the demonstrations, and what guessing scores."""


def write_additions(path: Path, seed: int) -> TaskData:
    """Write additions and a decoder of characters. Figures: `num_characters`."""
    problems = addition.split(seed, NUM_HELD_OUT)
    for name, chosen in (("train", problems.train), ("heldout", problems.held_out)):
        rows = ({"input": problem.prompt, "label": problem.answer, "output": problem.answer} for problem in chosen)
        _write_rows(path / "data" / f"{name}.jsonl", rows)
    build_character_model(path / "untrained", alphabet=ALPHABET, hidden=128, layers=2, heads=4, ffn=384, seed=seed)
    return TaskData(len(problems.train), len(problems.held_out), {"num_characters": len(ALPHABET)})


def write_images(path: Path, seed: int) -> TaskData:
    """Write drawn images with a question each, and a small vision model. Figures: `size`, `chance`.

    Raises:
        PreflightError: pillow or torchvision is not installed.
    """
    require_image_packages()
    guessing = 0.0
    for name, count in (("train", NUM_DRAWN), ("heldout", NUM_DRAWN_HELD_OUT)):
        chosen = drawn_images.drawings(seed, name, count)
        folder = path / "data" / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, drawing in enumerate(chosen):
            (folder / f"{number:05d}.png").write_bytes(drawing.png)
        rows = (
            {"input": f"<image>{d.question}\n", "image": f"{name}/{number:05d}.png", "label": d.answer}
            | ({"output": d.answer} if name == "train" else {})
            for number, d in enumerate(chosen)
        )
        _write_rows(path / "data" / f"{name}.jsonl", rows)
        guessing = drawn_images.chance([(drawing.question, drawing.answer) for drawing in chosen])
    sizes = VisionSizes(
        hidden=128,
        kv_heads=4,
        ffn=384,
        max_positions=64,
        vision_hidden=128,
        vision_ffn=256,
        patch_size=8,
        image_size=drawn_images.SIZE,
    )
    tokenizer = build_character_tokenizer(drawn_images.ALPHABET)
    build_vision_model(path / "untrained", tokenizer, sizes=sizes, seed=seed)
    return TaskData(NUM_DRAWN, NUM_DRAWN_HELD_OUT, {"size": drawn_images.SIZE, "chance": guessing})


def write_calculator(path: Path, seed: int) -> TaskData:
    """Write products, dialogues that mostly guess them, and a model of both.

    Figures: `share_calls`, `share_malformed` of the dialogues.
    """
    return _write_dialogues(
        path,
        seed,
        calculator_dialogues.calculator,
        share_calls=calculator_dialogues.SHARE_CALLS,
        share_malformed=calculator_dialogues.SHARE_MALFORMED,
    )


def write_guess_number(path: Path, seed: int) -> TaskData:
    """Write numbers to be guessed, dialogues of which most heed no answer, and a model of both.

    Figures: `turns`, `width` of a game; `blind_chance`, `heedful_chance` to win it; `share_heedful` of the dialogues.
    """
    task = guess_number_dialogues
    return _write_dialogues(
        path,
        seed,
        task.guess_number,
        turns=task.GAME.turns,
        width=task.GAME.width,
        blind_chance=float(task.blind_chance()),
        heedful_chance=float(task.heedful_chance()),
        share_heedful=task.SHARE_HEEDFUL,
    )


def _write_dialogues(path: Path, seed: int, make: Callable[[int], Dialogues], **figures: Any) -> TaskData:
    made = make(seed)
    for name, rows in (("train", made.train), ("heldout", made.held_out), ("dialogues", made.demonstrations)):
        _write_rows(path / "data" / f"{name}.jsonl", rows)
    tokenizer = build_bpe_tokenizer(dialogue_texts(made.demonstrations[:2_000]), _DIALOGUE_VOCABULARY)
    tokenizer.chat_template = DIALOGUE_TEMPLATE
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
    return TaskData(len(made.train), len(made.held_out), figures)


def dialogue_texts(rows: Sequence[Row]) -> list[str]:
    """Return the dialogues as the chat template writes them, so that the words of the template become tokens too."""
    return [
        "".join(f"{message['role']}: {message['content']}\n" for message in row["input"])
        + f"assistant: {row['output']}"
        for row in rows
    ]


def _write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
