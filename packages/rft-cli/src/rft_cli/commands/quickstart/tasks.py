"""Tasks of the quickstart: additions for a text model, drawn images for a vision model, dialogues.

Each task writes its data files and its untrained model; its two stages are ordinary recipes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


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
    ranks: int = 1
    """Processes that are quickest, where as many cores are usable."""


def _additions(path: Path, seed: int) -> str:
    from rft.tiny_models.quickstart import write_additions  # here, as below, so that pages do not wait for torch

    made = write_additions(path, seed)
    return (
        f"{made.num_train:,} additions to train on, {made.num_held_out} held out (their swapped twins are in neither); "
        f"a decoder and a tokenizer of {made.figures['num_characters']} characters were built in {path}\n"
    )


def _images(path: Path, seed: int) -> str:
    from rft.tiny_models.quickstart import write_images

    made = write_images(path, seed)
    size, chance = made.figures["size"], made.figures["chance"]
    return (
        f"{made.num_train:,} drawn images of {size} x {size} pixels with a question each, {made.num_held_out} held out "
        f"(who sees none is right on {chance:.3f} of them at best); a Qwen2.5-VL model was built in {path}\n"
    )


def _calculator(path: Path, seed: int) -> str:
    from rft.tiny_models.quickstart import write_calculator

    made = write_calculator(path, seed)
    return (
        f"{made.num_train:,} products of two-digit numbers to train on, {made.num_held_out} held out; of the "
        f"demonstrated dialogues {made.figures['share_calls']:.0%} call the calculator, "
        f"{made.figures['share_malformed']:.0%} garble the call, the others guess; a decoder was built in {path}\n"
    )


def _guess_number(path: Path, seed: int) -> str:
    from rft.tiny_models.quickstart import write_guess_number

    made = write_guess_number(path, seed)
    game = made.figures
    return (
        f"{made.num_train:,} numbers to be guessed in {game['turns']} turns, from ranges of {game['width']}, and "
        f"{made.num_held_out} from other ranges held out; different guesses in any order win "
        f"{game['blind_chance']:.1%} of the games, any guesses that the answers allow {game['heedful_chance']:.1%}; "
        f"of the demonstrated dialogues {game['share_heedful']:.0%} heed the answers; a decoder was built in {path}\n"
    )


TASKS = {
    "additions": Task(
        sft_recipe="quickstart-sft",
        rl_recipe="quickstart",
        about="additions",
        second="64 prompts x 8 answers a step, reward 1 for the right sum",
        prepare=_additions,
        eval_words=("--generate_max_len", "8"),
        ranks=2,
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
        prepare=_calculator,
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
        prepare=_guess_number,
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
