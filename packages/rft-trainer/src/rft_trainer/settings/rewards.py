"""Reward settings: functions, reward models in this process or behind a URL, and judges.

Metadata keys of a field are those of `rft_trainer.settings`. No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RewardOffload = Literal["auto", "held", "phase"]


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """Reward models, here or behind a URL. Their scores are added up with the reward's own, see `reward_weights`."""

    reward_pretrain: str = ""
    """Reward models: directories joined by commas, each DIR or NAME=DIR; empty = none."""

    reward_offload: RewardOffload = "auto"
    """Reward models stay on the GPU, or come for their phase, one after another; auto = stay where a tenth of it holds
    them."""

    reward_batch_tokens: int = field(default=8192, metadata={"minimum": 1})
    """Tokens that a reward model scores in one forward; a longer text runs alone."""

    remote_rm_url: str = ""
    """Reward servers: URLs joined by commas, each URL or NAME=URL, asked at the same time; empty = none."""

    remote_rm_timeout: float = field(default=120.0, metadata={"above": 0.0})
    """Seconds that one request to a reward server or a judge may take in all."""

    remote_rm_batch_size: int = field(default=32, metadata={"minimum": 1})
    """Responses in one request to a reward server."""

    remote_rm_concurrency: int = field(default=8, metadata={"minimum": 1})
    """Requests to one server that wait for their answers at once."""

    remote_rm_retries: int = field(default=3, metadata={"minimum": 0})
    """How often a request is sent again after a network error, within its time; no other failure is tried again."""


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """A language model that judges responses; the score is parsed from its answer."""

    judge_pretrain: str = ""
    """Judge: the directory of a language model that answers in this process; empty = none."""

    judge_url: str = ""
    """Judge: the beginning of an OpenAI-compatible server's address, as http://host:8000/v1; empty = none."""

    judge_model: str = ""
    """Name that the server of `judge_url` knows its model by."""

    judge_template: str = ""
    """File with the question: {prompt}, {response}, {label} and {task_instruction} are filled in; empty = a short
    one."""

    task_instruction: str = "how well the response answers the prompt"
    """What the judge is to look at; takes the place of {task_instruction}, and {prompt} in it is filled in."""

    judge_pattern: str = r"<score>\s*([-+]?\d+(?:\.\d+)?)\s*</score>"
    """Regular expression whose first group is the score; the last match in the judge's answer counts."""

    judge_range: tuple[float, float] = (0.0, 10.0)
    """Worst and best score; they become 0 and 1, and what lies outside is no score."""

    judge_max_new_tokens: int = field(default=256, metadata={"minimum": 1})
    """Tokens of the longest answer of the judge."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """The reward function of a response."""

    reward: str = ""
    """A reward's name, or a function of your own as file.py:function; empty = exact, or none beside a reward model or
    a judge."""

    reward_workers: int = field(default=1, metadata={"minimum": 1})
    """Processes that compute rewards."""

    reward_timeout: float = field(default=10.0, metadata={"above": 0.0})
    """Seconds one response may take to judge; beyond it the reward has failed and is not a 0."""

    reward_weights: str = ""
    """Weights of a reward's parts, as correctness=0.9,format=0.1; empty = the reward's own sum."""


@dataclass(frozen=True, kw_only=True)
class RlRewardSettings(RewardSettings):
    """The reward function of a response, and the control experiment."""

    shuffle_rewards: bool = False
    """Control: the rewards change places within each group, so that they carry no information."""
