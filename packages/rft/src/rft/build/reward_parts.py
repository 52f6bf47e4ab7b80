"""Parts that several kinds of reward share: the endpoint of a server, and the check of rewards beside images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rft.reward_kinds import REWARD_KINDS, RewardKind
from rft.reward_names import CODE, function_names, named_models, reads_columns
from rft.settings import EvalSettings, RlSettings
from rft_core.errors import DataError, OptionsError
from rft_models.families.vision import is_vision
from rft_models.files.directories import existing_directory, read_json
from rft_models.reward_model.spec import stored_spec
from rft_trainer.records.rollouts import Prompt
from rft_trainer.rewards.servers.http_client import Endpoint
from rft_trainer.rewards.servers.server_wait import ServerWait, WaitRules
from rft_trainer.rewards.unit_tests.code_tests import label_problem
from rft_trainer.runs.stop_signals import stop_requested
from rft_trainer.settings.rewards import RewardModelSettings


def has_images(settings: RlSettings | EvalSettings) -> bool:
    """Return True when prompts may hold images."""
    return bool(settings.images.images_key)


def columns_of(prompts: Iterable[Prompt]) -> dict[str, str]:
    """Return the columns of the rows that the prompts were made of, each with the first row that lacks it, or ""."""
    first, lacking = "", dict[str, str]()
    for prompt in prompts:
        # all rows before the first one with a column lack it
        for name in prompt.columns:
            lacking.setdefault(name, first)
        first = first or prompt.prompt_id
        for name, row in lacking.items():
            if not row and name not in prompt.columns:
                lacking[name] = prompt.prompt_id
    return lacking


def reward_columns(settings: RlSettings, prompts: Iterable[Prompt]) -> dict[str, str]:
    """Return `columns_of` the prompts; none, and no prompt is read, where nothing reads columns."""
    return columns_of(prompts) if reads_columns(settings) else {}


def unit_test_notes(settings: RlSettings | EvalSettings, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """Return a note on the rows whose unit tests cannot be read, where these are what the reward runs.

    Raises:
        DataError: no row has tests that can be read: the labels are of another column.
    """
    if CODE not in function_names(settings):
        return ()
    first, problem, unreadable = "", "", 0
    for prompt in prompts:
        found = label_problem(prompt.label, prompt.columns)
        if found and not unreadable:
            first, problem = prompt.prompt_id, found
        unreadable += bool(found)
    if not unreadable:
        return ()
    if unreadable < len(prompts):
        return (f"{unreadable:,} of {len(prompts):,} rows have no tests that can be read; {first}: {problem}",)
    columns = prompts[0].columns
    better = [name for name, value in columns.items() if not label_problem(value, columns)]
    raise DataError(
        code="reward.no_tests",
        what=f"no row has unit tests that can be read; {first}: {problem}",
        where="--label_key",
        why="the reward code runs a program on the tests that are the label of its row",
        do=f"--label_key {better[0] if better else 'with a column of such tests'}",
    )


def require_image_rewards(settings: RlSettings | EvalSettings) -> None:
    """Refuse reward models and a judge of this process that take no images where prompts hold images.

    Servers are tried on an image before the run begins.

    Raises:
        OptionsError: one takes no images.
        DataError: no directory, or a damaged config.json.
    """
    if not has_images(settings):
        return
    directories = [
        (kind, flag, directory)
        for kind in REWARD_KINDS
        for flag, value in kind.values(settings).items()
        if flag in kind.directory_flags
        for directory in ([named.location for named in named_models(value)] if kind.joins_directories else [value])
    ]
    for kind, flag, directory in directories:
        file = existing_directory(directory) / "config.json"
        config = read_json(file) if file.is_file() else {}
        model_type, spec = str(config.get("model_type", "")), stored_spec(config, file.parent)
        if model_type and not is_vision(model_type):
            raise _blind(kind, flag, directory, f"model_type {model_type}", settings.images.images_key)
        if spec is not None and spec.steps is not None:  # steps are scored as text
            raise _blind(kind, flag, directory, "a reward model of steps", settings.images.images_key)


def _blind(kind: RewardKind, flag: str, directory: str, is_what: str, images_key: str) -> OptionsError:
    return OptionsError(
        code="reward.no_images",
        what=f"{flag} = {directory} ({is_what}) takes no images here, and prompts hold those of {images_key}",
        where=f"--{flag}",
        why="it would score answers about images that it is not given",
        do=f"--{flag} DIR of {kind.images_from}, or --reward file.py:function, which may ask for images",
    )


def waiting_endpoint(settings: RewardModelSettings, url: str, name: str, where: str) -> Endpoint:
    """Return the endpoint of a server that is waited for while it is away, unless the run is asked to stop.

    `name` and `where` (flag and URL) are for messages.
    """
    goes_on = settings.on_reward_outage == "unscored"
    rules = WaitRules(settings.reward_wait, goes_on=goes_on, stopped=stop_requested)
    wait = ServerWait(name, where, rules)
    return Endpoint(url, settings.remote_rm_timeout, settings.remote_rm_retries, wait=wait)
