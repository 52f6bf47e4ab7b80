"""A judge from its settings: a language model that answers in this process, or behind a URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.build.engines import native_engine
from rft.build.reward_parts import has_images, waiting_endpoint
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import Machine
from rft.settings import EvalSettings, RlSettings
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import DataError, OptionsError
from rft_models.loading.context_length import model_facts
from rft_models.policy.load import load_reference
from rft_models.reward_model.shared_images import shared_images_of
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.protocols import Engine
from rft_trainer.records.scores import RewardStatus, Score
from rft_trainer.rewards.combined import RewardComponent
from rft_trainer.rewards.images import Images, without_markers
from rft_trainer.rewards.judge import NAME, JudgeReward
from rft_trainer.rewards.judge_template import JudgeTemplate, Verdict
from rft_trainer.rewards.servers.http_client import checked_url
from rft_trainer.rewards.servers.remote_judge import RemoteJudge
from rft_trainer.settings.rewards import JudgeSettings

_Prompt = tuple[list[int], Any]
"""Tokens of a question, and its images as the model takes them."""


class EngineJudge:
    """A model of this process that answers greedily, in its own chat template where it has one.

    One that takes images gets those of the prompts, through its own processor.
    """

    def __init__(self, engine: Engine, tokenizer: HfTokenizer, *, max_new_tokens: int, max_len: int) -> None:
        """`max_len`: tokens of the longest question with its answer."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._images = shared_images_of(tokenizer)
        self._max_new_tokens = max_new_tokens
        self._longest = max_len - max_new_tokens
        # asleep from the start, so that its cache takes memory only while it answers
        self._engine.sleep(1)

    def ask(
        self, questions: Sequence[str], keys: Sequence[int], images: Sequence[Images] | None = None
    ) -> list[str | Score]:
        """Answer questions as `rft_trainer.rewards.judge.Judge` does; a question that is too long fails, uncut."""
        seen = images if images is not None else [()] * len(questions)
        results: dict[int, str | Score] = {}
        prompts: dict[int, _Prompt] = {}
        for index, question in enumerate(questions):
            row = self._encoded(question, seen[index])
            # a question that cannot be asked fails by itself; the others are answered in one call
            if isinstance(row, Score):
                results[index] = row
            else:
                prompts[index] = row
        if prompts:
            answers = self._answers(list(prompts.values()), [keys[index] for index in prompts])
            results |= zip(prompts, answers, strict=True)
        return [results[index] for index in range(len(questions))]

    def close(self) -> None:
        """Do nothing: the engine holds no memory while it sleeps."""

    def _answers(self, prompts: Sequence[_Prompt], keys: Sequence[int]) -> list[str]:
        media = [media for _, media in prompts]
        options = SamplingOptions(
            temperature=0.0, max_new_tokens=self._max_new_tokens, stop_token_ids=self._tokenizer.eos_ids
        )
        self._engine.wake()
        try:
            completions = self._engine.generate(
                [token_ids for token_ids, _ in prompts],
                [[key] for key in keys],
                options,
                media=media if any(media) else None,
            )
        finally:
            # after an error too: whoever runs next counts on this memory
            self._engine.sleep(1)
        return self._tokenizer.decode_batch([group[0].token_ids for group in completions])

    def _encoded(self, question: str, images: Images) -> _Prompt | Score:
        if images and self._images is None:
            return Score(None, RewardStatus.FAILED, detail="the judge takes no images")
        try:
            ids, media = self._read(question, images)
        except DataError as error:
            return Score(None, RewardStatus.FAILED, detail=f"the judge cannot read it: {error.problem.what}")
        if 0 < len(ids) <= self._longest:
            return ids, media
        return Score(None, RewardStatus.FAILED, detail=f"{len(ids)} tokens, the judge takes {self._longest}")

    def _read(self, question: str, images: Images) -> _Prompt:
        if self._images is not None and not images:
            # the processor would look for an image behind each marker
            question = without_markers(question)
        chats = self._tokenizer.has_chat_template
        turns = [{"role": "user", "content": question}]
        text = self._tokenizer.render_chat(turns, add_generation_prompt=True) if chats else question
        if self._images is not None:
            return self._images.encode_shared(text, images)
        # a chat template writes the special tokens itself
        return self._tokenizer.encode(text, add_special_tokens=not chats), None


def make_judge(settings: RlSettings | EvalSettings, machine: Machine) -> JudgeReward | None:
    """The judge of the settings, if they name one.

    Raises:
        OptionsError: a template, pattern or range that cannot be used.
        DataError: a directory that is no language model.
        ServiceError: a server that does not answer.
    """
    chosen = settings.judge
    if not (chosen.judge_pretrain or chosen.judge_url):
        return None
    # before the model is loaded: a wrong pattern or file shows itself in an instant
    template, verdict = template_of(chosen), verdict_of(chosen)
    seed = settings.run.seed if isinstance(settings, RlSettings) else settings.output.seed
    judge = remote_judge(settings) if chosen.judge_url else _in_process(settings, machine)
    return JudgeReward(judge, template, verdict, seed=seed)


def judge_components(settings: RlSettings | EvalSettings, machine: Machine) -> list[RewardComponent]:
    """Return the judge of the settings as a part of the reward; none where they name none."""
    judge = make_judge(settings, machine)
    return [RewardComponent(NAME, judge, waits=bool(settings.judge.judge_url))] if judge is not None else []


def check_judge(settings: RlSettings | EvalSettings) -> None:
    """Try the judge's server, where it has one."""
    if settings.judge.judge_url:
        remote_judge(settings).close()


@dataclass(frozen=True, slots=True)
class JudgeFacts:
    """A judge as its settings describe it, before anything is loaded."""

    model: str
    """Directory, or the name that the server knows."""
    url: str
    """Empty for a model of this process."""
    template_name: str
    """File of the question; empty for the built-in one."""
    low: float
    high: float
    """Answers from `low` to `high` become scores from 0 to 1."""


def judge_facts(settings: RlSettings) -> JudgeFacts | None:
    """Return the judge of the settings, if they name one; raises `OptionsError` as `make_judge` does."""
    chosen = settings.judge
    if not (chosen.judge_pretrain or chosen.judge_url):
        return None
    template_of(chosen)  # for its refusals
    verdict = verdict_of(chosen)
    return JudgeFacts(
        model=chosen.judge_model if chosen.judge_url else chosen.judge_pretrain,
        # checked here too: the plan shows it, before the judge is made
        url=checked_url(chosen.judge_url, "--judge_url") if chosen.judge_url else "",
        template_name=Path(chosen.judge_template).name if chosen.judge_template else "",
        low=verdict.low,
        high=verdict.high,
    )


def template_of(settings: JudgeSettings) -> JudgeTemplate:
    """The question; `OptionsError` where its file cannot be read or has no place for the response."""
    low, high = settings.judge_range
    if settings.judge_template:
        return JudgeTemplate.in_file(Path(settings.judge_template).expanduser(), settings.task_instruction, low, high)
    return JudgeTemplate(task_instruction=settings.task_instruction, low=low, high=high)


def verdict_of(settings: JudgeSettings) -> Verdict:
    """Return the parser of the judge's answers; `OptionsError` for a pattern or range that cannot be used."""
    low, high = settings.judge_range
    return Verdict(settings.judge_pattern, low, high)


def remote_judge(settings: RlSettings | EvalSettings) -> RemoteJudge:
    """The server of `judge_url`, tried once."""
    chosen, models = settings.judge, settings.reward_models
    base, mark, query = checked_url(chosen.judge_url, "--judge_url").partition("?")
    url = f"{base.rstrip('/')}/chat/completions{mark}{query}"
    judge = RemoteJudge(
        waiting_endpoint(models, url, "the judge's server", f"--judge_url {chosen.judge_url}"),
        chosen.judge_model,
        max_new_tokens=chosen.judge_max_new_tokens,
        concurrency=models.remote_rm_concurrency,
    )
    judge.start(with_image=has_images(settings))
    return judge


def _in_process(settings: RlSettings | EvalSettings, machine: Machine) -> EngineJudge:
    chosen = settings.judge
    positions = model_facts(chosen.judge_pretrain).max_positions
    if chosen.judge_max_new_tokens >= positions:
        raise OptionsError(
            code="reward.judge_length",
            what=f"judge_max_new_tokens = {chosen.judge_max_new_tokens}, the judge has {positions} positions",
            where="--judge_max_new_tokens",
            why="the question and its answer share the positions of the judge",
            do=f"--judge_max_new_tokens {max(1, positions // 4)}",
        )
    policy = load_reference(
        chosen.judge_pretrain, dtype=weights_dtype(settings.model.bf16), device=machine.device
    ).eval()
    assert policy.tokenizer is not None
    engine = native_engine(policy, settings.engine.engine_max_rows, positions, machine.device)
    return EngineJudge(engine, policy.tokenizer, max_new_tokens=chosen.judge_max_new_tokens, max_len=positions)
