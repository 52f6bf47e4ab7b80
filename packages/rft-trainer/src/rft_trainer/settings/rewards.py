"""Reward settings: functions, reward models in this process or behind a URL, and judges.

Metadata keys of a field are those of `rft_trainer.settings`. No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RewardOffload = Literal["auto", "held", "phase"]
OnOutage = Literal["stop", "unscored"]


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """Reward models, here or behind a URL. Their scores are added up with the reward's own, see `reward_weights`."""

    reward_pretrain: str = ""
    """Reward models joined by commas, each DIR or NAME=DIR, where DIR may be ORG/NAME[@REVISION]; empty = none."""

    reward_offload: RewardOffload = "auto"
    """Where reward models stay: held = on the GPU; phase = moved there one after another while they score; auto = on
    the GPU where they take at most a tenth of it."""

    reward_batch_tokens: int = field(default=8192, metadata={"minimum": 1})
    """Tokens that a reward model scores in one forward pass; a longer text is scored alone."""

    remote_rm_url: str = ""
    """Reward servers: URLs joined by commas, each URL or NAME=URL, queried at the same time; empty = none."""

    remote_rm_timeout: float = field(default=120.0, metadata={"above": 0.0})
    """Seconds that one request to a reward server or a judge may take in total."""

    remote_rm_batch_size: int = field(default=32, metadata={"minimum": 1})
    """Responses in one request to a reward server."""

    remote_rm_concurrency: int = field(default=8, metadata={"minimum": 1})
    """Concurrent requests to one server."""

    remote_rm_retries: int = field(default=3, metadata={"minimum": 0})
    """Retries of a request after a network error, within its timeout, before the server counts as away."""

    reward_wait: float = field(default=600.0, metadata={"minimum": 0.0})
    """Seconds to wait for a reward server or a judge that is away: no connection, no answer in time, HTTP 408, 429,
    502, 503 or 504; 0 = none."""

    on_reward_outage: OnOutage = "stop"
    """What follows when that time is over: stop = save the last whole step, end with exit code 69; unscored = go on,
    these responses without a reward."""


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """A language model that judges responses; the score is parsed from its answer."""

    judge_pretrain: str = ""
    """Judge model, which runs in this process: a directory, or ORG/NAME[@REVISION]; empty = none."""

    judge_url: str = ""
    """Judge server: the base URL of an OpenAI-compatible server, such as http://host:8000/v1; empty = none."""

    judge_model: str = ""
    """Name by which the server of `judge_url` knows its model."""

    judge_template: str = ""
    """File with the prompt of the judge, in which {prompt}, {response}, {label} and {task_instruction} are filled in;
    empty = a short built-in one."""

    task_instruction: str = "how well the response answers the prompt"
    """What the judge is to assess: replaces {task_instruction} in the template; {prompt} in it is filled in."""

    judge_pattern: str = r"<score>\s*([-+]?\d+(?:\.\d+)?)\s*</score>"
    """Regular expression whose first group is the score; the last match in the judge's answer counts."""

    judge_range: tuple[float, float] = (0.0, 10.0)
    """Worst and best score; they are mapped to 0 and 1, and an answer outside them counts as no score."""

    judge_max_new_tokens: int = field(default=256, metadata={"minimum": 1})
    """Maximum length of the judge's answer, in tokens."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """The reward function of a response."""

    reward: str = ""
    """A reward's name, that of an installed task, or a function of your own as file.py:function; empty = exact, or none
    beside a reward model or a judge."""

    reward_workers: int = field(default=1, metadata={"minimum": 1})
    """Processes that compute rewards."""

    reward_timeout: float = field(default=10.0, metadata={"above": 0.0})
    """Seconds that scoring one response may take; a response beyond it counts as failed, not as a reward of 0."""

    reward_memory: float = field(default=0.0, metadata={"minimum": 0.0})
    """GiB that each process of a function of your own may take; a response for which they do not suffice counts as
    failed. 0 = half of the machine's."""

    reward_variables: str = ""
    """Variables that a function of your own sees although their names are those of secrets (HF_TOKEN, AWS_*, ..._KEY),
    joined by commas, with * for any letters; empty = none."""

    code_seconds: int = field(default=5, metadata={"minimum": 1})
    """Seconds of processor time that the program of one response may take for all of its tests, with the reward code; a
    program that needs more is worth 0."""

    code_memory: float = field(default=0.5, metadata={"minimum": 0.0625})
    """GiB of address space of such a program; one that needs more is worth 0 for the tests in which it does."""

    reward_weights: str = ""
    """Weights of a reward's parts, such as correctness=0.9,format=0.1; empty = the reward's own sum."""


@dataclass(frozen=True, kw_only=True)
class RlRewardSettings(RewardSettings):
    """The reward function of a response, and the control experiment."""

    shuffle_rewards: bool = False
    """Control experiment: shuffle the rewards within each group, so that they carry no information."""
