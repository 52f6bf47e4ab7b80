"""Rows of new tokens alone are trained where the ranks divide the matrices: the other rows keep their bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.compare import final_checkpoint, read_rows
from support.references import SAVED_AFTER_SIGNAL, References
from support.runs import ForkServer
from support.setup import TinyTask
from torch import Tensor

pytestmark = pytest.mark.xdist_group("invariants")

FIRST = 5
# a large epsilon, since moments of gradients near 0 would turn sums in another order into steps in another direction;
# a decay that shows in every row that is trained, and would in every other
FLAGS = ("--train_only_tokens_from", str(FIRST), "--l2", "0.5", "--max_steps", "4", "--eval_steps", "0")
# in place of the layers that have a rate of their own in other tests, and are not trained here
FLAGS = (*FLAGS, "--learning_rate", "0.01", "--adam_epsilon", "0.01", "--lr_factors=*embed*=2")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TWO_RANKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tied, fsdp": ("tied", ("--fsdp",)),
    "untied, fsdp from files": ("untied", ("--fsdp", "--meta_init")),
    "untied, zero 1": ("untied", ("--zero_stage", "1")),
    "tied, zero 2": ("tied", ("--zero_stage", "2")),
    "tied, parts": ("tied", ("--tp_size", "2")),
    "untied, parts in blocks": ("untied", ("--tp_size", "2", "--fsdp")),
}
"""Model and strategy; the ways there that `CHANGES` goes are not here."""
CHANGES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], int]] = {
    "fsdp goes on": ("untied", ("--fsdp",), (), 2),
    "zero 2 to one process": ("untied", ("--zero_stage", "2"), ("--zero_stage", "0"), 1),
    "replicas to zero 3": ("tied", (), ("--zero_stage", "3"), 2),
    "parts to zero 1": ("untied", ("--tp_size", "2"), ("--tp_size", "1", "--zero_stage", "1"), 2),
    "zero 3 to parts": ("untied", ("--zero_stage", "3"), ("--zero_stage", "0", "--tp_size", "2"), 2),
}
"""Model, strategies before and after the stop, ranks after it."""


def words(task: TinyTask, model: Path, run: Path, *more: str) -> list[str]:
    return task.words("sft", run, "--pretrain", str(model), *FLAGS, *more)


def weights(run: Path) -> dict[str, Tensor]:
    """Of the final checkpoint, from as many files as wrote them."""
    found: dict[str, Tensor] = {}
    for file in sorted((final_checkpoint(run) / "model").glob("*.safetensors")):
        found |= load_file(file)
    return found


def state_names(run: Path) -> set[str]:
    """Of the optimizer's tensors, over the files of all ranks; blocks without their place."""
    folder = final_checkpoint(run) / "state"
    files = [*folder.glob("optimizer.safetensors"), *folder.glob("optimizer/*.safetensors")]
    return {name.partition("@")[0] for file in files for name in load_file(file)}


def compare(found: Path, one: Path, model: Path) -> None:
    before, ours, theirs = load_file(model / "model.safetensors"), weights(found), weights(one)
    assert ours.keys() == theirs.keys()
    for name, tensor in before.items():
        trained = FIRST if name in (EMBEDDING, HEAD) else len(tensor)
        assert torch.equal(ours[name][:trained], tensor[:trained]), f"{name}: rows that are not trained"
        if trained < len(tensor):
            assert bool((ours[name][trained:] != tensor[trained:]).any(1).all()), f"{name}: every row is trained"
            assert float((ours[name] - theirs[name]).abs().max()) < 1e-6, name
    assert state_names(found) == state_names(one)
    for row, other in zip(read_rows(found / "metrics.jsonl"), read_rows(one / "metrics.jsonl"), strict=True):
        for name in ("policy/gradient_norm", "policy/learning_rate"):
            assert row[name] == pytest.approx(other[name], rel=1e-5), f"step {row['step']} {name}"


def untied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    assert config["tie_word_embeddings"]
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {HEAD: tensors[EMBEDDING].flip(1).contiguous()}, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def ones(server: ForkServer, task: TinyTask, references: References) -> dict[str, tuple[Path, Path]]:
    """By whether the output matrix is the embedding or one of its own: the model, and the run of one process."""
    plain = task.folder / "untrained"
    models = {"tied": plain, "untied": untied(plain, task.folder / "untied")}
    made = {name: (model, references.folder / f"rows_of_one_{name}") for name, model in models.items()}
    for model, path in made.values():
        server.must_finish(*words(task, model, path))
    return made


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_train_the_new_rows_as_one_process_and_leave_the_others(
    server: ForkServer, task: TinyTask, ones: dict[str, tuple[Path, Path]], runs: Path, case: str
) -> None:
    kind, strategy = TWO_RANKS[case]
    model, one = ones[kind]
    server.must_finish(*words(task, model, runs / "run", *strategy), num_ranks=2)
    compare(runs / "run", one, model)


@pytest.mark.parametrize("change", CHANGES)
def test_the_moments_of_the_rows_go_on_under_another_strategy(
    server: ForkServer, task: TinyTask, ones: dict[str, tuple[Path, Path]], runs: Path, change: str
) -> None:
    kind, begun, continued, num_ranks = CHANGES[change]
    model, one = ones[kind]
    stop = [("signal_rank_at", [1, "sft.logged", 2, "SIGTERM"])]
    stopped = server.run(*words(task, model, runs / "run", *begun), preludes=stop, num_ranks=2)
    assert (stopped.code, *stopped.other_codes) == (SAVED_AFTER_SIGNAL,) * 2, stopped.output[-3000:]
    server.must_finish("resume", str(runs / "run"), *continued, num_ranks=num_ranks)
    compare(runs / "run", one, model)
