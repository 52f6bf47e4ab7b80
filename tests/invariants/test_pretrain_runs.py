"""Pre-training: killed and continued to the bit, the same on ranks and however a step is divided, and usable after."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compare import differences, final_checkpoint, read_rows
from support.references import KILLED, SAVED_AFTER_SIGNAL, Restarts
from support.runs import ForkServer

pytestmark = pytest.mark.xdist_group("invariants")

SHAPE = ("--hidden_size", "16", "--num_layers", "2", "--num_heads", "2", "--max_seq_len", "24", "--tokenizer", "char")
FLAGS = ("--held_out_share", "0.2", "--train_batch_size", "5", "--max_epochs", "2", "--learning_rate", "3e-3")
FLAGS = (*FLAGS, "--save_steps", "3", "--max_ckpt_num", "9", "--eval_steps", "4", "--save_interval", "0")
DIVIDED = {
    "replicas": (2, ()),
    "fsdp": (2, ("--fsdp",)),
    "zero 2": (2, ("--zero_stage", "2")),
    "smaller micro-batches": (1, ("--micro_train_batch_size", "2")),
    "not packed": (1, ("--no-packing_samples", "--micro_train_batch_size", "3")),
}
KINDS = {"gated": (), "dropout": ("--dropout", "0.2"), "mixture": ("--use_moe", "--num_experts", "4")}


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


@pytest.fixture(scope="module")
def reference(server: ForkServer, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    run = tmp_path_factory.mktemp("reference") / "run"
    server.must_finish(*words(text, run))
    return run


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGKILL"])
def test_a_run_that_is_ended_and_continued_is_the_run_that_was_not(
    server: ForkServer, text: Path, reference: Path, runs: Path, ending: str
) -> None:
    restarts = Restarts(server, words(text, runs / "run"), runs / "run")
    ended = restarts.start([("signal_at", ["pretrain.logged", 5, ending])]).wait()
    assert ended.code == (SAVED_AFTER_SIGNAL if ending == "SIGTERM" else KILLED), ended.output[-3000:]
    restarts.finish()
    assert restarts.resumes == 1
    assert differences(reference, runs / "run") == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_decoder_goes_on_to_the_bit(server: ForkServer, text: Path, runs: Path, kind: str) -> None:
    server.must_finish(*words(text, runs / "one", *KINDS[kind]))
    restarts = Restarts(server, words(text, runs / "run", *KINDS[kind]), runs / "run")
    restarts.start([("signal_at", ["pretrain.logged", 4, "SIGKILL"])]).wait()
    restarts.finish()
    assert differences(runs / "one", runs / "run") == []


@pytest.mark.parametrize("way", DIVIDED)
def test_a_step_is_the_same_however_it_is_divided(
    server: ForkServer, text: Path, reference: Path, runs: Path, way: str
) -> None:
    num_ranks, flags = DIVIDED[way]
    server.must_finish(*words(text, runs / "run", *flags), num_ranks=num_ranks)
    expected, found = (read_rows(run / "metrics.jsonl") for run in (reference, runs / "run"))
    assert len(found) == len(expected) > 8
    for row, other in zip(found, expected, strict=True):
        for name in ("sft/loss", "policy/gradient_norm", "data/samples"):
            # sums in another order; the first steps agree to the last digits
            assert row[name] == pytest.approx(other[name], rel=1e-4), f"step {row['step']} {name}"
    measured, others = (read_rows(run / "evals.jsonl") for run in (runs / "run", reference))
    for row, other in zip(measured, others, strict=True):
        assert row["eval/bits_per_byte"] == pytest.approx(other["eval/bits_per_byte"], rel=1e-4)


def test_muon_on_blocks_takes_the_steps_of_replicas_and_goes_on_to_the_bit(
    server: ForkServer, text: Path, runs: Path
) -> None:
    muon = ("--optimizer", "muon", "--max_epochs", "1")
    server.must_finish(*words(text, runs / "replicas", *muon), num_ranks=2)
    server.must_finish(*words(text, runs / "one", *muon, "--fsdp"), num_ranks=2)
    expected, found = (read_rows(runs / name / "metrics.jsonl") for name in ("replicas", "one"))
    assert [row["sft/loss"] for row in found] == pytest.approx([row["sft/loss"] for row in expected], rel=1e-4)
    step = len(found) - 2
    preludes = [("signal_at", ["pretrain.logged", step, "SIGKILL"])]
    ended = server.run(*words(text, runs / "run", *muon, "--fsdp"), preludes=preludes, num_ranks=2)
    assert ended.code == KILLED
    server.must_finish("resume", str(runs / "run"), num_ranks=2)
    resumed = read_rows(runs / "run" / "metrics.jsonl")
    for name in ("step", "sft/loss", "policy/gradient_norm"):
        assert [row[name] for row in resumed] == [row[name] for row in found]


def test_what_it_writes_is_trained_further(server: ForkServer, text: Path, reference: Path, runs: Path) -> None:
    model = final_checkpoint(reference) / "model"
    flags = (
        "--data_store_path",
        str(text.parent / "tokens"),
        "--text_separator",
        "|",
        "--max_steps",
        "1",
        "--save_path",
        str(runs / "on"),
    )
    server.must_finish("pretrain", "--pretrain", str(model), "--prompt_data", str(text), *flags)
    server.must_finish("resume", str(runs / "on"), "--max_steps", "2")
    before = read_rows(reference / "metrics.jsonl")[0]["sft/loss"]
    assert read_rows(runs / "on" / "metrics.jsonl")[0]["sft/loss"] < before - 0.1
    (runs / "rows.jsonl").write_text('{"input": "1 and 2 are ", "output": "3."}\n' * 4)
    rows = ("--prompt_data", str(runs / "rows.jsonl"), "--max_steps", "1", "--save_path", str(runs / "sft"))
    server.must_finish("sft", "--pretrain", str(model), *rows)
