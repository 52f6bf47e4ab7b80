"""Reward of a run: function, in-process reward models, servers and judge, as one `Reward`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from rft.build.judge import JudgeFacts, judge_facts
from rft.build.reward_parts import columns_of, has_images, require_image_rewards, waiting_endpoint
from rft.decoder_sizes import model_sizes
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import Machine, choose_device
from rft.reward_kinds import REWARD_KINDS, build_order
from rft.reward_names import (
    CODE,
    NamedPlace,
    function_name,
    heads_of,
    model_places,
    refuse_unknown_weights,
    server_places,
    weights_of,
)
from rft.settings import EvalSettings, RlSettings
from rft_core.errors import OptionsError
from rft_models.reward_model.loading import load_reward_model
from rft_models.reward_model.model import RewardModel
from rft_models.reward_model.scorer import RewardTextScorer
from rft_trainer.installed_tasks.discovery import package_of, refuse_built_in, task_names
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import Reward, RewardItem
from rft_trainer.rewards.code import code_limits
from rft_trainer.rewards.combined import CombinedReward, RewardComponent
from rft_trainer.rewards.in_process import IN_PROCESS
from rft_trainer.rewards.registry import reward_by_name, reward_names
from rft_trainer.rewards.reward_model import ModelReward
from rft_trainer.rewards.servers.remote_reward_model import RemoteReward
from rft_trainer.rewards.user_function import RewardTrial
from rft_trainer.workers.limits import user_code_limits

FunctionRuns = Literal["here", "algebra in processes", "processes", "sandboxes"]
_SHARE_OF_GPU = 0.1
_MADE_UP = "a made-up response"


def build_reward(
    settings: RlSettings | EvalSettings,
    machine: Machine,
    *,
    function: Reward | None = None,
    columns: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Reward:
    """Build every reward that the settings name, ready to score.

    Args:
        settings: of a command.
        machine: with the device of reward models.
        function: takes the place of the named function.
        columns: those of the data, each with a row that lacks it, or "".
        log: file for what a function of a user prints.

    Raises:
        OptionsError: names that contradict one another, a function that cannot be called, heads without weights.
        DataError: a directory that is no reward model or judge.
        ServiceError: a server that does not answer.
    """
    require_image_rewards(settings)
    weights = weights_of(settings.reward)
    if weights is not None and function is None:
        refuse_unknown_weights(settings, weights)
    # a part that cannot be built ends those before it, whose processes and connections would remain
    with ExitStack() as built:
        parts: list[RewardComponent] = []

        def add(part: RewardComponent) -> None:
            built.callback(part.reward.close)
            parts.append(part)

        name = function_name(settings)
        if function is not None or name:
            add(_function_part(settings, name, function, columns or {}, log))
        for kind in build_order():
            for part in kind.build(settings, machine):
                add(part)
        _refuse_equal_names([part.name for part in parts])
        # all parts were built: from here the reward closes them
        built.pop_all()
    return parts[0].reward if len(parts) == 1 and weights is None else CombinedReward(parts, weights)


def check_reward(settings: RlSettings, prompts: Sequence[Prompt]) -> RewardTrial | None:
    """Check function and servers as the start would; no model's weights are loaded.

    Returns:
        A call of the user's function with the first prompt; None where there is no such function.
    """
    require_image_rewards(settings)
    name, trial = function_name(settings), None
    if name:
        # made and closed at once: a function that cannot be imported shows itself here
        reward = _function_part(settings, name, None, columns_of(prompts)).reward
        try:
            # of a function that is no user's there is nothing to look at
            call = getattr(reward, "trial", None)
            trial = call(trial_items(prompts[0])) if call is not None else None
        finally:
            reward.close()
    for kind in build_order():
        kind.check(settings)
    return trial


def trial_items(prompt: Prompt) -> list[RewardItem]:
    """Return two responses to a prompt for a trial: its label as a text, and one that is made up."""
    item = RewardItem(
        prompt_id=prompt.prompt_id,
        prompt_text=prompt.text,
        response_text=_MADE_UP,
        label=prompt.label,
        finish_reason="stop",
        num_tokens=1,
        messages=prompt.messages,
        media=prompt.media,
        columns=prompt.columns,
    )
    right = item.label_text
    return [item] if right is None else [replace(item, response_text=right), item]


@dataclass(frozen=True, slots=True)
class RewardModelFacts:
    """A reward model of this process, read from its files without its weights."""

    name: str
    directory: str
    num_bytes: int
    heads: Mapping[str, float]
    """The weight of each head."""


@dataclass(frozen=True, slots=True)
class RewardFacts:
    """The parts of a run's reward, before anything is loaded."""

    function: str
    """Name of the function; empty without one."""
    function_runs: FunctionRuns
    """Where it runs: in this process, there but for hard comparisons, in processes that can be killed, or in sandboxes
    with the programs of the responses."""
    package: str
    """The package that has the function, where that is the reward of an installed task; else empty."""
    models: tuple[RewardModelFacts, ...]
    models_stay: bool
    """On the device between their phases."""
    device: str
    servers: tuple[NamedPlace, ...]
    judge: JudgeFacts | None
    others: tuple[str, ...]
    """Kinds that have no figures of their own here, each with its flags."""
    weights: Mapping[str, float] | None
    """Of the parts by name; None where all count once."""
    num_parts: int


def reward_facts(settings: RlSettings) -> RewardFacts:
    """Return the parts of the reward that the settings name.

    Raises:
        OptionsError: as `build_reward`; no weight is read and no server is asked.
        DataError: a directory that is no reward model or judge.
    """
    names = _names(settings)
    _refuse_equal_names(names)
    require_image_rewards(settings)
    device = choose_device(settings.model.device, 0)
    directories = model_places(settings.reward_models)
    weights = weights_of(settings.reward)
    if weights is not None:
        refuse_unknown_weights(settings, weights)
    models = tuple(
        RewardModelFacts(named.name, named.location, _num_bytes(settings, named), heads_of(named, weights))
        for named in directories
    )
    name = function_name(settings)
    return RewardFacts(
        function=name.removeprefix(IN_PROCESS),
        function_runs=_where_it_runs(name),
        package=package_of(name) if name in task_names() else "",
        models=models,
        models_stay=not directories or _models_stay(settings, directories, device),
        device=device,
        servers=tuple(server_places(settings.reward_models)),
        judge=judge_facts(settings),
        others=tuple(
            f"{kind.name}: {', '.join(f'{flag} = {value}' for flag, value in kind.values(settings).items())}"
            for kind in REWARD_KINDS
            if kind.settings_type and kind.values(settings)
        ),
        weights=weights,
        num_parts=len(names),
    )


def _where_it_runs(function: str) -> FunctionRuns:
    if function == "exact" or function.startswith(IN_PROCESS):
        return "here"
    if function == CODE:
        return "sandboxes"
    return "algebra in processes" if function in reward_names() else "processes"


def _names(settings: RlSettings) -> list[str]:
    """Return the names of the parts, as `build_reward` calls them."""
    names = [function_name(settings).rpartition(":")[2]] if function_name(settings) else []
    return [*names, *(name for kind in build_order() for name in kind.names(settings))]


def _function_part(
    settings: RlSettings | EvalSettings,
    name: str,
    function: Reward | None,
    columns: Mapping[str, str],
    log: Path | None = None,
) -> RewardComponent:
    if function is not None:
        # of the rewards that a script may give, the one that calls a function of its own
        bind_columns = getattr(function, "bind_columns", None)
        if bind_columns is not None:
            bind_columns(columns)
        return RewardComponent(str(getattr(function, "name", "reward_fn")), function)
    chosen = settings.reward
    # a name that is written down; the built-in default means nothing else, whatever is installed
    if chosen.reward:
        refuse_built_in(name, reward_names(), flag="--reward")
    limits = user_code_limits(chosen.reward_memory, chosen.reward_variables)
    reward = reward_by_name(
        name,
        num_workers=chosen.reward_workers,
        timeout=chosen.reward_timeout,
        limits=limits,
        columns=columns,
        log=log,
        code=code_limits(chosen.code_seconds, chosen.code_memory),
    )
    return RewardComponent(name.rpartition(":")[2], reward)


def server_components(commands: RlSettings | EvalSettings, machine: Machine | None = None) -> list[RewardComponent]:
    """Make one component a URL, each server tried once: on a prompt with an image where prompts may hold some."""
    del machine
    settings = commands.reward_models
    parts: list[RewardComponent] = []
    for server in server_places(settings):
        reward = RemoteReward(
            server.name,
            waiting_endpoint(
                settings, server.location, f"the reward server {server.name}", f"--remote_rm_url {server.location}"
            ),
            batch_size=settings.remote_rm_batch_size,
            concurrency=settings.remote_rm_concurrency,
        )
        reward.start(with_image=has_images(commands))
        parts.append(RewardComponent(server.name, reward, waits=True))
    return parts


def model_components(settings: RlSettings | EvalSettings, machine: Machine) -> list[RewardComponent]:
    """Load one reward model a directory."""
    weights = weights_of(settings.reward)
    directories = model_places(settings.reward_models)
    stays = _models_stay(settings, directories, machine.device)
    parts: list[RewardComponent] = []
    for named in directories:
        heads = heads_of(named, weights)
        model = load_reward_model(
            named.location,
            dtype=weights_dtype(settings.model.bf16),
            device=machine.device,
            flash_attn=getattr(settings.model, "flash_attn", False),
        )
        model.model.requires_grad_(False)
        model.head.requires_grad_(False)
        scorer = RewardTextScorer(model, max_tokens=settings.reward_models.reward_batch_tokens)
        phase = nullcontext if stays else partial(_visit, model, machine.device)
        # moved away before the next one is loaded: all of them at once may not fit
        if not stays:
            model.to("cpu")
        parts.append(RewardComponent(named.name, ModelReward(named.name, scorer, heads, phase=phase)))
    return parts


@contextmanager
def _visit(model: RewardModel, device: str) -> Generator[None]:
    """Keep the model on the device while the block runs."""
    model.to(device)
    try:
        yield
    finally:
        model.to("cpu")
        # otherwise freed blocks stay in torch's cache, where the engine's process cannot use them
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()


def _models_stay(settings: RlSettings | EvalSettings, models: Sequence[NamedPlace], device: str) -> bool:
    """Return True when the models stay on the device between their phases; on a CPU always."""
    asked = settings.reward_models.reward_offload
    if torch.device(device).type == "cpu":
        return True
    if asked != "auto":
        return asked == "held"
    # of the whole memory, since the free part differs from rank to rank
    memory = int(torch.cuda.mem_get_info(device)[1])
    return sum(_num_bytes(settings, model) for model in models) <= _SHARE_OF_GPU * memory


def _num_bytes(settings: RlSettings | EvalSettings, model: NamedPlace) -> int:
    return model_sizes(Path(model.location))[0].parameters * (2 if settings.model.bf16 else 4)


def _refuse_equal_names(names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionsError(
            code="reward.two_of_a_name",
            what=f"two rewards are called {twice!r}",
            where="--reward, --reward_pretrain, --remote_rm_url",
            why="metrics and weights are looked up by these names",
            do=f"NAME=DIR or NAME=URL with another name than {twice}",
        )
