"""Contradictions of `genrec sft`."""

from __future__ import annotations

import pytest

from rft.config.errors import SettingsError
from rft_cli.config.resolve import resolve
from rft_genrec.settings.rules import SIMILAR, TASK_NAMES, WALKS, chosen_tasks


def codes(*words: str) -> set[str]:
    try:
        resolve("genrec-sft", ["--catalogue", "tools", *words])
    except SettingsError as error:
        return {problem.code for problem in error.problems}
    return set()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--prompt_data rows.jsonl", "genrec.rows_of_catalogue"),
        ("--output_key text", "genrec.rows_of_catalogue"),
        ("--apply_chat_template", "genrec.rows_of_catalogue"),
        ("--tasks history,moves", "genrec.tasks"),
        ("--tasks id,id", "genrec.tasks"),
        ("--tasks history,similar", "genrec.no_embeddings"),
        ("--item_embeddings vectors.npy", "genrec.idle_embeddings"),
        ("--tasks similar --item_embeddings vectors.npy --template chat", "genrec.similar_template"),
        ("--tasks history,walks --template instruction", "genrec.similar_template"),
        ("--tasks title --rows sequences", "genrec.no_sequences"),
        ("--rows sequences --template instruction", "genrec.sequence_template"),
        ("--pretrain llm --freeze_LLM --train_only_tokens_from 9", "genrec.two_freezes"),
        ("--pretrain llm --hidden_size 8", "genrec.has_model"),
        ("--freeze_llm", "genrec.frozen_new"),
        ("--lora_rank 4", "genrec.frozen_new"),
        ("--train_only_tokens_from 3", "genrec.frozen_new"),
        ("--hidden_size 9", "decoder.heads"),
    ],
)
def test_a_contradiction_is_refused(words: str, code: str) -> None:
    assert codes(*words.split()) == {code}


def test_what_a_catalogue_gives_is_not_asked_for() -> None:
    assert codes() == set()
    assert codes("--patience", "2", "--eval_steps", "10") == set()  # its split valid is held out
    assert codes("--pretrain", "llm", "--freeze_LLM") == set()


def test_all_stands_for_every_task_whose_rows_are_not_drawn() -> None:
    assert chosen_tasks("all") == [name for name in TASK_NAMES if name not in {SIMILAR, WALKS}]
    assert chosen_tasks(" id, history") == ["id", "history"]
