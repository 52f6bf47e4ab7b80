"""The rewards that settings name: functions, directories, URLs, heads and weights. No torch is imported here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rft.decoder_sizes import model_sizes
from rft.reward_kinds import REWARD_KINDS
from rft_core.errors import OptionsError
from rft_dist.planning.memory_estimate import GIB
from rft_trainer.installed_tasks.discovery import task_names
from rft_trainer.rewards.in_process import IN_PROCESS
from rft_trainer.rewards.routes import routes_of
from rft_trainer.rewards.rules.table import find_rule
from rft_trainer.rewards.servers.http_client import checked_url
from rft_trainer.settings.rewards import RewardModelSettings, RewardSettings

if TYPE_CHECKING:
    from rft.settings import EvalSettings, RlSettings

CODE = "code"
"""The reward whose labels are unit tests."""

_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)=(.+)")


@dataclass(frozen=True, slots=True)
class NamedPlace:
    """A directory or URL, and the name of its part of the reward."""

    name: str
    location: str


def function_names(settings: RlSettings | EvalSettings) -> list[str]:
    """Return the rewards of every row: those set, else "exact", else (beside a model, routes or a teacher) none."""
    others = any(kind.values(settings) for kind in REWARD_KINDS) or bool(settings.reward.reward_routes)
    # commands that train nothing have no teacher
    teacher = getattr(settings, "teacher", None)
    others = others or bool(teacher and teacher.teacher_pretrain)
    return split_names(settings.reward.reward) or ([] if others else ["exact"])


def routed_names(settings: RlSettings | EvalSettings) -> list[str]:
    """Return the rewards of the rows of some sources, each once.

    Raises:
        OptionsError: routes that cannot be read.
    """
    routes = routes_of(settings.reward)
    return list(routes.names) if routes else []


def all_functions(settings: RlSettings | EvalSettings) -> list[str]:
    """Return the rewards of every row and those of some sources."""
    return [*function_names(settings), *routed_names(settings)]


def are_named(settings: RlSettings | EvalSettings) -> bool:
    """Return whether the parts of functions stand under their names: those of several, and where there are routes."""
    return len(function_names(settings)) > 1 or bool(settings.reward.reward_routes)


def split_names(text: str) -> list[str]:
    """Return the rewards in the value of `reward`.

    Functions of a script are one, and so is a file with a comma in its name.
    """
    # os.path, to which a list of names that is too long for a path is just no file
    if text.startswith(IN_PROCESS) or os.path.isfile(text.rpartition(":")[0]):
        return [text]
    return [name for name in map(str.strip, text.split(",")) if name]


def part_of(name: str) -> str:
    """Return the name that a function's part of the reward has: its own, without file or module."""
    return name.rpartition(":")[2]


def among_others(error: OptionsError, name: str, chosen: RewardSettings) -> OptionsError:
    """Return the error of one reward with a remedy that keeps those beside it."""
    flag, _, meant = error.problem.do.partition(" ")
    if flag != "--reward" or chosen.reward == name:
        return error
    names = split_names(chosen.reward)
    # where no name is near, words that describe one: they hold for either flag
    if " " in meant:
        place = "--reward" if name in names else "--reward_routes"
        return OptionsError.of(replace(error.problem, where=place, do=f"{place} {meant}"))
    if name in names:
        do = "--reward " + ",".join(meant if one == name else one for one in names)
        return OptionsError.of(replace(error.problem, do=do))
    do = f"--reward_routes {quote(chosen.reward_routes.replace(name, meant))}"
    return OptionsError.of(replace(error.problem, where="--reward_routes", do=do))


def has_user_function(settings: RlSettings | EvalSettings) -> bool:
    """Return whether code of a user scores responses: a function of a file, module, script or package, or a server."""
    tasks = task_names()
    names = all_functions(settings)
    return any(":" in name or name in tasks for name in names) or bool(settings.reward_models.remote_rm_url)


def reads_columns(settings: RlSettings | EvalSettings) -> bool:
    """Return whether something may read any column of the rows: code of a user, routes, or a rule that names one."""
    rules = map(find_rule, all_functions(settings))
    return (
        has_user_function(settings)
        or bool(settings.reward.reward_routes)
        or bool(rule_columns(settings))
        or any(rule is not None and rule.reads_rows for rule in rules)
    )


def rule_columns(settings: RlSettings | EvalSettings) -> list[str]:
    """Return the columns that rules read."""
    rules = [rule for name in all_functions(settings) if (rule := find_rule(name)) is not None]
    return [column for rule in rules for name in rule.columns if (column := getattr(settings.reward, name))]


def needs_labels(settings: RlSettings | EvalSettings) -> bool:
    """Return whether a reward function may compare with the label; rules that judge the form alone do not."""
    rules = [find_rule(name) for name in all_functions(settings)]
    return any(rule is None or rule.reads_label for rule in rules)


def model_names(settings: RlSettings | EvalSettings) -> list[str]:
    """Return the names of the reward models of this process."""
    return [named.name for named in model_places(settings.reward_models)]


def server_names(settings: RlSettings | EvalSettings) -> list[str]:
    """Return the names of the reward servers."""
    return [named.name for named in server_places(settings.reward_models)]


def model_places(settings: RewardModelSettings) -> list[NamedPlace]:
    """Return the directories of `reward_pretrain`; one without a name is named after its last part."""
    return named_models(settings.reward_pretrain)


def named_models(text: str) -> list[NamedPlace]:
    """The directories in the value of `reward_pretrain`."""
    return [
        NamedPlace(name or _clean(Path(directory).absolute().name), directory)
        for name, directory in _entries(text, "--reward_pretrain")
    ]


def server_places(settings: RewardModelSettings) -> list[NamedPlace]:
    """Return the servers of `remote_rm_url`; a URL without a name is named after its host."""
    return [
        NamedPlace(name or _clean(str(urlsplit(url).hostname)), checked_url(url, "--remote_rm_url"))
        for name, url in _entries(settings.remote_rm_url, "--remote_rm_url")
    ]


def heads_of(model: NamedPlace, weights: Mapping[str, float] | None) -> dict[str, float]:
    """The weight of each head of a reward model, read from its files without its weights.

    Raises:
        DataError: the directory holds no reward model.
        OptionsError: it has several heads, and neither its files nor `weights` have their weights.
    """
    from rft_models.files.directories import checked_model_directory
    from rft_models.reward_model.loading import spec_in_files

    spec = spec_in_files(*checked_model_directory(model.location))
    if spec.weights is not None:
        return dict(zip(spec.heads, spec.weights, strict=True))
    named = [f"{model.name}/{head}" for head in spec.heads]
    if weights is None:
        raise OptionsError(
            code="reward.heads_without_weights",
            what=f"the reward model {model.location} has the heads {', '.join(spec.heads)}",
            where="--reward_pretrain",
            why="its files do not state the weight of each head in the reward",
            do="--reward_weights " + ",".join(f"{part}=1" for part in named),
        )
    return {head: weights.get(part, 0.0) for head, part in zip(spec.heads, named, strict=True)}


def weights_of(settings: RewardSettings) -> dict[str, float] | None:
    """Return the weights of the reward's parts by name; None where none are given.

    Raises:
        OptionsError: they are no NAME=NUMBER.
    """
    from rft_trainer.scoring.advantages import parse_component_weights

    try:
        return parse_component_weights(settings.reward_weights)
    except ValueError as error:
        raise OptionsError(
            code="option.not_allowed",
            what=f"reward_weights = {settings.reward_weights!r}",
            where="--reward_weights",
            why="it is NAME=NUMBER, several joined by commas",
            do="--reward_weights correctness=0.9,format=0.1",
        ) from error


def refuse_unknown_weights(settings: RlSettings | EvalSettings, weights: Mapping[str, float]) -> None:
    """Refuse weights of parts that the reward cannot have, before anything is scored.

    A user's function gives its parts with its scores, and a server names those below its own name itself: they are
    compared when the first scores arrive.

    Raises:
        OptionsError: a weight names no part.
        DataError: a directory that is no reward model.
    """
    from rft_trainer.rewards.combined import unknown_parts

    names, named = all_functions(settings), are_named(settings)
    rules = [find_rule(name) for name in names]
    if not named and None in rules:
        return
    known = {part_of(name) for name in names} if named else set[str]()
    for rule in filter(None, rules):
        known |= {f"{rule.name}/{part}" for part in rule.parts if part != rule.name} if named else set(rule.parts)
    for kind in REWARD_KINDS:
        known |= set(kind.names(settings))
    for model in model_places(settings.reward_models):
        heads = heads_of(model, weights)
        if len(heads) > 1:
            known = known - {model.name} | {f"{model.name}/{head}" for head in heads}
    # what servers and functions of one's own call the parts of theirs is known with their scores
    own = [part_of(name) for name, rule in zip(names, rules, strict=True) if rule is None]
    below = tuple(f"{name}/" for name in (*server_names(settings), *own))
    unknown = sorted(each for each in weights if each not in known and not each.startswith(below))
    if unknown:
        raise unknown_parts(weights, unknown, known, "nothing was started")


def memory_notes(values: Mapping[str, Any]) -> list[str]:
    """Return notes on the memory of in-process reward models, judge and teacher on a rank, from their config.json."""
    bytes_each = 2 if values["bf16"] else 4
    stay = {"auto": "where a tenth of the GPU holds them all, else for their phase", "held": "all the time"}
    when = stay.get(values["reward_offload"], "for its phase, one after another")
    notes: list[str] = []
    for model in named_models(values["reward_pretrain"]):
        size = model_sizes(model.location)[0].parameters * bytes_each / GIB
        notes.append(f"reward model {model.name}: {size:.3f} GiB more on every rank, {when}")
    if values["judge_pretrain"]:
        size = model_sizes(values["judge_pretrain"])[0].parameters * bytes_each / GIB
        notes.append(f"the judge: {size:.3f} GiB more on every rank, all the time, and its cache while it answers")
    if values.get("teacher_pretrain"):
        size = model_sizes(values["teacher_pretrain"])[0].parameters * bytes_each / GIB
        notes.append(f"the teacher: {size:.3f} GiB more, all the time, sharded among ranks as a reference is")
    return notes


def _entries(text: str, flag: str) -> list[tuple[str, str]]:
    """(name or "", place) of each entry."""
    entries: list[tuple[str, str]] = []
    for word in filter(None, map(str.strip, text.split(","))):
        # a name holds neither ":" nor "/", so the "=" in a URL's query separates nothing
        match = _NAMED.fullmatch(word)
        entries.append((match[1], match[2]) if match else ("", word))
    if text and not entries:
        raise OptionsError(
            code="option.not_allowed",
            what=f"{flag.removeprefix('--')} = {text!r}",
            where=flag,
            why="it names one place, or several joined by commas",
            do=f"leave {flag} out",
        )
    return entries


def _clean(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip("._-") or "model"
