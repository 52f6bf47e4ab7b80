"""Training of reward models: killed and continued to the bit, the same on ranks and under strategies, and usable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.compare import differences, final_checkpoint, read_rows, relative_distance
from support.references import KILLED, SAVED_AFTER_SIGNAL, Restarts
from support.rm_runs import rm_words, write_rows
from support.runs import ForkServer
from support.setup import TinyTask
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_models.critic.causal_critic import load_critic
from rft_models.reward_model.loading import load_reward_model

pytestmark = pytest.mark.xdist_group("invariants")

HEADS = ("--heads_types", "right,short", "--pooling_method", "attn", "--probing_layer", "1", "--scale_for_train")
FLAGS = ("--max_epochs", "2", "--save_steps", "3", "--max_ckpt_num", "9")
FLAGS = (*FLAGS, "--learning_rate", "3e-3", "--eval_steps", "4", "--tie_margin", "0.2", "--margin_key", "margin")
FLAGS = (*FLAGS, "--weight_key", "weight", "--center_rewards_coefficient", "0.01", "--save_interval", "0")
STRATEGIES = {"replicas": (), "fsdp": ("--fsdp",), "packed": ("--packing_samples",), "zero 2": ("--zero_stage", "2")}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums with the right and a wrong result, in either order, and ties."""
    folder = tmp_path_factory.mktemp("pairs")
    rows: list[dict[str, object]] = []
    for n in range(44):
        a, b = n % 7, n // 7
        answers = [f"{a + b:02d}", f"{(a + b + 1 + n % 3) % 13:02d}"]
        first = answers[::-1] if n % 4 == 1 else answers
        right = "B" if n % 4 == 1 else "C" if n % 10 == 0 else "A"
        rows.append(
            {
                **{"input": f"{a}+{b}=", "chosen": first[0], "rejected": first[1], "right": right},
                **{"short": None if n % 3 else "A", "margin": n % 2 / 10, "weight": 1 + n % 2},
            }
        )
    return write_rows(folder, rows, 34)


def words(task: TinyTask, pairs: Path, run: Path, *more: str) -> list[str]:
    outcomes = () if "--heads_types" in more else ("--outcome_key", "right")
    return rm_words(task, pairs, run, *FLAGS, *more, *outcomes)


@pytest.fixture(scope="module")
def reference(server: ForkServer, task: TinyTask, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with one head that nothing interrupts."""
    run = tmp_path_factory.mktemp("reference") / "run"
    server.must_finish(*words(task, pairs, run))
    return run


def weights(run: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted((final_checkpoint(run) / "model").glob("*.safetensors")):
        found |= load_file(file)
    return found


def update(run: Path) -> list[Tensor]:
    """What training added to each weight, by name, after the state before the first step."""
    before, after = load_file(run / "checkpoints" / "step_000000" / "model" / "model.safetensors"), weights(run)
    return [after[name] - before[name] for name in sorted(before)]


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGKILL"])
def test_a_run_that_is_ended_and_continued_is_the_run_that_was_not(
    server: ForkServer, task: TinyTask, pairs: Path, reference: Path, runs: Path, ending: str
) -> None:
    restarts = Restarts(server, words(task, pairs, runs / "run"), runs / "run")
    ended = restarts.start([("signal_at", ["rm.logged", 5, ending])]).wait()
    assert ended.code == (SAVED_AFTER_SIGNAL if ending == "SIGTERM" else KILLED), ended.output[-3000:]
    restarts.finish()
    assert restarts.resumes == 1
    assert differences(reference, runs / "run") == []


def test_several_heads_on_a_layer_go_on_to_the_bit(server: ForkServer, task: TinyTask, pairs: Path, runs: Path) -> None:
    server.must_finish(*words(task, pairs, runs / "one", *HEADS))
    restarts = Restarts(server, words(task, pairs, runs / "run", *HEADS), runs / "run")
    restarts.start([("signal_at", ["rm.logged", 4, "SIGKILL"])]).wait()
    restarts.finish()
    assert differences(runs / "one", runs / "run") == []
    rows = read_rows(runs / "one" / "metrics.jsonl")
    assert {"rm/accuracy_right", "rm/accuracy_short"} <= rows[0].keys()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_take_the_steps_of_one(
    server: ForkServer, task: TinyTask, pairs: Path, reference: Path, runs: Path, strategy: str
) -> None:
    server.must_finish(*words(task, pairs, runs / "run", *STRATEGIES[strategy]), num_ranks=2)
    expected, found = (read_rows(run / "metrics.jsonl") for run in (reference, runs / "run"))
    assert len(found) == len(expected) == 8
    for row, other in zip(found, expected, strict=True):
        for name in row:
            if name.startswith("rm/") or name == "policy/gradient_norm":
                # sums in another order; the first steps agree to the last digits
                assert row[name] == pytest.approx(other[name], rel=5e-5, abs=1e-6), f"step {row['step']} {name}"
    assert found[0]["rm/loss"] == pytest.approx(expected[0]["rm/loss"], rel=1e-6)
    if strategy not in ("fsdp", "zero 2"):  # several files
        assert relative_distance(update(runs / "run"), update(reference)) < 1e-3
    assert weights(runs / "run").keys() == weights(reference).keys()
    for row, other in zip(read_rows(runs / "run" / "evals.jsonl"), read_rows(reference / "evals.jsonl"), strict=True):
        assert row["eval/loss"] == pytest.approx(other["eval/loss"], rel=1e-5)


def text(ids: tuple[int, ...]) -> PackedTokens:
    tokens = torch.tensor(ids)
    return PackedTokens(tokens, torch.arange(len(ids)), torch.zeros_like(tokens))


def test_what_a_run_writes_is_a_classifier_a_critic_and_a_reward_model(reference: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    directory, ids = final_checkpoint(reference) / "model", (3, 5, 7, 2, 4)
    expected = float(load_reward_model(directory).scores(text(ids))["score"].detach())
    theirs = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    with torch.no_grad():
        assert float(theirs(input_ids=torch.tensor([ids])).logits) == pytest.approx(expected, abs=1e-5)
    critic = load_critic(directory, seed=0)
    assert critic.head_was_loaded
    # the value before the token behind the text is read from the state that the score is read from
    assert float(critic.values(text((*ids, 1)))[-1].detach()) == pytest.approx(expected, abs=1e-5)


def test_a_policy_learns_on_the_model_with_it_as_its_critic_too(
    server: ForkServer, task: TinyTask, reference: Path, runs: Path
) -> None:
    model = str(final_checkpoint(reference) / "model")
    more = ("--reward=", "--reward_pretrain", model, "--critic_pretrain", model, "--advantage_estimator", "gae")
    server.must_finish(*task.words("rl", runs / "run", *more, "--max_steps", "1", "--eval_data="))
    assert read_rows(runs / "run" / "metrics.jsonl")[0]["critic/loss"] > 0


def test_a_reward_model_is_trained_on_with_its_own_head(
    server: ForkServer, task: TinyTask, pairs: Path, reference: Path, runs: Path
) -> None:
    before = final_checkpoint(reference) / "model"
    again = words(task, pairs, runs / "run", "--max_steps", "1")
    again[again.index("--pretrain") + 1] = str(before)
    server.must_finish(*again)
    first = load_file(runs / "run" / "checkpoints" / "step_000000" / "model" / "model.safetensors")
    assert torch.equal(first["score.weight"], load_file(before / "model.safetensors")["score.weight"])
    refused = server.run(*again[:-2], *HEADS, "--save_path", str(runs / "other"))
    assert refused.code == 2
    assert "a reward model is trained on with the head that it has" in refused.output
