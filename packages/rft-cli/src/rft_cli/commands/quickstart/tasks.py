"""Tasks of the quickstart: additions for a text model, drawn images for a vision model, dialogues.

Each task writes its data files and its untrained model; its two stages are ordinary recipes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rft_cli.commands.quickstart.dialogues import prepare_calculator, prepare_guess_number

ALPHABET = "0123456789+="
NUM_HELD_OUT = 500
NUM_DRAWN, NUM_DRAWN_HELD_OUT = 4_000, 400


@dataclass(frozen=True, slots=True)
class Task:
    """One of the things to learn."""

    sft_recipe: str
    rl_recipe: str
    about: str
    """What the warm-up trains on."""
    second: str
    """What the second stage does."""
    prepare: Callable[[Path, int], str]
    """(run's directory, seed) -> what was made, for people; the same seed writes the same bytes."""
    eval_words: tuple[str, ...] = ()
    """Flags of an evaluation by itself."""
    demonstrations: str = "train"
    """File of the rows that the warm-up trains on."""
    noisy: str = ""
    """The environment of the control whose answers say nothing; empty where the task has no environment."""


def _additions(path: Path, seed: int) -> str:
    from rft_models.tiny_models.text import build_character_model
    from rft_trainer.tasks.addition import split

    problems = split(seed, NUM_HELD_OUT)
    for name, chosen in (("train", problems.train), ("heldout", problems.held_out)):
        rows = ({"input": problem.prompt, "label": problem.answer, "output": problem.answer} for problem in chosen)
        _write_rows(path / "data" / f"{name}.jsonl", rows)
    build_character_model(path / "untrained", alphabet=ALPHABET, hidden=128, layers=2, heads=4, ffn=384, seed=seed)
    return (
        f"{len(problems.train):,} additions to train on, {len(problems.held_out)} held out (their swapped twins are in "
        f"neither); a decoder and a tokenizer of {len(ALPHABET)} characters were built in {path}\n"
    )


def _images(path: Path, seed: int) -> str:
    from rft_models.tiny_models.text import build_character_tokenizer
    from rft_models.tiny_models.vision import VisionSizes, build_vision_model
    from rft_models.vision.image_files import require_image_packages
    from rft_trainer.tasks.drawn_images import ALPHABET as LETTERS
    from rft_trainer.tasks.drawn_images import SIZE, chance, drawings

    require_image_packages()
    guessing = 0.0
    for name, count in (("train", NUM_DRAWN), ("heldout", NUM_DRAWN_HELD_OUT)):
        chosen = drawings(seed, name, count)
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
        guessing = chance([(drawing.question, drawing.answer) for drawing in chosen])
    sizes = VisionSizes(
        hidden=128,
        kv_heads=4,
        ffn=384,
        max_positions=64,
        vision_hidden=128,
        vision_ffn=256,
        patch_size=8,
        image_size=SIZE,
    )
    build_vision_model(path / "untrained", build_character_tokenizer(LETTERS), sizes=sizes, seed=seed)
    return (
        f"{NUM_DRAWN:,} drawn images of {SIZE} x {SIZE} pixels with a question each, {NUM_DRAWN_HELD_OUT} held out "
        f"(who sees none is right on {guessing:.3f} of them at best); a Qwen2.5-VL model was built in {path}\n"
    )


def _write_rows(file: Path, rows: Iterable[Mapping[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


TASKS = {
    "additions": Task(
        sft_recipe="quickstart-sft",
        rl_recipe="quickstart",
        about="additions",
        second="64 prompts x 8 answers a step, reward 1 for the right sum",
        prepare=_additions,
        eval_words=("--generate_max_len", "8"),
    ),
    "images": Task(
        sft_recipe="drawn-images-sft",
        rl_recipe="drawn-images",
        about="questions about drawn images",
        second="64 prompts with an image x 8 answers a step, reward 1 for the right answer",
        prepare=_images,
        eval_words=("--generate_max_len", "8", "--images_key", "image"),
    ),
    "calculator": Task(
        sft_recipe="calculator-sft",
        rl_recipe="calculator",
        about="dialogues about products, most of which guess",
        second="32 questions x 8 conversations a step, reward 1 for the right product",
        prepare=prepare_calculator,
        eval_words=(
            "--apply_chat_template",
            "--environment",
            "calculator",
            "--max_turns",
            "4",
            "--generate_max_len",
            "112",
        ),
        demonstrations="dialogues",
        noisy="calculator-noise",
    ),
    "guess-number": Task(
        sft_recipe="guess-number-sft",
        rl_recipe="guess-number",
        about="dialogues that guess a number, most of which heed no answer",
        second="16 numbers x 16 conversations a step, reward 1 for the number within 3 turns",
        prepare=prepare_guess_number,
        eval_words=(
            "--apply_chat_template",
            "--environment",
            "guess-number",
            "--max_turns",
            "3",
            "--generate_max_len",
            "48",
        ),
        demonstrations="dialogues",
        noisy="guess-number-noise",
    ),
}
"""By the name that `--task` takes."""
