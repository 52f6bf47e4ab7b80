"""`rft-train plan`: the ranks, batches and memory of a run on machines that are not here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rft.config.command_record import TrainingRecord
from rft.config.commands import load
from rft.planning.known_models import FAMILIES
from rft.planning.largest_model import fits_of_family
from rft.planning.run_plan import SHARDING_NAMES, PlanRequest, plan_run
from rft.resolved import Resolved
from rft_cli.config.recipes import machine_of, names, with_command
from rft_cli.config.resolve import resolve
from rft_cli.pages.plan import as_object, fit_lines, lines
from rft_cli.records.discovery import default_command, prepared, training_of, with_training
from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
from rft_core.terminal_text import visible

USAGE = """usage: rft-train plan [COMMAND | RECIPE] [--world_size N] [--nodes N] [--gpus_per_node N] [OPTIONS]

Say what every rank of the command would do and hold, without a GPU, a process group or the weights: the grid of
ranks, each rank's share of a batch, and its memory: weights, gradients and optimizer by formula, activations and
logits from a step that is traced on tensors without values. COMMAND is one that trains, {default} without a word;
OPTIONS are its own. RECIPE stands for its command and --config, and says its machines itself. Numbers that contradict
one another are refused as at the real start. With images_key the headers of some images are read, for what they come to
in tokens.

  --world_size N      ranks in all
  --nodes N           machines
  --gpus_per_node N   GPUs of each machine, a rank each
  --gpu_memory N      GiB of each GPU: say what of it is left
  --sharding KIND     replicated (as trained now), or by division: zero1, zero2, zero3, fsdp
  --by_formula        bound activations and logits by formula: at once, without torch
  --largest FAMILY    {families}: the models of a family with the settings of the command, the smallest
                      first, up to the first that does not fit --gpu_memory; by formula, and without --pretrain
  --model_tflops N    10^12 operations a second of a device in training, as a run measured them
                      (time/model_tflops): say the samples a minute of a command that only trains
  --json              one JSON object"""

_NUMBERS = ("world_size", "nodes", "gpus_per_node", "gpu_memory")
_TEXTS = ("sharding", "largest", "model_tflops")


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line, sorted into the plan's own options and those of the command."""

    command: str
    request: PlanRequest
    as_json: bool
    words: list[str]
    """Options of the command."""
    family: str = ""
    """Of `FAMILIES`: its models are gone through; empty = the plan of one model."""


def run(argv: list[str]) -> int:
    """Print the plan; a run that could not start is refused with the error of the start."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(USAGE.format(default=default_command(), families=", ".join(FAMILIES)))
        return 0
    asked = sort_words(argv)
    training = training_of(asked.command)
    if asked.family:
        print(_family(asked, training))
        return 0
    plan = plan_run(asked.request, prepared(training, resolve(asked.command, asked.words)), load(training.workload))
    print(json.dumps(as_object(plan)) if asked.as_json else visible("\n".join(lines(plan))))
    return 0


def _family(asked: Asked, training: TrainingRecord) -> str:
    """Return the page of the models of a family."""

    def resolved(model: Path) -> Resolved[Any]:
        return prepared(training, resolve(asked.command, [*asked.words, "--pretrain", str(model)]))

    fits = list(fits_of_family(asked.family, asked.request, resolved, load(training.workload)))
    if asked.as_json:
        return json.dumps({"family": asked.family, "models": [asdict(fit) for fit in fits]})
    return visible("\n".join(fit_lines(asked.family, asked.request, fits)))


def sort_words(argv: Sequence[str]) -> Asked:
    """The plan's own options, wherever they stand, and the rest."""
    words = with_command(argv, with_training())
    command = words.pop(0) if words and not words[0].startswith("-") else default_command()
    if command not in with_training():
        why = f"it plans commands that train, {', '.join(with_training())}, and recipes of these"
        near = nearest_names(command, [*with_training(), *names()], count=1)
        do = f"rft-train plan {near[0]}" if near else "rft-train plan --help"
        raise _refused("plan.unknown_command", f"plan cannot plan {command!r}", why, do)
    numbers: dict[str, int] = {}
    texts: dict[str, str] = {}
    as_json, by_formula, rest = False, False, list[str]()
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if word == "--json":
            as_json = True
        elif word in ("--by_formula", "--by-formula"):
            by_formula = True
        elif word.startswith("--") and name in (*_NUMBERS, *_TEXTS):
            value = value if equals else (words.pop(0) if words else "")
            if name in _TEXTS:
                texts[name] = value
            elif value.isdecimal():
                numbers[name] = int(value)
            else:
                raise _refused("option.bad_value", f"--{name} = {value!r}", "it counts: an integer is needed")
        else:
            rest.append(word)
    for name, allowed in (("sharding", SHARDING_NAMES), ("largest", tuple(FAMILIES))):
        if name in texts and texts[name] not in allowed:
            raise _refused("option.bad_value", f"--{name} = {texts[name]!r}", f"it is one of {', '.join(allowed)}")
    request = _of_machine(numbers, texts.get("sharding", ""), rest)
    request = replace(request, traced=not by_formula, model_tflops=_rate(texts))
    family = texts.get("largest", "")
    if family:
        _refuse_family(request, rest)
    return Asked(command, request, as_json, rest, family)


def _rate(texts: Mapping[str, str]) -> float:
    text = texts.get("model_tflops", "")
    try:
        rate = float(text or "0")
    except ValueError:
        rate = math.nan
    if not math.isfinite(rate) or rate < 0 or (rate == 0 and "model_tflops" in texts):
        raise _refused("option.bad_value", f"--model_tflops = {text!r}", "it is a rate: a number above 0 is needed")
    return rate


def _refuse_family(request: PlanRequest, words: Sequence[str]) -> None:
    """Refuse what does not go with the models of a family."""
    if "gpu_memory" not in request.numbers:
        why = "what fits depends on the memory of a GPU"
        raise _refused("plan.no_memory", "--largest without --gpu_memory", why, "--gpu_memory 24")
    given = next((word for word in words if word.partition("=")[0] in ("--pretrain", "--model_name_or_path")), "")
    if given:
        why = "the models of the family take the place of one model"
        raise _refused("plan.two_models", f"--largest beside {given}", why, f"leave {given} out")


def _of_machine(numbers: dict[str, int], sharding: str, words: Sequence[str]) -> PlanRequest:
    """The request, with what a recipe says of its machines: other ranks than its own leave its grid out."""
    machine, name = machine_of(words)
    asks_for_ranks = bool(set(numbers) - {"gpu_memory"})
    added = {
        number: value
        for number, value in machine.items()
        if number not in numbers and not (asks_for_ranks and number != "gpu_memory")
    }
    return PlanRequest(numbers | added, sharding, dict.fromkeys(added, f"recipe {name}"))


def _refused(code: str, what: str, why: str, do: str = "rft-train plan --help") -> OptionsError:
    return OptionsError(code=code, what=what, where="command line", why=why, do=do)
