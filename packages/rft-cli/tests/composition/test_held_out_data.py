"""Rows kept out of supervised training: how they are chosen, and that nothing else sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft.build.prompt_data import hold_out
from rft.config.errors import SettingsError
from rft.stages.sft import SftData, sft_data
from rft_cli.config.resolve import resolve
from rft_core.errors import OptionsError
from rft_models.tiny_models.text import build_bpe_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.records.rollouts import TrainingSample

SAMPLES = [TrainingSample(f"rows:{i}", (1, 2, 3), 1, 0.0) for i in range(50)]


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return HfTokenizer(build_bpe_tokenizer(["1+1=2"], 258))


def read(tokenizer: HfTokenizer, *argv: str) -> SftData:
    for name in ("a", "b"):
        rows = [{"input": f"{name}{i}", "output": str(i)} for i in range(20)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--pretrain", "m", "--prompt_data", "a.jsonl", "--train_batch_size", "4", "--max_epochs", "2", *argv]
    return sft_data(resolve("sft", words).settings, tokenizer, 100)


def ids(samples: list[TrainingSample]) -> set[str]:
    return {sample.sample_id for sample in samples}


def test_rows_are_divided_by_the_seed_and_keep_their_order() -> None:
    training, held_out = hold_out(SAMPLES, 12, seed=1)
    assert (len(training), len(held_out)) == (38, 12)
    assert ids(training) | ids(held_out) == ids(SAMPLES)
    for part in (training, held_out):
        numbers = [int(sample.sample_id.split(":")[1]) for sample in part]
        assert numbers == sorted(numbers)
    assert hold_out(SAMPLES, 12, seed=1)[1] == held_out
    assert hold_out(SAMPLES, 12, seed=2)[1] != held_out


def test_held_out_rows_are_in_no_epoch_and_the_steps_count_the_others(tokenizer: HfTokenizer) -> None:
    data = read(tokenizer, "--held_out_rows", "6", "--seed", "3")
    assert (len(data.samples), len(data.held_out)) == (14, 6)
    assert not ids(data.samples) & ids(data.held_out)
    assert data.num_steps == 2 * 4
    assert sorted(data.mixture.order(3, 0).tolist()) == list(range(14))


@pytest.mark.parametrize(("max_steps", "num_steps"), [("0", 10), ("3", 3), ("99", 10)])
def test_the_steps_end_with_the_epochs_or_with_max_steps(
    tokenizer: HfTokenizer, max_steps: str, num_steps: int
) -> None:
    assert read(tokenizer, "--max_steps", max_steps).num_steps == num_steps


def test_shares_of_several_files_are_kept(tokenizer: HfTokenizer) -> None:
    argv = ["--prompt_data", "a.jsonl,b.jsonl", "--prompt_data_probs", "0.25,0.75", "--held_out_rows", "10"]
    data = read(tokenizer, *argv)
    sizes = [sum(sample.sample_id.startswith(name) for sample in data.samples) for name in ("a:", "b:")]
    assert data.mixture.sizes == tuple(sizes)
    assert sum(sizes) == 30
    assert data.mixture.probabilities == (0.25, 0.75)


def test_held_out_data_of_its_own_comes_first_and_the_other_is_said_to_do_nothing(tokenizer: HfTokenizer) -> None:
    argv = ["--held_out_rows", "6", "--eval_data", "b.jsonl"]
    data = read(tokenizer, *argv)
    assert (len(data.samples), len(data.held_out)) == (20, 20)
    (note,) = resolve("sft", ["--pretrain", "m", *argv]).notes
    assert note.startswith("held_out_rows = 6 (command line) has no effect: eval_data is b.jsonl")


def test_something_must_be_left_to_train_on(tokenizer: HfTokenizer) -> None:
    with pytest.raises(OptionsError, match="held_out_rows = 20, and there are 20") as caught:
        read(tokenizer, "--held_out_rows", "20")
    assert caught.value.problem.code == "data.held_out_rows"
    assert caught.value.problem.do == "--held_out_rows 1"


def test_patience_without_held_out_rows_is_refused() -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("sft", ["--pretrain", "m", "--patience", "2"])
    assert caught.value.problem.do == "--held_out_rows 200"
    for given in (["--held_out_rows", "5"], ["--eval_data", "b.jsonl"]):
        resolve("sft", ["--pretrain", "m", "--patience", "2", *given])
