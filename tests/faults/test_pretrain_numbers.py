"""Pre-training that meets numbers which are not finite: the row and the module are named, and no weight changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.compare import checkpoints, final_checkpoint, read_rows, same_bits
from support.references import References
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

NUMERICS = 7
FLAGS = ("--max_steps", "6", "--save_steps", "1", "--eval_steps", "0", "--patience", "0", "--held_out_share", "0")
FLAGS = (*FLAGS, "--dropout", "0", "--max_ckpt_num", "9")
NO_BUDGET = ("--max_rows_set_aside", "0", "--max_refused_steps", "0")
SIX_LAYERS = (*FLAGS, "--num_layers", "6")


def faults_of(run: Path) -> list[dict[str, Any]]:
    return [fault for row in read_rows(run / "numerics.jsonl") for fault in row["faults"]]


def test_an_inf_of_layer_5_names_it_and_the_rows_changes_no_bit_and_comes_again_in_a_new_process(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    run, planted = runs / "run", [("spoil_an_output", ["layers.5", 7, float("inf")])]
    ended = server.run(*task.words("pretrain", run, *SIX_LAYERS, *NO_BUDGET), preludes=planted)
    assert ended.code == NUMERICS, ended.output[-3000:]
    [fault] = faults_of(run)
    assert fault["stage"] == "output of model.layers.5"
    assert str(fault["samples"][0]) in ended.output
    clean, last = references.run("pretrain", *SIX_LAYERS), final_checkpoint(run)
    for file in ("model/model.safetensors", "state/optimizer.safetensors"):
        found, expected = load_file(last / file), load_file(clean / "checkpoints" / last.name / file)
        assert all(same_bits(found[name], tensor) for name, tensor in expected.items()), file
    # the last checkpoint is all that it takes to see the same again; rows behind it are written anew
    first = read_rows(run / "numerics.jsonl")
    again = server.run("resume", str(run), preludes=planted)
    assert again.code == NUMERICS, again.output[-3000:]
    assert read_rows(run / "numerics.jsonl") == first
    server.must_finish("resume", str(run))


def test_nan_on_one_rank_is_skipped_by_both_and_their_weights_stay_the_same(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    words = task.words("pretrain", runs / "run", *FLAGS, "--max_rows_set_aside", "0", "--weight_check_steps", "1")
    server.must_finish(*words, preludes=[("spoil_rank_in_update", [1, 3])], num_ranks=2)
    rows = read_rows(runs / "run" / "metrics.jsonl")
    assert [row["policy/updates_refused"] for row in rows] == [0, 0, 1, 0, 0, 0]
    weights = [load_file(path / "model/model.safetensors") for path in checkpoints(runs / "run")]
    assert all(same_bits(weights[3][name], tensor) for name, tensor in weights[2].items())
    assert not all(same_bits(weights[4][name], tensor) for name, tensor in weights[3].items())


def test_a_learning_rate_of_1e12_ends_the_run_and_leaves_a_finite_checkpoint(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    few = ("--max_steps", "20", "--save_steps", "1", "--eval_steps", "1", "--patience", "50", "--dropout", "0")
    words = task.words("pretrain", runs / "run", *few, "--learning_rate", "1e12", "--lr_warmup_steps", "0")
    ended = server.run(*words)
    assert ended.code == NUMERICS, ended.output[-3000:]
    rows = read_rows(runs / "run" / "metrics.jsonl")
    assert len(rows) < 20
    assert all(row["sft/loss"] != 0 for row in rows)
    before, *after = [row["eval/loss"] for row in read_rows(runs / "run" / "evals.jsonl")]
    assert all(loss is None or loss != 0 for loss in after)
    for path in checkpoints(runs / "run"):
        assert all(t.isfinite().all() for t in load_file(path / "model/model.safetensors").values()), path.name
    state = json.loads((final_checkpoint(runs / "run") / "state" / "early_stop.json").read_text())
    assert state["best"] >= min(loss for loss in [before, *after] if loss is not None)


def test_one_bad_window_of_a_thousand_is_left_out_and_counted(
    server: ForkServer, task: TinyTask, runs: Path, tmp_path: Path
) -> None:
    lines = [f"{n} and {n + 1} are {2 * n + 1}. " for n in range(1000)]
    (text := tmp_path / "thousand.txt").write_text("".join(lines))
    few = ("--prompt_data", str(text), "--dropout", "0", "--train_batch_size", "50", "--max_epochs", "1")
    few = (*few, "--micro_train_batch_size", "50", "--max_samples", "1000", "--eval_steps", "0", "--save_steps", "0")
    for name, faults in (("clean", []), ("run", [("spoil_rows", ["policy", [500]])])):
        server.must_finish(*task.words("pretrain", runs / name, *few), preludes=faults)
    assert len(faults_of(runs / "run")) == 1
    rows, others = (read_rows(runs / name / "metrics.jsonl") for name in ("run", "clean"))
    assert rows[-1]["policy/rows_set_aside"] == 1
    assert sum(row["policy/updates_refused"] for row in rows) == 0
    measured = [read_rows(runs / name / "evals.jsonl")[-1]["eval/loss"] for name in ("run", "clean")]
    assert measured[0] == pytest.approx(measured[1], rel=0.01)
    assert len(rows) == len(others)
