"""`genrec eval` and `genrec recommend` as commands: on one rank and on two, for files, and refused."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rft.settings import TokenizerOutputSettings, TrainTokenizerSettings
from rft.tiny_models.new_tokenizer import new_tokenizer
from rft_cli.main import main
from rft_genrec.catalogue.minionerec_files import read_dataset
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.prompts.model_record import ModelRecord
from rft_models.new_decoders.build import build_new_decoder
from rft_models.settings import DecoderSettings, TokenizerSettings
from rft_models.tokenization.added_tokens import with_added_tokens
from rft_models.tokenization.tokenizer import load_tokenizer

pytestmark = pytest.mark.xdist_group("genrec_ranking")

NUM_ITEMS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue of thirty items in a ring, and a decoder with random weights over their IDs."""
    path = tmp_path_factory.mktemp("ranking")
    there = path / "catalogue"
    there.mkdir()
    (there / "ring.item.json").write_text(json.dumps({n: {"title": f"item {n}"} for n in range(NUM_ITEMS)}))
    index = {n: [f"<a_{n // 5}>", f"<b_{n % 5}>"] for n in range(NUM_ITEMS)}
    (there / "ring.index.json").write_text(json.dumps(index))
    for split in ("train", "valid", "test"):
        with (there / f"{split}.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["user_id", "history_item_id", "item_id"])
            out.writerows([f"A{n}", str([n, (n + 1) % NUM_ITEMS]), (n + 2) % NUM_ITEMS] for n in range(NUM_ITEMS))
    ids = read_dataset(there).ids
    assert ids is not None
    place = TokenizerOutputSettings(save_path=str(path / "tokenizer"))
    new_tokenizer(TrainTokenizerSettings(tokenizer=TokenizerSettings(tokenizer_type="bytes"), output=place))
    with_added_tokens(load_tokenizer(path / "tokenizer"), ids.vocabulary).save_pretrained(path / "tokenizer")
    sizes = DecoderSettings(hidden_size=16, num_layers=1, num_heads=2)
    build_new_decoder(path / "model", sizes, path / "tokenizer", seed=1)
    ModelRecord.of(PromptBuilder(ids)).write(path / "model")
    return path


def words_of(folder: Path, *more: str) -> list[str]:
    return ["--catalogue", str(folder / "catalogue"), "--pretrain", str(folder / "model"), "--device", "cpu", *more]


def predictions(output: Path) -> list[tuple[str, object]]:
    rows = [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]
    return [(row["sample_id"], row["model"]["places"]) for row in rows]


def test_two_ranks_rank_the_rows_of_one(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    common = words_of(folder, "--num_beams", "6", "--bootstrap_draws", "20")
    assert main(["genrec", "eval", *common, "--output", str(folder / "one")]) == 0
    printed = capfd.readouterr().out
    assert "30 samples of test, 6 places; baselines and popularity from train" in printed
    assert "first_order  1.0000" in printed
    two = [sys.executable, "-m", "rft_cli.main", "genrec", "eval", *common, "--nproc", "2"]
    subprocess.run([*two, "--output", str(folder / "two")], check=True, timeout=300)
    assert predictions(folder / "two") == predictions(folder / "one")
    results = [json.loads((folder / name / "results.json").read_text()) for name in ("one", "two")]
    assert results[0]["methods"] == results[1]["methods"]


def test_rankings_of_another_width_are_not_gone_on_from(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = folder / "stale"
    (output / "parts").mkdir(parents=True)
    (output / "parts" / "rank_0_of_1.jsonl").write_text('{"manifest": {"num_beams": 5}}\n')
    assert main(["genrec", "eval", *words_of(folder), "--num_beams", "6", "--output", str(output)]) != 0
    assert "is of another evaluation" in capfd.readouterr().err
    assert not (output / "results.json").exists()


def test_a_file_of_histories_is_answered(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text('{"user": "a", "history": [3, 4]}\n{"user": "b", "history": [99]}\n')
    files = ["--histories", str(source), "--recommendations", str(target), "--top_k", "3"]
    assert main(["genrec", "recommend", *words_of(folder, *files)]) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(set(rows[0]["items"])) == 3
    assert rows[1]["error"] == "unknown item 99: the catalogue has the items 0 to 29"
    printed = capfd.readouterr().out
    assert "latency   p50" in printed
    assert "1 lines are no history of this catalogue" in printed


@pytest.mark.night
def test_a_killed_rank_ends_the_evaluation_and_the_same_command_ranks_what_is_missing(folder: Path) -> None:
    # 29 rows: the first rank has fifteen, the other fourteen, so that the fifteenth batch is of one rank alone
    common = words_of(folder, "--num_beams", "6", "--bootstrap_draws", "20", "--max_eval_samples", "29")
    assert main(["genrec", "eval", *common, "--output", str(folder / "alone")]) == 0
    output = folder / "killed"
    given = [*common, "--search_batch_size", "1", "--nproc", "2", "--output", str(output)]
    command = [sys.executable, "-m", "rft_cli.main", "genrec", "eval", *given]
    fault = os.environ | {"RFT_FAULT": "rankings.keep:15:kill"}
    killed = subprocess.run(command, env=fault, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode != 0
    assert "rank 0" in killed.stdout + killed.stderr
    assert not (output / "results.json").exists()
    subprocess.run(command, check=True, timeout=300)
    assert predictions(output) == predictions(folder / "alone")
