"""Reward settings: functions, reward models in this process or behind a URL, and judges.

Metadata keys of a field are those of `rft_trainer.settings`. No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RewardOffload = Literal["auto", "held", "phase"]
OnOutage = Literal["stop", "unscored"]
FuzzyMeasure = Literal["f1", "ratio"]
PatternMatch = Literal["search", "full"]
LengthUnit = Literal["tokens", "characters"]
ResponseLanguage = Literal[
    "", "en", "de", "fr", "es", "it", "pt", "nl", "zh", "ja", "ko", "ru", "el", "ar", "he", "hi", "th"
]


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """Reward models, here or behind a URL. Their scores are added up with the reward's own, see `reward_weights`."""

    reward_pretrain: str = ""
    """Reward models joined by commas, each DIR or NAME=DIR, where DIR may be a run or ORG/NAME[@REVISION];
    empty = none."""

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
class RewardFunctionSettings:
    """The rewards that score a response, and the processes that run them."""

    reward: str = ""
    """Rewards joined by commas, added up: each the name of a rule or an installed task, or a function of your own as
    file.py:function; empty = exact, or none beside a reward model or a judge."""

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

    reward_routes: str = ""
    """Rewards of the rows of each source, SOURCE=REWARD joined by commas; the column reward_source_key names a row's
    source, * is every other one, + joins rewards. They are added to those of reward; empty = none."""

    reward_source_key: str = "data_source"
    """Column that names the source of a row for reward_routes; rows without a column data_source have the name of their
    file."""


@dataclass(frozen=True, kw_only=True)
class RuleSettings(RewardFunctionSettings):
    """Rewards by name, and the settings of each rule, which are refused where it is not chosen."""

    number_tolerance: float = field(default=0.0, metadata={"minimum": 0.0})
    """Rule numeric: largest difference from the label's number that is right."""

    number_relative_tolerance: float = field(default=1e-6, metadata={"minimum": 0.0})
    """Rule numeric: largest difference that is right, as a share of the label's number."""

    fuzzy_measure: FuzzyMeasure = "f1"
    """Rule fuzzy: f1 = of words, as SQuAD; ratio = of characters that match in order, as difflib."""

    choice_options_key: str = ""
    """Rule choice: column with the texts of the options, a list or an object by letter; empty = letters alone."""

    format_tags: str = "think,answer"
    """Rule format: tags, joined by commas; each has to stand once, in this order."""

    response_pattern: str = ""
    """Rule regex: regular expression (Python's re) that a response has to match."""

    response_pattern_match: PatternMatch = "search"
    """Rule regex: search = the pattern stands somewhere in the response; full = it is all of it."""

    length_range: tuple[int, int] = (0, 0)
    """Rule length: shortest and longest response that gets 1; a longest of 0 = no upper end."""

    length_slack: int = field(default=0, metadata={"minimum": 0})
    """Rule length: distance from this range over which the reward falls from 1 to 0; 0 = at once."""

    length_unit: LengthUnit = "tokens"
    """Rule length: what is counted, tokens or characters."""

    response_language: ResponseLanguage = ""
    """Rule language: language of the responses, told by script and frequent words."""

    json_schema: str = ""
    """Rule json_schema: file with the JSON schema of the responses; empty = any JSON."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings(RuleSettings):
    """The reward function of a response."""


@dataclass(frozen=True, kw_only=True)
class RlRewardSettings(RewardSettings):
    """The reward function of a response, and the control experiment."""

    shuffle_rewards: bool = False
    """Control experiment: shuffle the rewards within each group, so that they carry no information."""

    reward_random: bool = False
    """The reward is meant to be random: the first responses that a function of your own or a server scores are scored
    once, and not a second time to see whether they get the same."""
