"""From rows to token ids: special tokens, prompts that are too long, and the end of a demonstration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rft.build.prompt_data import PreparedPrompts, demonstrations, read_training, trained_turns, weight_notes
from rft_core.errors import DataError, OptionsError
from rft_models.tiny_models.text import build_bpe_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.batches.packing import pack
from rft_trainer.settings.data import SftDataSettings

BOS = "<s>"
TEXTS = [f"{n}+1=" for n in range(3)]


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    """A tokenizer that begins a document with a token of its own, as Llama's and Gemma's do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer: Any = build_bpe_tokenizer(["1+1=2"], 258)
    tokenizer.add_special_tokens({"bos_token": BOS})
    number = tokenizer.convert_tokens_to_ids(BOS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, number)]
    )
    return HfTokenizer(tokenizer)


def read(
    tokenizer: HfTokenizer, path: Path, texts: Sequence[str] = TEXTS, *, prompt_max_len: int = 50, **changes: Any
) -> PreparedPrompts:
    file = path / "rows.jsonl"
    rows = [{"input": text, "output": str(n + 1)} for n, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = SftDataSettings(prompt_data=str(file), **changes)
    return read_training(
        settings, settings, tokenizer, label_key=None, output_key="output", prompt_max_len=prompt_max_len
    )


def test_a_plain_prompt_begins_as_the_tokenizer_begins_a_document(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    bos = tokenizer.hf_tokenizer.convert_tokens_to_ids(BOS)
    rows = read(tokenizer, tmp_path).rendered
    assert [row.token_ids for row in rows] == [(bos, *tokenizer.encode(f"{n}+1=")) for n in range(3)]
    assert all(row.token_ids.count(bos) == 1 for row in rows)


def test_a_chat_template_writes_its_own_special_tokens_and_none_are_added(
    tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    bos = tokenizer.hf_tokenizer.convert_tokens_to_ids(BOS)
    rows = read(tokenizer, tmp_path, apply_chat_template=True).rendered
    assert all(bos not in row.token_ids for row in rows)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_prompts_that_are_too_long_are_left_out_by_name_and_never_cut(
    num_workers: int, tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    texts = ["x" * length for length in (3, 9, 4, 30)]
    lengths = [len(row.token_ids) for row in read(tokenizer, tmp_path, texts).rendered]
    limit = lengths[2]
    found = read(tokenizer, tmp_path, texts, prompt_max_len=limit, num_workers=num_workers)
    assert [(row.prompt_id, len(row.token_ids)) for row in found.rendered] == [
        ("rows:0", lengths[0]),
        ("rows:2", limit),
    ]
    assert found.left_out == (("rows:1", lengths[1]), ("rows:3", lengths[3]))


def test_a_limit_that_leaves_no_prompt_is_refused_with_the_limit_that_keeps_all(
    tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    texts = ["x" * length for length in (3, 9, 4)]
    longest = max(len(row.token_ids) for row in read(tokenizer, tmp_path, texts).rendered)
    with pytest.raises(DataError) as caught:
        read(tokenizer, tmp_path, texts, prompt_max_len=2)
    problem = caught.value.problem
    assert (problem.code, problem.where, problem.do) == (
        "prompt.all_too_long",
        "--prompt_max_len",
        f"--prompt_max_len {longest}",
    )
    assert read(tokenizer, tmp_path, texts, prompt_max_len=longest).left_out == ()


def test_a_demonstration_is_prompt_output_and_end_token_and_the_end_is_learned(
    tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    rendered = read(tokenizer, tmp_path).rendered
    samples, left_out = demonstrations(rendered, tokenizer, max_len=50)
    assert left_out == []
    for sample, row in zip(samples, rendered, strict=True):
        assert row.output is not None
        assert sample.token_ids == (*row.token_ids, *tokenizer.encode(row.output), tokenizer.eos_ids[0])
        batch = pack([sample])
        learned = batch.token_ids_T[batch.loss_mask_T].tolist()
        assert learned == [*tokenizer.encode(row.output), tokenizer.eos_ids[0]]


def test_a_demonstration_that_is_too_long_by_its_end_token_is_left_out_by_name(
    tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    rendered = read(tokenizer, tmp_path).rendered
    samples, _ = demonstrations(rendered, tokenizer, max_len=50)
    length = len(samples[0].token_ids)
    kept, left_out = demonstrations(rendered, tokenizer, max_len=length)
    assert (len(kept), left_out) == (3, [])
    longer = [*rendered[:1], rendered[1], read(tokenizer, tmp_path, input_template="now {}").rendered[2]]
    kept, left_out = demonstrations(longer, tokenizer, max_len=length)
    assert [sample.sample_id for sample in kept] == [row.prompt_id for row in rendered[:2]]
    assert [name for name, _ in left_out] == [rendered[2].prompt_id]


def test_turns_of_a_conversation_are_learned_where_the_settings_and_the_messages_say_so(
    tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    tokenizer.hf_tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    )
    talk = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    messages: list[dict[str, Any]] = [{"role": role, "content": words} for role, words in talk]

    def learned(rows: list[Any], **choices: Any) -> list[str]:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        data = SftDataSettings(prompt_data=str(tmp_path / "a.jsonl"), apply_chat_template=True, **choices)
        options: dict[str, Any] = {"label_key": None, "output_key": "output", "prompt_max_len": 99}
        found = read_training(data, data, tokenizer, **options, turns=trained_turns(data))
        samples, _ = demonstrations(found.rendered, tokenizer, max_len=99)
        batches = [pack([sample]) for sample in samples]
        return [tokenizer.decode(batch.token_ids_T[batch.loss_mask_T].tolist()) for batch in batches]

    end = tokenizer.decode(tokenizer.eos_ids[:1])
    out = {**messages[1], "weight": 0}
    assert learned([messages, [messages[0], out, *messages[2:]]]) == [f"2{end}4{end}", f"4{end}"]
    assert learned([messages], train_on_turns="last") == [f"4{end}"]
    assert learned([messages], roles_to_train="assistant, user") == [f"+1=2{end}2+2=4{end}"]
    with pytest.raises(OptionsError) as caught:
        learned([messages], roles_to_train="asistant")
    assert caught.value.problem.do == "--roles_to_train assistant"


def test_rows_of_weight_0_are_left_out_and_told(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    def samples(weights: Sequence[float]) -> tuple[list[float], tuple[str, ...]]:
        rows = [{"input": "1+1=", "output": "2", "w": weight} for weight in weights]
        (tmp_path / "w.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = SftDataSettings(prompt_data=str(tmp_path / "w.jsonl"), weight_key="w")
        options: dict[str, Any] = {"label_key": None, "output_key": "output", "prompt_max_len": 99}
        found = read_training(data, data, tokenizer, **options, weight_key=data.weight_key)
        made, _ = demonstrations(found.rendered, tokenizer, max_len=99)
        return [sample.weight for sample in made], weight_notes(found.rendered)

    assert samples([2, 0, 0.5]) == ([2.0, 0.5], ("1 of 3 rows have weight 0 and are left out",))
    assert samples([1, 1])[1] == ()
    with pytest.raises(DataError, match="the weights of all 2 rows that fit are 0"):
        samples([0, 0])
