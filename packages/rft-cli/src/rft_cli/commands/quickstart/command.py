"""`rft-train quickstart`: reinforcement fine-tuning that can be watched, on a CPU and without a download.

A tokenizer and a small decoder are built on the spot, warmed up by supervised training on additions (or on questions
about drawn images, with a vision model), and then trained by GRPO with a reward that checks the answer. Everything
is an ordinary run: the data are files in the run directory, both stages use recipes, and `eval`, `resume` and `runs`
work on it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from rft.process import stage_ranks as ranks
from rft.process.cores import may_have_gpu, usable_cores
from rft_cli.commands.quickstart.tasks import TASKS, Task
from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
from rft_trainer.runs.directory import RUN_MARKS, RunDirectory
from rft_trainer.runs.names import run_name
from rft_trainer.runs.reader import read_run

USAGE = """usage: rft-train quickstart [--task NAME] [--seed N] [--save_path DIR] [--control NAME] [--nproc N]

Build a small model, warm it up on additions such as 47+25=072, then improve it by reinforcement
learning (GRPO) with a reward that checks the answer. Two CPU cores, a few minutes, no download.

  --task NAME        additions (default); images: a model that sees answers questions about drawn images;
                     calculator: one that learns to call a tool; guess-number: one that learns to heed hints
  --seed N           start of every random draw (default 0)
  --save_path DIR    directory of the run (default runs/quickstart-<date>-<word>)
  --control NAME     an experiment to compare with, from the same warm start:
                     shuffled_rewards (the rewards change places within each group, so they say nothing)
                     shuffled_images (with --task images: each prompt gets another prompt's image)
                     noisy_answers (with --task calculator or guess-number: the answers say nothing)
                     sft (supervised training goes on instead, for --seconds)
  --seconds S        how long --control sft trains (default 120)
  --steps N          steps of reinforcement learning, to stop early (default: the recipe's)
  --nproc N          processes that share the samples of a step (default: 2 for the additions, where two cores
                     are usable, else 1)"""

CONTROLS = ("none", "shuffled_rewards", "shuffled_images", "noisy_answers", "sft")
WARMUP_STEPS = 36
WARM_START, CHOICES = "warm_start", "choices.json"
"""Names in the run's directory; the second is written when everything before the warm-up is there."""


@dataclass(frozen=True, slots=True)
class QuickstartOptions:
    """Choices of a person for a quickstart."""

    seed: int = 0
    save_path: str = ""
    control: str = "none"
    seconds: float = 120.0
    steps: int = 0
    task: str = "additions"
    nproc: int = 0
    """Processes that share the samples of a step; 0: as many as are quickest on this machine."""

    @property
    def learned(self) -> Task:
        """The task that is trained on."""
        return TASKS[self.task]


def run(argv: list[str]) -> int:
    """Build, warm up, train, report."""
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    choices = parse(argv)
    path = Path(choices.save_path or Path("runs") / run_name("quickstart", under=Path("runs")))
    if not ranks.is_started_rank():
        # a warm-up alone makes the directory a run already
        RunDirectory(path).refuse_existing(marks=(*RUN_MARKS, WARM_START))
        # what another start has left would tell the other ranks that everything is there
        (path / CHOICES).unlink(missing_ok=True)
        words = argv if choices.save_path else [*argv, "--save_path", str(path)]
        code = ranks.started(["quickstart", *words], _num_ranks(choices), path / "logs")
        if code is not None:
            return code
    _one_thread()
    if ranks.is_first():
        prepare(path, choices)
    else:
        ranks.wait_for(path / CHOICES)
    command = ["rft-train", "quickstart", *argv]
    _warm_up(path, choices, command, fresh=True)
    _second_stage(path, choices, command)
    return 0


def _num_ranks(choices: QuickstartOptions) -> int:
    # two ranks cannot share a GPU, and one alone needs no second process
    return choices.nproc or (1 if may_have_gpu() else min(choices.learned.ranks, usable_cores()))


def _one_thread() -> None:
    """Use one torch thread: a model this small gains a fifth from a second, and loses tenfold on a busy core."""
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)


def parse(argv: list[str]) -> QuickstartOptions:
    """Flags to choices; all problems name what is allowed."""
    values: dict[str, str] = {}
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    position = 0
    while position < len(words):
        name = words[position].removeprefix("--").replace("-", "_")
        if not words[position].startswith("--") or name not in QuickstartOptions.__slots__:
            near = nearest_names(name, list(QuickstartOptions.__slots__))
            raise _refused(
                f"unknown option {words[position]}", f"--{near[0]}" if near else "rft-train quickstart --help"
            )
        if position + 1 == len(words):
            raise _refused(f"--{name} needs a value", "rft-train quickstart --help")
        values[name] = words[position + 1]
        position += 2
    choices = QuickstartOptions(
        seed=_number(values, "seed", 0),
        save_path=values.get("save_path", ""),
        control=values.get("control", "none"),
        seconds=float(_number(values, "seconds", 120)),
        steps=_number(values, "steps", 0),
        task=values.get("task", "additions"),
        nproc=_number(values, "nproc", 0),
    )
    if choices.task not in TASKS:
        raise _refused(f"--task {choices.task} is not one of {', '.join(TASKS)}", "--task images")
    if choices.control == "shuffled_images" and choices.task != "images":
        raise _refused(f"--control shuffled_images with --task {choices.task}, which has none", "--task images")
    if choices.control == "noisy_answers" and not choices.learned.noisy:
        raise _refused(f"--control noisy_answers with --task {choices.task}, where nobody answers", "--task calculator")
    if choices.control not in CONTROLS:
        raise _refused(f"--control {choices.control} is not one of {', '.join(CONTROLS)}", "--control shuffled_rewards")
    return choices


def _number(values: dict[str, str], name: str, default: int) -> int:
    text = values.get(name, str(default))
    if not text.isdecimal():
        raise _refused(f"--{name} {text} is not a whole number of at least 0", f"--{name} {default}")
    return int(text)


def _refused(what: str, do: str) -> OptionsError:
    return OptionsError(
        code="option.quickstart", what=what, where="command line", why="see rft-train quickstart --help", do=do
    )


def prepare(path: Path, choices: QuickstartOptions) -> None:
    """Write the data files and the untrained model; the same seed writes the same bytes."""
    made = choices.learned.prepare(path, choices.seed)
    stored = {name: value for name, value in asdict(choices).items() if name != "save_path"}
    # written last: with it, a resume relies on data and model being complete
    (path / CHOICES).write_text(json.dumps(stored))
    print(made, flush=True)  # here and below: what is logged meanwhile goes to a stream without a buffer


def _warm_up(path: Path, choices: QuickstartOptions, command: list[str], *, fresh: bool) -> None:
    """Train on demonstrations until the model is right about half of the time."""
    from rft_cli.commands import training
    from rft_cli.config.resolve import resolve

    directory = path / WARM_START
    task = choices.learned
    words = [*_data_words(path, task.sft_recipe, task.demonstrations), "--pretrain", str(path / "untrained")]
    words += ["--seed", str(choices.seed)]
    words += ["--save_path", str(directory)]
    print(f"1. warm-up: supervised training on {task.about}\n", flush=True)
    resolved = resolve("sft", words)
    training.train(resolved, command, in_place=None if fresh else directory, show_end=False)


def _data_words(path: Path, recipe: str, name: str = "train") -> list[str]:
    return ["--config", recipe, "--prompt_data", str(path / "data" / f"{name}.jsonl")]


def _more_supervised(path: Path, choices: QuickstartOptions, command: list[str]) -> None:
    """Run the control: supervised training from the warm start for as long as was asked."""
    from rft.run_lifecycle import final_model
    from rft_cli.commands import eval as eval_command
    from rft_cli.commands import training
    from rft_cli.config.resolve import resolve

    # the speed of this machine, from the steps of the warm-up
    seconds = read_run(path / WARM_START).series("time/step")
    seconds_a_step = sum(seconds) / len(seconds)
    steps = max(1, round(choices.seconds / seconds_a_step))
    print(f"\n2. control: {steps:,} more steps of supervised training, about {choices.seconds:g} s\n", flush=True)
    directory = path / "control_sft"
    words = _data_words(path, choices.learned.sft_recipe, choices.learned.demonstrations)
    words += ["--pretrain", str(final_model(path / WARM_START))]
    words += ["--seed", str(choices.seed), "--save_path", str(directory)]
    # no target ends it before its time
    words += ["--max_epochs", str(steps), "--max_steps", str(steps), "--target_loss", "0", "--eval_steps", "500"]
    training.train(resolve("sft", words), command, show_end=False)
    for name in ("warm_start", "control_sft"):
        ranks.meet_anew()
        print(f"\nheld-out accuracy of {name}:", flush=True)
        words = ["--pretrain", str(final_model(path / name)), "--eval_data", str(path / "data" / "heldout.jsonl")]
        eval_command.run([*words, *choices.learned.eval_words])


def _second_stage(path: Path, choices: QuickstartOptions, command: list[str]) -> None:
    ranks.meet_anew()
    if choices.control == "sft":
        _more_supervised(path, choices, command)
        return
    from rft.run_lifecycle import final_model
    from rft_cli.commands import training
    from rft_cli.config.resolve import resolve

    print(f"\n2. reinforcement learning: {choices.learned.second}\n", flush=True)
    words = [*_data_words(path, choices.learned.rl_recipe), "--pretrain", str(final_model(path / WARM_START))]
    words += ["--eval_data", str(path / "data" / "heldout.jsonl")]
    words += ["--seed", str(choices.seed), "--save_path", str(path)]
    if choices.control == "shuffled_rewards":
        words += ["--shuffle_rewards"]
    if choices.control == "shuffled_images":
        words += ["--shuffle_images"]
    if choices.control == "noisy_answers":
        words += ["--environment", choices.learned.noisy]
    if (
        choices.steps
    ):  # Adam's first steps are the roughest: a short run needs as many of them at a low rate as a long one
        warmup = min(0.3, WARMUP_STEPS / choices.steps)
        words += ["--max_steps", str(choices.steps), "--lr_warmup_ratio", f"{warmup:.3f}"]
    training.train(resolve("rl", words), command)


def resume(path: Path, overrides: list[str]) -> int:
    """Continue whichever stage the run was in."""
    from rft_cli.commands import training
    from rft_cli.config.resolve import resolve

    stored = json.loads((path / CHOICES).read_text())
    choices = QuickstartOptions(**stored, save_path=str(path))
    warm_start = path / WARM_START
    saved = any(warm_start.glob("checkpoints/step_*/manifest.json"))
    is_warm = read_run(warm_start).summary.get("outcome") == "finished" if warm_start.exists() else False
    if not ranks.is_started_rank():
        # without a checkpoint there is nothing to go on from, and nothing is lost
        if warm_start.exists() and not (saved or is_warm):
            print("the warm-up had saved nothing; it starts again")
            shutil.rmtree(warm_start)
        code = ranks.started(["resume", str(path), *overrides], _num_ranks(choices), path / "logs")
        if code is not None:
            return code
    _one_thread()
    command = shlex.split(read_run(path).command) or ["rft-train", "quickstart"]
    # the second stage has begun; its settings are those that it wrote
    if (path / "config.yaml").exists():
        words = ["--config", str(path / "config.yaml"), "--save_path", str(path), *overrides]
        training.train(resolve("rl", words), command, in_place=path)
        return 0
    if not is_warm:
        _warm_up(path, choices, command, fresh=not saved)
    _second_stage(path, choices, command)
    return 0


def root_of(path: Path) -> Path | None:
    """Return the quickstart directory that `path` is, or is the warm-up of; None for any other run."""
    roots = (path, path.parent) if path.name == WARM_START else (path,)
    return next((root for root in roots if (root / CHOICES).is_file()), None)
