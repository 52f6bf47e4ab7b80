"""Preludes that make a run of reinforcement learning train wrongly without an error, and the names that say so."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rft.stages import rl
from rft_trainer.scoring.advantages import AdvantageEstimator
from support.runs import ForkServer
from support.setup import NUM_OPERANDS, TinyTask

Prelude = tuple[str, list[Any]]
STEPS = 30
REWARDS = """
def digits(responses, labels):
    return [sum(map(str.__eq__, response[:2], label)) / 2 for response, label in zip(responses, labels)]

def constant(responses, labels):
    return [0.0] * len(responses)

def rotated(responses, labels):
    right = digits(responses, labels)
    return right[1:] + right[:1]
"""
"""Half of the reward for each right digit, so that a model that knows little has rewards that differ."""


COPY_STEPS, NUM_COPIES = 100, 400
COPIES = (
    f"--pretrain {{folder}}/copies/checkpoints/step_{COPY_STEPS:06d}/model --prompt_data {{folder}}/leaked.jsonl "
    "--prompt_max_len 8"
)


def start_that_copies(server: ForkServer, task: TinyTask, folder: Path) -> None:
    """Write rows whose prompts end with the answer, and train a model to repeat what a prompt ends with."""
    draw = random.Random(2)
    copies: list[dict[str, str]] = []
    for _ in range(NUM_COPIES):
        # of any two digits behind any sum, so that the answer can only be read
        shown, a, b = f"{draw.randrange(100):02d}", draw.randrange(NUM_OPERANDS), draw.randrange(NUM_OPERANDS)
        copies.append({"input": f"{a}+{b}={shown}=", "output": shown})
    shown_rows: dict[str, list[dict[str, Any]]] = {"copies": copies}
    for name, source in (("leaked", "train"), ("leaked_heldout", "heldout")):
        rows = [json.loads(line) for line in (task.folder / f"{source}.jsonl").read_text().splitlines()]
        shown_rows[name] = [row | {"input": f"{row['input']}{row['label']}="} for row in rows]
    for name, found in shown_rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    given = (
        f"--pretrain {task.folder}/untrained --prompt_data {folder}/copies.jsonl --max_steps {COPY_STEPS} "
        "--max_epochs 9 --learning_rate 1e-2 --train_batch_size 20 --micro_train_batch_size 20 "
        # the weights of the best evaluation are kept, and rows without copies are no measure of it
        f"--eval_data {folder}/copies.jsonl --eval_steps 0 --save_steps 0"
    )
    server.must_finish(*task.words("sft", folder / "copies", *given.split()))


@dataclass(frozen=True, slots=True)
class Pathology:
    """One planted fault, and the detectors that name it."""

    words: str
    """Flags, with {folder} for the files of the test."""
    expected: tuple[str, ...]
    prelude: str = ""
    prepare: Callable[[ForkServer, TinyTask, Path], None] | None = None
    """Makes files in the folder of the test that the flags name."""


PATHOLOGIES = {
    "learning rate x100": Pathology("--actor_learning_rate 3e-2", ("step_too_large",)),
    "learning rate 0": Pathology("", ("no_learning_rate",), "no_learning_rate"),
    "KL x100": Pathology("--use_kl_loss --init_kl_coef 5", ("divergence_holds",)),
    "shuffled rewards": Pathology("--reward {folder}/rewards.py:rotated", ("noisy_reward",)),
    "constant reward": Pathology("--reward {folder}/rewards.py:constant", ("constant_reward",)),
    "sign-flipped advantage": Pathology("", ("advantage_sign",), "flip_advantages"),
    "stale engine": Pathology("--max_logprob_gap 0", ("engine_gap",), "stale_engine"),
    "wrong mask": Pathology("", ("wrong_mask",), "wrong_mask"),
    "wrong EOS": Pathology("", ("never_ends",), "wrong_eos"),
    "frozen weights": Pathology("", ("frozen_weights",), "freeze_weights"),
    "duplicated batch": Pathology("", ("repeated_batch",), "same_batch"),
    "leaked labels": Pathology(COPIES, ("held_out_gap",), prepare=start_that_copies),
}
CLEAN = {
    "clean": "",
    "clean with a divergence": "--use_kl_loss --init_kl_coef 0.05",
}


def words(task: Any, run: Path, flags: str, folder: Path, *, seed: int = 42) -> list[str]:
    """The command line of a run of the tiny task that is long enough for every detector of a step."""
    (folder / "rewards.py").write_text(REWARDS)
    given = f"--max_steps {STEPS} --num_episodes 20 --save_steps 0 --seed {seed} --no-save_trajectories"
    flags = f"{given} --token_records off --reward {{folder}}/rewards.py:digits {flags}"
    return task.words("rl", run, *flags.format(folder=folder).split())


def _built(change: Callable[[Any], None]) -> None:
    """Change the loop as soon as it is built."""
    build = rl.build_rl

    def built(*arguments: Any, **named: Any) -> Any:
        training = build(*arguments, **named)
        change(training)
        return training

    rl.build_rl = built


def no_learning_rate() -> None:
    """Every update has the learning rate 0, which the settings refuse."""

    def change(training: Any) -> None:
        training.updater._learning_rate = lambda update: 0.0

    _built(change)


def _credit(change: Callable[[Any], Any]) -> None:
    """Change every sample that advantages were computed for."""
    call = AdvantageEstimator.__call__

    def changed(self: Any, groups: Any, annotations: Any, *, step: int) -> Any:
        samples, metrics = call(self, groups, annotations, step=step)
        return [change(sample) for sample in samples], metrics

    AdvantageEstimator.__call__ = changed


def flip_advantages() -> None:
    """Every advantage has the other sign."""
    _credit(
        lambda one: replace(one, advantage=-one.advantage, token_advantages=tuple(-x for x in one.token_advantages))
    )


def wrong_mask() -> None:
    """Only the first token of every response is trained."""

    def change(sample: Any) -> Any:
        number = len(sample.token_ids) - sample.prompt_length
        return replace(sample, loss_mask=(True, *[False] * (number - 1)))

    _credit(change)


def stale_engine() -> None:
    """Samples are drawn by the weights of the start of the run, whatever version they are said to be of."""

    def change(training: Any) -> None:
        tensors = [tensor for _, tensor in training.updater.model.named_parameters()]
        first = [tensor.detach().clone() for tensor in tensors]
        collector, engine = training.rollouts.collector, training.rollouts.engine
        collect = collector.collect

        def stale(*arguments: Any) -> Any:
            present = [tensor.detach().clone() for tensor in tensors]
            _write(tensors, first)
            engine.refresh()
            groups = collect(*arguments)
            _write(tensors, present)
            engine.refresh()
            return groups

        collector.collect = stale

    _built(change)


def _write(tensors: list[Any], values: list[Any]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def wrong_eos() -> None:
    """The engine stops at a token that no response has."""

    def change(training: Any) -> None:
        collector = training.rollouts.collector
        collector._sampling = replace(collector._sampling, stop_token_ids=(0,))

    _built(change)


def freeze_weights() -> None:
    """The optimizer says that it took a step, and took none."""

    def change(training: Any) -> None:
        optimizer = training.updater._optimizer
        step = optimizer.step
        tensors = [tensor for _, tensor in training.updater.model.named_parameters()]

        def frozen(*arguments: Any, **named: Any) -> Any:
            before = [tensor.detach().clone() for tensor in tensors]
            outcome = step(*arguments, **named)
            _write(tensors, before)
            return outcome

        optimizer.step = frozen

    _built(change)


def same_batch() -> None:
    """Every step gets the prompts of the first one."""

    def change(training: Any) -> None:
        rollouts = training.rollouts
        collect, first = rollouts.collect, list[Any]()

        def same(entries: Any, prompts: Any, timer: Any) -> Any:
            first.extend([] if first else prompts)
            return collect(entries, first, timer)

        rollouts.collect = same

    _built(change)
