"""Settings of images that contradict others, and those that nothing reads."""

from __future__ import annotations

import pytest

from rft_cli.config.resolve import resolve
from rft_core.errors import OptionsError

IDLE = "has no effect: images_key is empty (default)"


@pytest.mark.parametrize(
    ("command", "words", "code", "remedy"),
    [
        ("rl", "--images_key image --engine_type sglang", "engine.sglang.images", "--engine_type native, or vllm"),
        ("eval", "--images_key image --engine_type sglang", "engine.sglang.images", "--engine_type native, or vllm"),
        ("generate", "--prompt a --image b.png --engine_type sglang", "engine.sglang.images", "--engine_type native"),
        ("generate", "--prompt_data a.jsonl --image b.png", "images.of_rows", "--images_key image"),
    ],
)
def test_what_cannot_be_done_with_images_is_refused(command: str, words: str, code: str, remedy: str) -> None:
    with pytest.raises(OptionsError) as caught:
        resolve(command, ["--pretrain", "m", *words.split()])
    assert caught.value.problem.code == code
    assert caught.value.problem.do.startswith(remedy)


@pytest.mark.parametrize(
    ("command", "words", "told"),
    [
        ("rl", "--mixed_mm_data", f"mixed_mm_data = true (command line) {IDLE}"),
        ("rl", "--shuffle_images", f"shuffle_images = true (command line) {IDLE}"),
        ("sft", "--max_pixels 9", f"max_pixels = 9 (command line) {IDLE}"),
        ("eval", "--limit_mm_image_per_prompt 2", f"limit_mm_image_per_prompt = 2 (command line) {IDLE}"),
        ("generate", "--prompt a --images_key b", "images_key = b (command line) has no effect: prompt is one text"),
        ("generate", "--prompt a --image b --mixed_mm_data", f"mixed_mm_data = true (command line) {IDLE}"),
    ],
)
def test_what_nothing_reads_is_told(command: str, words: str, told: str) -> None:
    notes = resolve(command, ["--pretrain", "m", *words.split()]).notes
    assert any(note.startswith(told) for note in notes), notes


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("rl", "--images_key image --mixed_mm_data --max_pixels 9 --limit_mm_image_per_prompt 2 --engine_type vllm"),
        ("generate", "--prompt a --image b.png --max_pixels 9 --limit_mm_image_per_prompt 1"),
        ("generate", "--prompt_data a.jsonl --images_key image --max_pixels 9"),
    ],
)
def test_what_acts_is_not_called_idle(command: str, words: str) -> None:
    notes = resolve(command, ["--pretrain", "m", *words.split()]).notes
    assert not [note for note in notes if "pixels" in note or "image" in note]


@pytest.mark.parametrize(
    ("command", "words", "names"),
    [
        ("generate", "--prompt a --images_key b --mixed_mm_data", "images_key mixed_mm_data"),
        ("generate", "--prompt a --image b --mixed_mm_data --max_pixels 9", "mixed_mm_data"),
        ("generate", "--prompt a --max_pixels 9 --min_pixels 4", "max_pixels min_pixels"),
        ("generate", "--prompt_data a --images_key b --max_pixels 9", ""),
        ("sft", "--limit_mm_image_per_prompt 3 --mixed_mm_data", "mixed_mm_data limit_mm_image_per_prompt"),
        ("sft", "--images_key a --max_pixels 9", ""),
        ("build", "--texts a --save_path b", ""),
    ],
)
def test_every_idle_setting_is_told_once_and_in_order(command: str, words: str, names: str) -> None:
    model = [] if command == "build" else ["--pretrain", "m"]
    notes = resolve(command, [*model, *words.split()]).notes
    assert [note.partition(" = ")[0] for note in notes] == names.split()


@pytest.mark.parametrize(
    "words",
    [
        "rl --images_key image --engine_type hf",
        "rl --engine_type sglang",
        "sft --images_key image",
        "generate --prompt a --image b.png",
        "generate --prompt_data a --images_key b",
    ],
)
def test_images_go_with_engines_that_take_them(words: str) -> None:
    command, *rest = words.split()
    assert resolve(command, ["--pretrain", "m", *rest]).notes == ()
