"""Words of `rft-train plan`: its own options and those of the command that it plans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rft.planning.cluster.hardware import Cluster, parse_cluster
from rft.planning.known_models import FAMILIES
from rft.planning.run_plan import SHARDING_NAMES, PlanRequest
from rft_cli.config.recipes import machine_of, names, with_command
from rft_cli.records.discovery import default_command, with_training
from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names

_NUMBERS = ("world_size", "nodes", "gpus_per_node", "gpu_memory")
_TEXTS = ("sharding", "largest", "model_tflops", "cluster", "model_size")


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
    cluster: Cluster | None = None
    """Whose strategies are compared; None = the plan of a run as it is."""
    model_size: str = ""
    """A published model in the place of `pretrain`, with `cluster`; empty = that of the settings."""


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
    if "cluster" in texts or "model_size" in texts:
        _refuse_beside_cluster(texts, [*numbers, *texts], by_formula=by_formula, words=rest)
        cluster = parse_cluster(texts["cluster"])
        request = PlanRequest({}, model_tflops=_rate(texts))
        return Asked(command, request, as_json, rest, cluster=cluster, model_size=texts.get("model_size", ""))
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


def _refuse_beside_cluster(
    texts: Mapping[str, str], given: Sequence[str], *, by_formula: bool, words: Sequence[str]
) -> None:
    """Refuse what does not go with the strategies of a cluster."""
    if "cluster" not in texts:
        why = "a published model is planned on a cluster"
        raise _refused("plan.no_cluster", "--model_size without --cluster", why, "--cluster 64xH100")
    others = [name for name in given if name not in ("cluster", "model_size", "model_tflops")]
    if others or by_formula:
        name = others[0] if others else "by_formula"
        why = "a cluster says its machines, and its strategies are gone through, by formula"
        raise _refused("plan.two_machines", f"--cluster beside --{name}", why, f"leave {name} out")
    if "model_size" in texts:
        _refuse_model("--model_size", words)


def _refuse_model(flag: str, words: Sequence[str]) -> None:
    """Refuse a model beside published ones that take its place."""
    given = next((word for word in words if word.partition("=")[0] in ("--pretrain", "--model_name_or_path")), "")
    if given:
        why = "published models take the place of one model"
        raise _refused("plan.two_models", f"{flag} beside {given}", why, f"leave {given} out")


def _refuse_family(request: PlanRequest, words: Sequence[str]) -> None:
    """Refuse what does not go with the models of a family."""
    if "gpu_memory" not in request.numbers:
        why = "what fits depends on the memory of a GPU"
        raise _refused("plan.no_memory", "--largest without --gpu_memory", why, "--gpu_memory 24")
    _refuse_model("--largest", words)


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
