"""The verbs of `rft-train`: one line each, and the module that is imported when the verb is called.

A command module has `run(argv: list[str]) -> int`, which returns the exit code.
"""

from __future__ import annotations

from dataclasses import dataclass

from rft_cli.config.refused_flags import Refusal


@dataclass(frozen=True, slots=True)
class Command:
    """One verb of `rft-train`."""

    name: str
    module: str
    summary: str
    settings: str = ""
    """The command whose settings its flags are (a key of `rft.settings.COMMANDS`); empty if it has none."""
    trains: bool = False
    """Whether it starts runs, which go on without their terminal."""


_ALL = (
    Command(
        "quickstart",
        "rft_cli.commands.quickstart.command",
        "see reinforcement fine-tuning work, on a CPU, without a download",
        trains=True,
    ),
    Command("sft", "rft_cli.commands.sft", "train a model on demonstrations", "sft", trains=True),
    Command("rl", "rft_cli.commands.rl", "train a policy on rewards of its own responses", "rl", trains=True),
    Command("eval", "rft_cli.commands.eval", "score a model on held-out data", "eval"),
    Command("generate", "rft_cli.commands.generate", "answer prompts with a model", "generate"),
    Command(
        "conformance", "rft_cli.commands.conformance", "compare engines with the trainer, token by token", "conformance"
    ),
    Command("build", "rft_cli.commands.build", "create a small model and its tokenizer from scratch", "build"),
    Command("export", "rft_cli.commands.export", "write the model of a checkpoint as a Hugging Face directory"),
    Command("resume", "rft_cli.commands.resume", "continue a run from its newest checkpoint", trains=True),
    Command("check", "rft_cli.commands.check", "show what a command would do, without starting it"),
    Command(
        "plan",
        "rft_cli.commands.plan",
        "compute ranks, batches and memory of a run for machines that are elsewhere",
    ),
    Command("runs", "rft_cli.commands.runs", "list runs, or show one"),
    Command(
        "recipes", "rft_cli.commands.recipes", "list, show or copy configurations that are known to work", trains=True
    ),
)

COMMANDS: dict[str, Command] = {command.name: command for command in _ALL}

_NOT_YET = "not in this version"

REFUSED_COMMANDS: dict[str, Refusal] = {
    "pretrain": Refusal(_NOT_YET, "rft-train sft"),
    "genrec": Refusal(_NOT_YET, "rft-train rl"),
    "dpo": Refusal(_NOT_YET, "rft-train rl"),
    "doctor": Refusal(_NOT_YET, "rft-train check"),
    "report": Refusal(_NOT_YET, "rft-train runs show RUN"),
    "rollouts": Refusal(_NOT_YET, "rft-train runs show RUN"),
    "train": Refusal("it has another name", "rft-train rl"),
    "test": Refusal("it has another name", "rft-train eval"),
}
