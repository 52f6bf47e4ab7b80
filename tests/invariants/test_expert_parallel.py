"""Experts that two ranks hold together: the steps of a run whose only rank holds all, and runs that go on as the other.

Losses, norms, the routers' numbers and the weights after the last step, in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.compare import final_checkpoint, read_rows, relative_distance
from support.references import SAVED_AFTER_SIGNAL
from support.runs import ForkServer
from torch import Tensor

pytestmark = pytest.mark.xdist_group("invariants")

SHAPE = ("--hidden_size", "16", "--num_layers", "2", "--num_heads", "2", "--max_seq_len", "24", "--tokenizer", "char")
SHAPE = (*SHAPE, "--use_moe", "--num_experts", "4")
FLAGS = ("--held_out_share", "0.2", "--train_batch_size", "5", "--max_steps", "4", "--learning_rate", "3e-3")
FLAGS = (*FLAGS, "--save_steps", "2", "--eval_steps", "2", "--save_interval", "0", "--router_z_loss_coef", "0.001")
DIVIDED = ("--ep_size", "2")
KINDS = {
    "qwen3_moe": ("--family", "qwen3_moe", "--aux_loss_coef", "0.01"),
    "mixtral, computed again": ("--family", "mixtral", "--aux_loss_coef", "0.01", "--gradient_checkpointing"),
    "dots1, by a bias": ("--family", "dots1", "--shared_experts", "1", "--balance_bias_rate", "0.01"),
    "an average": ("--family", "qwen3_moe", "--enable_ema", "--adam_offload"),
}
COMPARED = ("sft/loss", "policy/gradient_norm", "router/z_loss", "router/max_violation", "router/entropy")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some documents, several to a window and several windows to one."""
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    parts = [f"{n} and {n + 1} are {2 * n + 1}. " * (1 + 5 * (n % 3 == 0)) for n in range(24)]
    file.write_text("|".join(parts))
    return file


def words(text: Path, run: Path, *more: str) -> list[str]:
    given = ["pretrain", "--prompt_data", str(text), "--text_separator", "|", "--save_path", str(run)]
    return [*given, "--data_store_path", str(text.parent / "tokens"), *SHAPE, *FLAGS, *more]


def weights(run: Path) -> list[Tensor]:
    """Of the final checkpoint, by the names in its files."""
    found: dict[str, Tensor] = {}
    for file in sorted((final_checkpoint(run) / "model").glob("*.safetensors")):
        found |= load_file(file)
    return [found[name] for name in sorted(found)]


def require_same_run(run: Path, other: Path) -> None:
    rows, expected = (read_rows(each / "metrics.jsonl") for each in (run, other))
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [1, 2, 3, 4]
    for row, its in zip(rows, expected, strict=True):
        for name in COMPARED:
            assert row[name] == pytest.approx(its[name], rel=1e-5, abs=1e-7), f"step {row['step']} {name}"
    assert relative_distance(weights(run), weights(other)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_divided_experts_take_the_steps_of_one_rank(server: ForkServer, text: Path, runs: Path, kind: str) -> None:
    server.must_finish(*words(text, runs / "one", *KINDS[kind]))
    server.must_finish(*words(text, runs / "two", *KINDS[kind], *DIVIDED), num_ranks=2)
    require_same_run(runs / "two", runs / "one")
    measured, expected = (read_rows(runs / name / "evals.jsonl") for name in ("two", "one"))
    for row, its in zip(measured, expected, strict=True):
        assert row["eval/loss"] == pytest.approx(its["eval/loss"], rel=1e-5)


def test_a_run_goes_on_with_whole_experts_and_back(server: ForkServer, text: Path, runs: Path) -> None:
    kind = KINDS["dots1, by a bias"]
    server.must_finish(*words(text, runs / "one", *kind))
    stop = [("signal_rank_at", [1, "pretrain.logged", 2, "SIGTERM"])]
    stopped = server.run(*words(text, runs / "gathered", *kind, *DIVIDED), preludes=stop, num_ranks=2)
    assert (stopped.code, *stopped.other_codes) == (SAVED_AFTER_SIGNAL,) * 2, stopped.output[-3000:]
    server.must_finish("resume", str(runs / "gathered"), "--ep_size", "1")
    require_same_run(runs / "gathered", runs / "one")
    alone = [("signal_at", ["pretrain.logged", 2, "SIGTERM"])]
    ended = server.run(*words(text, runs / "divided", *kind), preludes=alone)
    assert ended.code == SAVED_AFTER_SIGNAL, ended.output[-3000:]
    server.must_finish("resume", str(runs / "divided"), *DIVIDED, num_ranks=2)
    require_same_run(runs / "divided", runs / "one")


def test_pairs_of_ranks_are_copies_of_one_another(server: ForkServer, text: Path, runs: Path) -> None:
    """On 4 ranks an expert has two owners, and of 5 windows some rank has more than the others."""
    kind = KINDS["qwen3_moe"]
    server.must_finish(*words(text, runs / "one", *kind))
    server.must_finish(*words(text, runs / "four", *kind, *DIVIDED, "--micro_train_batch_size", "1"), num_ranks=4)
    require_same_run(runs / "four", runs / "one")
