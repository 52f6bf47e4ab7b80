"""Reward of a run: function, in-process reward models, servers and judge, as one `Reward`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rft.build.judge import JudgeFacts, judge_facts
from rft.build.reward_parts import columns_of, has_images, require_image_rewards, waiting_endpoint
from rft.decoder_sizes import model_sizes
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import Machine, choose_device
from rft.reward_kinds import REWARD_KINDS, build_order
from rft.reward_names import (
    NamedPlace,
    all_functions,
    among_others,
    are_named,
    function_names,
    heads_of,
    model_places,
    part_of,
    refuse_unknown_weights,
    server_places,
    weights_of,
)
from rft.settings import EvalSettings, RlSettings
from rft_core.errors import OptionsError
from rft_models.reward_model.loading import load_reward_model
from rft_models.reward_model.model import RewardModel
from rft_models.reward_model.scorer import RewardTextScorer
from rft_models.reward_model.step_scorer import StepTextScorer
from rft_trainer.installed_tasks.discovery import package_of, refuse_built_in, task_names
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import Reward, RewardItem
from rft_trainer.rewards.combined import CombinedReward, NoReward, RewardComponent
from rft_trainer.rewards.in_process import IN_PROCESS
from rft_trainer.rewards.named import NamedReward
from rft_trainer.rewards.registry import reward_by_name, reward_names
from rft_trainer.rewards.reward_model import ModelReward, StepModelReward
from rft_trainer.rewards.routed import RoutedReward, Routes
from rft_trainer.rewards.routes import routes_of
from rft_trainer.rewards.rules.table import RuleRuns, find_rule
from rft_trainer.rewards.servers.remote_reward_model import RemoteReward
from rft_trainer.rewards.user_function import RewardTrial
from rft_trainer.scoring.repeated_reward import (
    DECLARE,
    EXACT,
    OF_A_SERVER,
    RepeatedReward,
    order_and_spread,
    second_look,
)
from rft_trainer.settings.rewards import RewardSettings
from rft_trainer.workers.limits import user_code_limits

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

        for part in _functions(settings, function, columns or {}, log):
            add(part)
        for kind in build_order():
            for part in kind.build(settings, machine):
                add(part)
        _refuse_equal_names([name for part in parts for name in part.part_names])
        # all parts were built: from here the reward closes them
        built.pop_all()
    if not parts and weights is None:
        return NoReward()
    return parts[0].reward if len(parts) == 1 and weights is None else CombinedReward(parts, weights)


def check_reward(settings: RlSettings, prompts: Sequence[Prompt]) -> list[RewardTrial]:
    """Check functions and servers as the start would, and return a call of each function with the first prompt.

    No model's weights are loaded.
    """
    require_image_rewards(settings)
    columns, routes = columns_of(prompts), routes_of(settings.reward)
    trials = [_trial(settings, name, prompts[0], columns) for name in function_names(settings)]
    if routes is not None:
        trials += _routed_trials(settings, routes, prompts, columns)
    for kind in build_order():
        kind.check(settings)
    return trials


def _routed_trials(
    settings: RlSettings, routes: Routes, prompts: Sequence[Prompt], columns: Mapping[str, str]
) -> list[RewardTrial]:
    """Return a call of each reward of the routes with a row of its own.

    Where there is no such row, the reward is made all the same, and judges the first row.
    """
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        for name in routes.of(routes.source_of(prompt.columns, prompt.source)) or ():
            first.setdefault(name, prompt)
    return [_trial(settings, name, first.get(name, prompts[0]), columns) for name in routes.names]


def _trial(settings: RlSettings, name: str, prompt: Prompt, columns: Mapping[str, str]) -> RewardTrial:
    """Return a call of a reward: a function of a user says itself what it was given."""
    # made and closed at once: a function that cannot be imported shows itself here
    reward, items = _made(settings.reward, name, columns), trial_items(prompt)
    try:
        call = getattr(reward, "trial", None)
        if call is not None:
            return _looked_at(call(items), reward, items, settings)
        return RewardTrial(
            written=f"the rule {part_of(name)}, on {prompt.prompt_id}",
            place="",
            arguments={"label": prompt.label},
            responses=tuple(item.response_text for item in items),
            scores=tuple(reward(items)),
            traceback="",
            printed="",
        )
    finally:
        reward.close()


def _looked_at(trial: RewardTrial, reward: Reward, items: Sequence[RewardItem], settings: RlSettings) -> RewardTrial:
    """Return the trial with what is remarkable in its scores, for which the function is called once or twice more."""
    repeats = "" if settings.reward.reward_random else second_look(reward, items, trial.scores)
    notes = (f"it {repeats} ({DECLARE})" if repeats else "", order_and_spread(items, trial.scores))
    return replace(trial, notes=tuple(filter(None, notes)))


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
class RewardFunctionFacts:
    """One of the reward functions, before anything is loaded."""

    name: str
    runs: RuleRuns
    """Where it runs: in this process, there but for hard comparisons, or in processes that can be killed."""
    package: str
    """The package that has it, where it is the reward of an installed task; else empty."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of a rule, by name."""
    sources: tuple[str, ...] = ()
    """Whose rows it judges, where it has a route; empty: every row."""


@dataclass(frozen=True, slots=True)
class RewardFacts:
    """The parts of a run's reward, before anything is loaded."""

    functions: tuple[RewardFunctionFacts, ...]
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
    return RewardFacts(
        functions=_function_facts(settings),
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


def _function_facts(settings: RlSettings) -> tuple[RewardFunctionFacts, ...]:
    routes = routes_of(settings.reward)
    sources: dict[str, list[str]] = {name: [] for name in function_names(settings)}
    by_source: Mapping[str, tuple[str, ...]] = routes.by_source if routes else {}
    for source, names in by_source.items():
        for name in names:
            sources.setdefault(name, []).append(source)
    return tuple(
        RewardFunctionFacts(
            name=name.removeprefix(IN_PROCESS),
            runs=_where_it_runs(name),
            package=package_of(name) if name in task_names() else "",
            settings=_rule_options(settings.reward, name),
            sources=tuple(own),
        )
        for name, own in sources.items()
    )


def _where_it_runs(name: str) -> RuleRuns:
    rule = find_rule(name)
    if rule is not None:
        return rule.runs
    return "here" if name.startswith(IN_PROCESS) else "processes"


def _rule_options(chosen: RewardSettings, name: str) -> dict[str, Any]:
    """Return the settings that a rule reads, by name; none of another function."""
    rule = find_rule(name)
    return {setting: getattr(chosen, setting) for setting in rule.settings} if rule else {}


def _names(settings: RlSettings) -> list[str]:
    """Return the names of the parts, as `build_reward` calls them."""
    names = [part_of(name) for name in all_functions(settings)]
    return [*names, *(name for kind in build_order() for name in kind.names(settings))]


def _functions(
    settings: RlSettings | EvalSettings, function: Reward | None, columns: Mapping[str, str], log: Path | None = None
) -> Generator[RewardComponent]:
    """Make one component a reward function, and one of all that have routes."""
    if function is not None:
        # of the rewards that a script may give, the one that calls a function of its own
        bind_columns = getattr(function, "bind_columns", None)
        if bind_columns is not None:
            bind_columns(columns)
        # of a list of rewards, which may hold names beside functions
        bind_names = getattr(function, "bind_names", None)
        if bind_names is not None:
            bind_names(partial(_function_part, settings, columns=columns, log=log))
        name = str(getattr(function, "name", "reward_fn"))
        named = RewardComponent(name, _repeated(settings, name, function))
        yield _under_its_name(named) if are_named(settings) else named
    for name in function_names(settings) if function is None else ():
        yield _function_part(settings, name, columns, log)
    routes = routes_of(settings.reward)
    if routes is not None:
        with ExitStack() as built:
            parts: dict[str, RewardComponent] = {}
            for name in routes.names:
                parts[name] = _function_part(settings, name, columns, log)
                built.callback(parts[name].reward.close)
            built.pop_all()
        names = tuple(part.name for part in parts.values())
        yield RewardComponent("routes", RoutedReward(routes, parts), routed=names)


def _under_its_name(part: RewardComponent) -> RewardComponent:
    return replace(part, reward=NamedReward(part.name, part.reward))


def _function_part(
    settings: RlSettings | EvalSettings, name: str, columns: Mapping[str, str], log: Path | None = None
) -> RewardComponent:
    """Make the component of one name, whose parts stand under it beside others."""
    reward = _made(settings.reward, name, columns, log)
    if find_rule(name) is None:
        reward = _repeated(settings, name, reward)
    part = RewardComponent(part_of(name), reward)
    return _under_its_name(part) if are_named(settings) else part


def _repeated(settings: RlSettings | EvalSettings, name: str, reward: Reward, tolerance: float = EXACT) -> Reward:
    """Return the reward, whose first scores are looked at twice where a run trains on it."""
    is_random = getattr(settings.reward, "reward_random", True)
    return reward if is_random else RepeatedReward(name.removeprefix(IN_PROCESS), reward, tolerance=tolerance)


def _made(chosen: RewardSettings, name: str, columns: Mapping[str, str], log: Path | None = None) -> Reward:
    # a name that is written down; the built-in default means nothing else, whatever is installed
    if chosen.reward or chosen.reward_routes:
        refuse_built_in(name, reward_names(), flag="--reward")
    limits = user_code_limits(chosen.reward_memory, chosen.reward_variables)
    try:
        return reward_by_name(
            name,
            num_workers=chosen.reward_workers,
            timeout=chosen.reward_timeout,
            limits=limits,
            columns=columns,
            log=log,
            options=_rule_options(chosen, name),
        )
    except OptionsError as error:
        raise among_others(error, name, chosen) from error


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
        looked_at = _repeated(commands, server.name, reward, OF_A_SERVER)
        parts.append(RewardComponent(server.name, looked_at, waits=True))
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
        phase = nullcontext if stays else partial(_visit, model, machine.device)
        # moved away before the next one is loaded: all of them at once may not fit
        if not stays:
            model.to("cpu")
        tokens = settings.reward_models.reward_batch_tokens
        parts.append(RewardComponent(named.name, model_reward(named.name, model, heads, tokens, phase)))
    return parts


def model_reward(
    name: str,
    model: RewardModel,
    heads: Mapping[str, float],
    max_tokens: int,
    phase: Callable[[], AbstractContextManager[object]],
) -> Reward:
    """Return the reward of a loaded model: of whole responses, or reduced from the scores of their steps."""
    steps = model.spec.steps
    if steps is None:
        return ModelReward(name, RewardTextScorer(model, max_tokens=max_tokens), heads, phase=phase)
    scorer = StepTextScorer(model, max_tokens=max_tokens)
    return StepModelReward(name, scorer, steps.reduction, *heads.values(), phase=phase)


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
            do=f"another name than {twice} for one of them: that of its function, NAME=DIR or NAME=URL",
        )
