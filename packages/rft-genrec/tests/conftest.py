"""Two catalogues, a ring of forty items and six tools, and a small decoder with random weights for the first."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

NUM_ITEMS = 40


def id_of(item: int) -> list[str]:
    """Two levels of seven and six codes; items 38 and 39 share one, and item 37's begins that of item 36."""
    if item >= 38:
        return ["<a_6>", "<b_5>"]
    if item in (36, 37):
        return ["<a_6>", "<b_4>", *(["<c_0>"] if item == 36 else [])]
    return [f"<a_{item // 6}>", f"<b_{item % 6}>"]


def write_ring(folder: Path) -> Path:
    """Write a catalogue in which each item is followed by the next one, as a ring."""
    folder.mkdir(parents=True, exist_ok=True)
    items = {str(n): {"title": f"item {n}", "description": ""} for n in range(NUM_ITEMS)}
    (folder / "ring.item.json").write_text(json.dumps(items))
    (folder / "ring.index.json").write_text(json.dumps({str(n): id_of(n) for n in range(NUM_ITEMS)}))
    rows = [(f"A{n}", [(n + step) % NUM_ITEMS for step in range(1 + n % 4)]) for n in range(60)]
    for split, part in (("train", rows[:30]), ("valid", rows[30:45]), ("test", rows[45:])):
        _write_rows(folder / f"{split}.csv", part)
    return folder


def _write_rows(path: Path, rows: Sequence[tuple[str, Sequence[int]]]) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["user_id", "history_item_id", "item_id"])
        out.writerows([user, str(list(history)), (history[-1] + 1) % NUM_ITEMS] for user, history in rows)


@pytest.fixture(scope="session")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the catalogue."""
    return write_ring(tmp_path_factory.mktemp("catalogue") / "ring")


@pytest.fixture(scope="session")
def ring_model(ring: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a decoder with random weights and genrec.json, over the catalogue's IDs."""
    from rft.settings import TokenizerOutputSettings, TrainTokenizerSettings
    from rft.tiny_models.new_tokenizer import new_tokenizer
    from rft_genrec.catalogue.minionerec_files import read_dataset
    from rft_genrec.prompts.builder import PromptBuilder
    from rft_genrec.prompts.model_record import ModelRecord
    from rft_models.new_decoders.build import build_new_decoder
    from rft_models.settings import DecoderSettings, TokenizerSettings
    from rft_models.tokenization.added_tokens import with_added_tokens
    from rft_models.tokenization.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("model")
    ids = read_dataset(ring).ids
    assert ids is not None
    place = TokenizerOutputSettings(save_path=str(folder / "tokenizer"))
    new_tokenizer(TrainTokenizerSettings(tokenizer=TokenizerSettings(tokenizer_type="bytes"), output=place))
    with_added_tokens(load_tokenizer(folder / "tokenizer"), ids.vocabulary).save_pretrained(folder / "tokenizer")
    sizes = DecoderSettings(hidden_size=16, num_layers=1, num_heads=2)
    model = build_new_decoder(folder / "model", sizes, folder / "tokenizer", seed=1)
    ModelRecord.of(PromptBuilder(ids)).write(model)
    return model


IDS = [[f"<a_{n // 3}>", f"<b_{n % 3}>"] for n in range(6)]


def write_tools(folder: Path, ids: list[list[str]] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    items = {str(n): {"title": f"Tool {n}", "description": "red"} for n in range(6)}
    (folder / "tools.item.json").write_text(json.dumps(items))
    (folder / "tools.index.json").write_text(json.dumps(dict(enumerate(ids or IDS))))
    rows = ["user_id,history_item_id,item_id"]
    for user in range(8):
        items_of = [(user + step) % 6 for step in range(5)]
        rows += [f'A{user},"{items_of[:end]}",{items_of[end]}' for end in range(1, 5)]
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    (folder / "valid.csv").write_text("\n".join([rows[0], *rows[3:6]]) + "\n")
    return folder


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RFT_CACHE", str(tmp_path / "cache"))
    return write_tools(tmp_path / "catalogue")
