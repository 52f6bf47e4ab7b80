"""Recommenders are trained by their commands: on IDs alone, with frozen weights, on two ranks, and by rewards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rft.settings import TokenizerOutputSettings, TrainTokenizerSettings
from rft.tiny_models.new_tokenizer import new_tokenizer
from rft_cli.main import main
from rft_genrec.prompts.model_record import read_record
from rft_models.new_decoders.build import build_new_decoder
from rft_models.settings import DecoderSettings, TokenizerSettings
from rft_models.tokenization.tokenizer import load_tokenizer

pytestmark = pytest.mark.xdist_group("genrec_training")

IDS = [[f"<a_{n // 3}>", f"<b_{n % 3}>"] for n in range(6)]
ITEMS = {"".join(tokens) for tokens in IDS}
BATCHES = ("--train_batch_size", "8", "--micro_train_batch_size", "4")
SHORT = ("--device", "cpu", *BATCHES, "--lr_schedule", "constant", "--save_interval", "0")
NEW = ("--hidden_size", "32", "--num_heads", "2", "--max_seq_len", "32", "--learning_rate", "0.01")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue of six tools, which people take in their order."""
    path = tmp_path_factory.mktemp("genrec")
    os.environ["RFT_CACHE"] = str(path / "cache")
    there = path / "catalogue"
    there.mkdir()
    (there / "tools.item.json").write_text(json.dumps({n: {"title": f"Tool {n}"} for n in range(6)}))
    (there / "tools.index.json").write_text(json.dumps(dict(enumerate(IDS))))
    rows = ["user_id,history_item_id,item_id"]
    for user in range(8):
        taken = [(user + step) % 6 for step in range(5)]
        rows += [f'A{user},"{taken[:end]}",{taken[end]}' for end in range(1, 5)]
    (there / "train.csv").write_text("\n".join(rows) + "\n")
    (there / "valid.csv").write_text("\n".join(rows[:6]) + "\n")
    return path


@pytest.fixture(autouse=True)
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_CACHE", str(folder / "cache"))


def train(command: str, folder: Path, name: str, *words: str) -> Path:
    given = ["genrec", command, "--catalogue", str(folder / "catalogue"), *SHORT, *words]
    assert main([*given, "--save_path", str(folder / name)]) == 0
    return folder / name


def model_of(run: Path) -> Path:
    return max(run.glob("checkpoints/step_*[0-9]/model"))


def weights(model: Path) -> dict[str, Tensor]:
    # ranks that divide the weights write a file each
    return {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}


def lines_of(file: Path) -> list[dict[str, float]]:
    """Rows of a file without what a run alone has: times, memory and sizes of its own batches."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    own = ("time/", "memory/", "policy/micro_batches")
    return [{name: value for name, value in row.items() if not name.startswith(own)} for row in rows]


@pytest.fixture(scope="module")
def learned(folder: Path) -> Path:
    """A recommender that has learned the order."""
    words = ("--rows", "sequences", "--max_epochs", "60", *NEW)
    os.environ["RFT_CACHE"] = str(folder / "cache")
    return train("sft", folder, "learned", *words)


def test_a_new_decoder_learns_and_answers_with_items(folder: Path, learned: Path) -> None:
    rows = [json.loads(line) for line in (learned / "evals.jsonl").read_text().splitlines()]
    losses = [row["eval/loss"] for row in rows]
    assert losses[-1] < 0.3 * losses[0]
    assert read_record(model_of(learned)) is not None  # beside every model that is saved
    out = folder / "answers.jsonl"
    words = ["generate", "--pretrain", str(model_of(learned)), "--prompt", "<a_0><b_1>", "--generate_max_len", "3"]
    words += ["--constraint", f"genrec:{folder / 'catalogue'}", "--temperature", "0", "--output", str(out)]
    assert main(words) == 0
    [answer] = [json.loads(line) for line in out.read_text().splitlines()]
    assert answer["response"] in ITEMS


def test_a_resume_and_other_micro_batches_change_no_bit_and_no_step(folder: Path) -> None:
    words = ("--tasks", "history,title", "--prompt_data_probs", "0.7,0.3", "--dropout", "0.1", *NEW)
    whole = train("sft", folder, "whole", "--max_steps", "4", *words)
    stopped = train("sft", folder, "stopped", "--max_steps", "2", *words)
    assert main(["resume", str(stopped), "--max_steps", "4"]) == 0
    expected, found = weights(model_of(whole)), weights(model_of(stopped))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("tied", "strategy"), [(True, ["--zero_stage", "2"]), (False, ["--fsdp"])])
def test_two_ranks_with_frozen_weights_move_the_new_rows_alone(folder: Path, tied: bool, strategy: list[str]) -> None:
    place = folder / f"llm-{tied}"
    output = TokenizerOutputSettings(save_path=str(place / "tokenizer"))
    new_tokenizer(TrainTokenizerSettings(tokenizer=TokenizerSettings(tokenizer_type="bytes"), output=output))
    sizes = DecoderSettings(hidden_size=16, num_layers=1, num_heads=2, max_seq_len=32, tie_embeddings=tied)
    model = build_new_decoder(place / "model", sizes, place / "tokenizer", seed=1)
    frozen = ["--pretrain", str(model), "--freeze_LLM", "--l2", "0.1", "--learning_rate", "0.02", "--max_steps", "3"]
    one = train("sft", folder, f"one-{tied}", *frozen, "--eval_steps", "0")
    words = ["genrec", "sft", "--catalogue", str(folder / "catalogue"), *SHORT, *frozen, "--eval_steps", "0"]
    words += [*strategy, "--nproc", "2", "--save_path", str(folder / f"two-{tied}")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "rft_cli.main", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    before, first = weights(model), load_tokenizer(model).vocab_size
    alone = weights(model_of(one))
    for name, after in weights(model_of(folder / f"two-{tied}")).items():
        if after.shape == before[name].shape:
            assert torch.equal(after, before[name]), name
            continue
        assert after.shape[0] == first + 5
        assert torch.equal(after[:first], before[name]), name
        torch.testing.assert_close(after, alone[name], rtol=1e-4, atol=1e-6)
        assert (after[first:].std(dim=0) > 0.005).any()  # they began within a hundredth of the old rows' spread


def test_rewards_train_on_items_alone_and_a_resume_changes_no_bit(folder: Path, learned: Path) -> None:
    words = ("--pretrain", str(model_of(learned)), "--rollout_batch_size", "4", "--n_samples_per_prompt", "4")
    words += ("--actor_learning_rate", "0.01", "--train_batch_size", "16", "--rollout_log_interval", "1")
    words += ("--temperature", "2", "--genrec_reward", "rule,prefix=0.5", "--eval_beams", "3", "--eval_k", "1,3")
    whole = train("rl", folder, "rl", *words, "--max_steps", "3", "--num_trajectories_to_save", "99")
    answers = [json.loads(line) for file in whole.glob("rollouts/*.jsonl") for line in file.read_text().splitlines()]
    assert answers
    assert {answer["response"].removesuffix("<eos>") for answer in answers} <= ITEMS
    evals = [json.loads(line) for line in (whole / "evals.jsonl").read_text().splitlines()]
    assert evals[0]["eval/hr@1"] > 0.3  # of six items one at random has 0.17
    assert evals[0]["eval/hr@1"] == evals[0]["eval/hit@1"] == evals[0]["eval/accuracy"]
    assert evals[0]["eval/hit@1"] < evals[0]["eval/hit@3"] <= 1
    assert read_record(model_of(whole)) == read_record(model_of(learned))
    stopped = train("rl", folder, "rl-stopped", *words, "--max_steps", "2")
    assert main(["resume", str(stopped), "--max_steps", "3"]) == 0
    expected, found = weights(model_of(whole)), weights(model_of(stopped))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_two_ranks_learn_from_the_rewards_of_one(folder: Path, learned: Path) -> None:
    words = ("--pretrain", str(model_of(learned)), "--rollout_batch_size", "4", "--n_samples_per_prompt", "4")
    words += ("--actor_learning_rate", "0.01", "--train_batch_size", "16", "--temperature", "2", "--max_steps", "2")
    one = train("rl", folder, "rl-one", *words)
    given = ["genrec", "rl", "--catalogue", str(folder / "catalogue"), *SHORT, *words, "--nproc", "2"]
    command = [sys.executable, "-m", "rft_cli.main", *given, "--save_path", str(folder / "rl-two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    for file in ("metrics.jsonl", "evals.jsonl"):
        expected, found = (lines_of(run / file) for run in (one, folder / "rl-two"))
        assert len(expected) == len(found) > 0
        for before, after in zip(expected, found, strict=True):
            assert before.keys() == after.keys()
            numbers = {name for name, value in before.items() if isinstance(value, float | int)}
            assert {name: after[name] for name in numbers} == pytest.approx(
                {name: before[name] for name in numbers}, rel=1e-4, abs=1e-6, nan_ok=True
            )
    expected, found = weights(model_of(one)), weights(model_of(folder / "rl-two"))
    for name, tensor in expected.items():
        # a thirtieth of a step of Adam, whose size is the learning rate however small a gradient is
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=3e-4)


def test_a_model_of_other_ids_is_refused(folder: Path, learned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = folder / "other.index.json"
    index.write_text(json.dumps(dict(enumerate(IDS[::-1]))))
    words = ["genrec", "rl", "--catalogue", str(folder / "catalogue"), "--pretrain", str(model_of(learned))]
    assert main([*words, "--sid_index_path", str(index), "--json_errors"]) != 0
    assert "genrec.other_ids" in capsys.readouterr().err


def test_a_stage_is_passed_over_where_nothing_has_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["genrec", "run", "--catalogue", str(folder / "catalogue"), "--stages", "sft"]
    words += ["--save_path", str(folder / "pipeline"), "--sft_options=" + " ".join((*SHORT, *NEW, "--max_steps", "1"))]
    assert main(words) == 0
    assert "stage 2 of 2, sft: begins" in capsys.readouterr().out
    assert main(words) == 0
    assert "stage 2 of 2, sft: options and inputs are unchanged, passed over" in capsys.readouterr().out
