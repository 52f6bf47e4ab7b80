"""Pre-training that goes on: killed twice, on other ranks, without its compiler, past a damaged checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compare import checkpoints, differences, final_checkpoint, read_rows, state_records
from support.references import KILLED, SAVED_AFTER_SIGNAL, References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("invariants")

CHECKPOINT, FEW = 5, ("--max_steps", "6", "--eval_steps", "3", "--save_steps", "2", "--max_ckpt_num", "9")
ANOTHER_NUMBER = {"one, then two": (1, 2), "two, then one": (2, 1)}


def test_a_run_killed_within_a_step_and_within_a_save_goes_on_twice_to_the_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    """With dropout; held-out losses, the best of them and the order of the windows are compared too."""
    restarts = Restarts(server, task.words("pretrain", runs / "run", *FEW), runs / "run")
    # three micro-batches a step: the second of step 4, and a file of the second save of the resumed run
    for fault in (("signal_in_micro_batch", [11, "SIGKILL"]), ("signal_at", ["pretrain.logged", 2, "SIGKILL"])):
        assert restarts.start([fault]).wait().code == KILLED
    restarts.finish()
    assert restarts.resumes == 2
    assert differences(references.run("pretrain", *FEW), runs / "run") == []


@pytest.mark.parametrize("way", ANOTHER_NUMBER)
def test_on_another_number_of_ranks_the_windows_and_their_order_are_the_same(
    server: ForkServer, task: TinyTask, references: References, runs: Path, way: str
) -> None:
    before, after = ANOTHER_NUMBER[way]
    stop = [("signal_at", ["pretrain.logged", 3, "SIGTERM"])]
    ended = server.run(*task.words("pretrain", runs / "run", *FEW), preludes=stop, num_ranks=before)
    assert {ended.code, *ended.other_codes} == {SAVED_AFTER_SIGNAL}, ended.output[-3000:]
    server.must_finish("resume", str(runs / "run"), num_ranks=after)
    expected = references.run("pretrain", *FEW)
    assert state_records(runs / "run")["ledger"] == state_records(expected)["ledger"]
    pairs = [read_rows(run / "metrics.jsonl") for run in (runs / "run", expected)]
    for row, other in zip(*pairs, strict=True):
        assert (row["step"], row["data/samples"]) == (other["step"], other["data/samples"])
        assert row["sft/loss"] == pytest.approx(other["sft/loss"], rel=1e-5)


@pytest.mark.night
def test_a_compiled_run_on_two_ranks_goes_on_alone_and_in_eager(server: ForkServer, task: TinyTask, runs: Path) -> None:
    run, stop = runs / "run", ("signal_at", ["pretrain.logged", 2, "SIGTERM"])
    words = task.words("pretrain", run, *FEW, "--dropout", "0", "--compile", "on")
    ended = server.run(*words, preludes=[("compile_with", ["aot_eager"]), stop], num_ranks=2)
    assert {ended.code, *ended.other_codes} == {SAVED_AFTER_SIGNAL}, ended.output[-3000:]
    assert "compile: on" in ended.output
    server.must_finish("resume", str(run), "--compile", "off")
    server.must_finish(*task.words("pretrain", runs / "eager", *FEW, "--dropout", "0"))
    pairs = [read_rows(one / "metrics.jsonl") for one in (run, runs / "eager")]
    for row, other in zip(*pairs, strict=True):
        assert row["sft/loss"] == pytest.approx(other["sft/loss"], rel=1e-4)


def test_a_layer_that_does_not_compile_leaves_the_run_in_eager_with_one_warning(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    flags = (*FEW, "--compile", "on")
    ended = server.must_finish(
        *task.words("pretrain", runs / "run", *flags), preludes=[("break_compilation", ["no such operator"])]
    )
    assert ended.output.count("no such operator") == 1
    assert "compute in eager" in ended.output
    assert differences(references.run("pretrain", *FEW), runs / "run") == []


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on_to_the_bit(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    stop = [("signal_at", ["pretrain.logged", 5, "SIGKILL"])]
    assert server.run(*task.words("pretrain", runs / "run", *FEW), preludes=stop).code == KILLED
    newest = final_checkpoint(runs / "run")
    file = newest / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = int(checkpoints(runs / "run")[-2].name.removeprefix("step_"))
    ended = server.must_finish("resume", str(runs / "run"))
    assert f"skipped a damaged checkpoint: {newest}: model/model.safetensors" in ended.output
    assert f"from step {before};" in ended.output
    assert differences(references.run("pretrain", *FEW), runs / "run") == []


def test_a_checkpoint_that_is_not_there_starts_nothing(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    folder = references.run("pretrain", *FEW)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    missing = ("--load_checkpoint", "--ckpt_path", str(folder / "checkpoints" / "step_000099"))
    ended = server.run(*task.words("pretrain", runs / "run", *FEW, *missing))
    assert ended.code == CHECKPOINT, ended.output
    assert "step_000099" in ended.output
    assert not (runs / "run").exists() or not any((runs / "run").rglob("*.safetensors"))
    assert {path: path.read_bytes() for path in before} == before
