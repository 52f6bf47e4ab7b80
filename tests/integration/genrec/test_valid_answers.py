"""A thousand histories through the commands: every answer is an item, none comes twice, whatever the tokenizer.

Each tokenizer of `TOKENIZERS` gets the tokens of the IDs from `genrec sft`, and the model that comes of it is
asked by `genrec recommend` (items) and by `generate` (texts, which are compared with the IDs by themselves).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rft_cli.main import main

NUM_ITEMS, NUM_PROMPTS = 72, 1000
WIDTHS = (1, 16, 50, NUM_ITEMS + 1)
END = "</s>"
TEXTS = ["red lamp", "green chair", "oak table small", "steel kit pro", "mini <a b> table", *map(str, range(40))]


def id_of(item: int) -> list[str]:
    """Four first codes, fewer than beams; the last two items share all but a fourth token."""
    if item >= 70:
        return ["<a_3>", "<b_9>", "<c_0>", f"<d_{item - 70}>"]
    return [f"<a_{item // 20}>", f"<b_{item // 4 % 5}>", f"<c_{item % 4}>"]


IDS = ["".join(id_of(item)) for item in range(NUM_ITEMS)]


def trained(model: Any, trainer: Any, splitter: Any, decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoder
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def special(*tokens: str) -> dict[str, Any]:
    return {"special_tokens": [*tokens, "<unk>"], "show_progress": False}


def byte_bpe() -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, **special(END))
    return trained(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())


def unigram_with_a_space() -> Tokenizer:
    """As SentencePiece: a space is put before the text, and pieces begin with a mark of it."""
    trainer = trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", **special(END))
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace())


def word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=120, **special(END))
    splitter = pre_tokenizers.Whitespace()
    return trained(models.WordPiece(unk_token="<unk>"), trainer, splitter, decoders.WordPiece())


def characters() -> Tokenizer:
    trainer = trainers.WordLevelTrainer(vocab_size=100, **special(END))
    splitter = pre_tokenizers.Split("", "isolated")
    return trained(models.WordLevel(unk_token="<unk>"), trainer, splitter, decoders.Fuse())


def end_behind_the_vocabulary() -> Tokenizer:
    """The end is added behind the vocabulary, where the IDs are added too; and texts have a start."""
    trainer = trainers.BpeTrainer(vocab_size=200, **special("<s>"))
    tokenizer = trained(models.BPE(unk_token="<unk>"), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return tokenizer


TOKENIZERS: list[Callable[[], Tokenizer]] = [
    byte_bpe,
    unigram_with_a_space,
    word_piece,
    characters,
    end_behind_the_vocabulary,
]


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("valid") / "catalogue"
    folder.mkdir()
    items = {number: {"title": f"item {number}", "description": ""} for number in range(NUM_ITEMS)}
    (folder / "made.item.json").write_text(json.dumps(items))
    (folder / "made.index.json").write_text(json.dumps({number: id_of(number) for number in range(NUM_ITEMS)}))
    rows = [f'A{user},"{[user % NUM_ITEMS, user * 7 % NUM_ITEMS]}",{user * 3 % NUM_ITEMS}' for user in range(64)]
    (folder / "train.csv").write_text("\n".join(["user_id,history_item_id,item_id", *rows]) + "\n")
    return folder


def first_model(tokenizer: Tokenizer, folder: Path) -> Path:
    """A decoder with random weights that are far from uniform, so that beams differ between prompts."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token="<unk>")
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    # more rows than tokens, as Qwen's are
    config = AutoConfig.for_model("qwen2", vocab_size=len(fast) + 5, eos_token_id=fast.eos_token_id, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    return folder


def histories() -> list[list[int]]:
    numbers = random.Random(7)
    return [[numbers.randrange(NUM_ITEMS) for _ in range(1 + number % 8)] for number in range(NUM_PROMPTS)]


def recommended(model: Path, catalogue: Path, folder: Path, width: int) -> Iterator[list[int]]:
    asked, answered = folder / "histories.jsonl", folder / f"items-{width}.jsonl"
    asked.write_text("".join(json.dumps({"history": history}) + "\n" for history in histories()))
    words = ["--catalogue", str(catalogue), "--pretrain", str(model), "--device", "cpu"]
    words += ["--histories", str(asked), "--recommendations", str(answered)]
    assert main(["genrec", "recommend", *words, "--num_beams", str(width), "--top_k", str(width)]) == 0
    for line in answered.read_text().splitlines():
        yield json.loads(line)["items"]


def written(model: Path, catalogue: Path, folder: Path, width: int) -> Iterator[list[str]]:
    """The texts of the beams of each prompt, as people read them."""
    asked, answered = folder / "prompts.jsonl", folder / f"texts-{width}.jsonl"
    rows = [{"input": "".join(IDS[item] for item in history), "name": str(n)} for n, history in enumerate(histories())]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["generate", "--pretrain", str(model), "--device", "cpu", "--prompt_data", str(asked), "--max_samples", "0"]
    words += ["--constraint", f"genrec:{catalogue}", "--num_beams", str(width), "--generate_max_len", "5"]
    assert main([*words, "--engine_max_rows", "512", "--output", str(answered)]) == 0
    answers = [json.loads(line) for line in answered.read_text().splitlines()]
    place = min(width, NUM_ITEMS)
    assert len(answers) == NUM_PROMPTS * place
    for start in range(0, len(answers), place):
        yield [answer["response"].replace(" ", "").removesuffix(END) for answer in answers[start : start + place]]


@pytest.mark.night
@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
def test_every_answer_to_a_thousand_histories_is_an_item_of_its_own(
    make: Callable[[], Tokenizer], catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_CACHE", str(tmp_path / "cache"))
    given = ["--catalogue", str(catalogue), "--pretrain", str(first_model(make(), tmp_path / "first"))]
    given += ["--device", "cpu", "--max_steps", "3", "--learning_rate", "0.05", "--train_batch_size", "16"]
    run = tmp_path / "run"
    assert main(["genrec", "sft", *given, "--save_interval", "0", "--save_path", str(run)]) == 0
    model = max(run.glob("checkpoints/step_*[0-9]/model"))
    answers: set[tuple[int, ...]] = set()
    for width in WIDTHS:
        wanted = min(width, NUM_ITEMS)
        found = list(recommended(model, catalogue, tmp_path, width))
        invalid = sum(not 0 <= item < NUM_ITEMS for items in found for item in items)
        doubled = sum(len(items) - len(set(items)) for items in found)
        assert (len(found), invalid, doubled, {len(items) for items in found}) == (NUM_PROMPTS, 0, 0, {wanted})
        answers |= {tuple(items) for items in found}
        texts = list(written(model, catalogue, tmp_path, width))
        invalid = sum(text not in IDS for row in texts for text in row)
        doubled = sum(len(row) - len(set(row)) for row in texts)
        assert (len(texts), invalid, doubled) == (NUM_PROMPTS, 0, 0)
    assert len(answers) > 20, "the model answers every history alike"
