"""A judge from its settings: what it is asked, what it is given, and what fails by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.build import judge
from rft.settings import EvalSettings, RlSettings
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import DataError, OptionsError
from rft_models.settings import ModelSettings, WeightsSettings
from rft_trainer.records.scores import RewardStatus, Score
from rft_trainer.rewards.judge import NAME
from rft_trainer.settings.rewards import JudgeSettings
from rft_trainer.settings.run import OutputSettings, RlRunSettings

PLAIN = RlSettings(model=ModelSettings(pretrain="m", device="cpu"), run=RlRunSettings(seed=5))


class Letters:
    """A tokenizer whose token is the code of a letter; `~` cannot be written."""

    eos_ids = (3,)

    def __init__(self, chats: bool) -> None:
        self.has_chat_template = chats

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if "~" in text:
            raise DataError(code="text.unknown_character", what="a character", where="h", why="y")
        return [ord(letter) for letter in text] + ([1] if add_special_tokens else [])

    def render_chat(self, turns: Sequence[Any], add_generation_prompt: bool) -> str:
        [turn] = turns
        return f"{turn['role'][0]}:{turn['content']}{'>' if add_generation_prompt else ''}"

    def decode_batch(self, rows: Sequence[Any]) -> list[str]:
        return ["".join(map(chr, row)) for row in rows]


class Echo:
    """Answers each question with its first token and its key; notes how it is called."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done: list[Any] = []
        self._error = error

    def sleep(self, level: int) -> None:
        self.done.append(("sleep", level))

    def wake(self) -> None:
        self.done.append("wake")

    def generate(self, prompts: Any, keys: Any, options: SamplingOptions, media: Any) -> Any:
        self.done.append((prompts, keys, options, media))
        if self._error is not None:
            raise self._error
        return [[SimpleNamespace(token_ids=[row[0], key[0]])] for row, key in zip(prompts, keys, strict=True)]


def asked(engine: Echo, *, chats: bool = False) -> Any:
    return judge.EngineJudge(engine, Letters(chats), max_new_tokens=4, max_len=10)  # type: ignore[arg-type]


@pytest.mark.parametrize("chats", [True, False])
def test_questions_are_answered_greedily_in_one_call_between_two_sleeps(chats: bool) -> None:
    engine = Echo()
    found = asked(engine, chats=chats)
    assert engine.done == [("sleep", 1)]
    answers = found.ask(["AB", "C"], [ord("x"), ord("y")])
    assert answers == (["ux", "uy"] if chats else ["Ax", "Cy"])
    sent = ["u:AB>", "u:C>"] if chats else ["AB\1", "C\1"]
    greedy = SamplingOptions(temperature=0.0, max_new_tokens=4, stop_token_ids=(3,))
    assert engine.done[1:] == [
        "wake",
        ([[ord(letter) for letter in text] for text in sent], [[ord("x")], [ord("y")]], greedy, None),
        ("sleep", 1),
    ]
    assert found.close() is None


def test_a_question_that_cannot_be_asked_fails_by_itself() -> None:
    engine = Echo()
    found = asked(engine).ask(["ABCDEF", "~", "ABCDE", "A"], [5, 6, ord("z"), 7], [(), (), (), ("image",)])
    statuses = [answer.status if isinstance(answer, Score) else answer for answer in found]
    assert statuses == [RewardStatus.FAILED, RewardStatus.FAILED, "Az", RewardStatus.FAILED]
    assert [answer.value for answer in found if isinstance(answer, Score)] == [None] * 3
    assert all(answer.detail for answer in found if isinstance(answer, Score))
    assert engine.done[2][1] == [[ord("z")]]
    engine = Echo()
    assert [one.status for one in asked(engine).ask(["ABCDEF"], [5])] == [RewardStatus.FAILED]
    assert engine.done == [("sleep", 1)]


def test_an_engine_sleeps_after_an_error_too() -> None:
    engine = Echo(MemoryError())
    with pytest.raises(MemoryError):
        asked(engine).ask(["A"], [5])
    assert engine.done[-1] == ("sleep", 1)


def test_a_judge_that_sees_is_given_the_images_and_no_empty_places(calls: Any) -> None:
    def shared(text: str, images: Any) -> Any:
        return [ord(letter) for letter in text], [*images]

    calls.put(judge, shared_images_of=SimpleNamespace(encode_shared=shared))
    calls.replace(judge, without_markers=lambda text: text.replace("#", ""))
    engine = Echo()
    found = asked(engine)
    assert found.ask(["#A", "#B"], [ord("x"), ord("y")], [("image",), ()]) == ["#x", "By"]
    assert engine.done[2][0] == [[ord("#"), ord("A")], [ord("B")]]
    assert engine.done[2][3] == [["image"], []]
    found.ask(["#B"], [ord("y")], [()])
    assert engine.done[-2][3] is None


@pytest.mark.parametrize(
    ("chosen", "made"),
    [
        ({}, None),
        ({"judge_pretrain": "dir"}, "in process"),
        ({"judge_url": "http://h/v1"}, "remote"),
        ({"judge_pretrain": "dir", "judge_url": "http://h/v1"}, "remote"),
    ],
)
def test_a_judge_is_a_server_or_a_model_of_this_process(calls: Any, chosen: dict[str, Any], made: str | None) -> None:
    calls.replace(judge, remote_judge=lambda settings: "remote", _in_process=lambda *given: "in process")
    calls.put(judge, "JudgeReward", template_of="template", verdict_of="verdict")
    settings = replace(PLAIN, judge=JudgeSettings(**chosen))
    scored = EvalSettings(model=WeightsSettings(pretrain="m"), judge=settings.judge, output=OutputSettings(seed=6))
    parts = judge.judge_components(settings, calls.double("machine"))
    assert [(part.name, part.reward, part.waits) for part in parts] == (
        [(NAME, "JudgeReward()", made == "remote")] if made else []
    )
    judge.make_judge(scored, calls.double("machine"))
    given = [call for call in calls.taken() if call.startswith("JudgeReward(")]
    assert given == [f"JudgeReward('{made}', 'template', 'verdict', seed={seed})" for seed in (5, 6) if made]


def test_a_pattern_is_refused_before_a_model_is_loaded(calls: Any) -> None:
    calls.put(judge, "load_reference model_facts remote_judge")
    settings = replace(PLAIN, judge=JudgeSettings(judge_pretrain="dir", judge_pattern="("))
    for ask in (lambda: judge.make_judge(settings, calls.double("machine")), lambda: judge.judge_facts(settings)):
        with pytest.raises(OptionsError):
            ask()
    assert calls.taken() == []


@pytest.mark.parametrize("url", ["", "http://h/v1"])
def test_the_figures_of_a_judge_are_those_of_its_settings(url: str, tmp_path: Path) -> None:
    assert judge.judge_facts(PLAIN) is None
    question = tmp_path / "question.txt"
    question.write_text("{prompt} {response}")
    chosen = JudgeSettings(judge_pretrain="dir", judge_url=url, judge_model="name", judge_range=(1.0, 5.0))
    facts: Any = judge.judge_facts(replace(PLAIN, judge=chosen))
    assert (facts.model, facts.url, facts.template_name) == ("name" if url else "dir", url, "")
    assert (facts.low, facts.high) == (1.0, 5.0)
    facts = judge.judge_facts(replace(PLAIN, judge=replace(chosen, judge_template=str(question))))
    assert facts.template_name == "question.txt"


def test_a_template_and_a_verdict_take_instruction_and_range(calls: Any, tmp_path: Path) -> None:
    template = calls.double("JudgeTemplate")
    calls.replace(judge, JudgeTemplate=template)
    calls.put(judge, "Verdict")
    chosen = JudgeSettings(task_instruction="how short", judge_range=(1.0, 5.0), judge_pattern="(.)")
    judge.template_of(chosen)
    judge.template_of(replace(chosen, judge_template="~/q.txt"))
    judge.verdict_of(chosen)
    assert calls.taken() == [
        "JudgeTemplate(high=5.0, low=1.0, task_instruction='how short')",
        f"JudgeTemplate.in_file({Path('~/q.txt').expanduser()!r}, 'how short', 1.0, 5.0)",
        "Verdict('(.)', 1.0, 5.0)",
    ]


def test_a_server_is_asked_at_its_address_with_the_numbers_of_its_settings_and_tried(calls: Any) -> None:
    calls.put(judge, "RemoteJudge waiting_endpoint has_images")
    calls.replace(judge, checked_url=lambda url, flag: f"{url}|{flag}/")
    settings = calls.double("settings")
    settings.judge.judge_url = "http://h"
    judge.remote_judge(settings)
    assert calls.taken() == [
        "waiting_endpoint(settings.reward_models, 'http://h|--judge_url/chat/completions', \"the judge's server\", "
        "'--judge_url http://h')",
        "RemoteJudge(waiting_endpoint(), settings.judge.judge_model, "
        "concurrency=settings.reward_models.remote_rm_concurrency, max_new_tokens=settings.judge.judge_max_new_tokens)",
        "has_images(settings)",
        "RemoteJudge().start(with_image=has_images())",
    ]


def test_the_query_of_an_address_stands_behind_the_path_of_its_requests(calls: Any) -> None:
    calls.put(judge, "RemoteJudge waiting_endpoint has_images")
    calls.replace(judge, checked_url=lambda url, flag: url)
    settings = calls.double("settings")
    settings.judge.judge_url = "http://h/v1/?a=b"
    judge.remote_judge(settings)
    assert "'http://h/v1/chat/completions?a=b'" in calls.taken()[0]


def test_a_judge_with_a_secret_in_its_address_is_refused_before_the_plan_shows_it() -> None:
    with pytest.raises(OptionsError) as caught:
        judge.judge_facts(replace(PLAIN, judge=JudgeSettings(judge_url="http://h/v1?token=s3cr3t", judge_model="m")))
    assert caught.value.problem.code == "reward.url"
    assert "s3cr3t" not in str(caught.value)


def test_a_check_tries_the_server_where_there_is_one(calls: Any) -> None:
    calls.put(judge, "remote_judge")
    judge.check_judge(replace(PLAIN, judge=JudgeSettings(judge_pretrain="dir")))
    assert calls.taken() == []
    settings = replace(PLAIN, judge=JudgeSettings(judge_url="http://h"))
    judge.check_judge(settings)
    assert calls.taken() == [f"remote_judge({settings!r})", "remote_judge().close()"]


@pytest.mark.parametrize("bf16", [True, False])
def test_a_model_of_this_process_has_the_room_of_its_positions(calls: Any, bf16: bool) -> None:
    policy = calls.double("policy", tokenizer=calls.double("tokenizer"))
    loaded = calls.double("loaded", eval=calls.double("eval", returns=policy))
    calls.put(
        judge,
        "JudgeReward EngineJudge native_engine",
        model_facts=SimpleNamespace(max_positions=257),
        load_reference=loaded,
    )
    model = ModelSettings(pretrain="m", device="cpu", bf16=bf16)
    settings = replace(PLAIN, judge=JudgeSettings(judge_pretrain="dir"), model=model)
    judge.make_judge(settings, calls.double("machine"))
    assert calls.taken()[:-1] == [
        "model_facts('dir')",
        f"load_reference('dir', device=machine.device, dtype=torch.{'bfloat16' if bf16 else 'float32'})",
        "eval()",
        f"native_engine(policy, {settings.engine.engine_max_rows}, 257, machine.device)",
        "EngineJudge(native_engine(), tokenizer, max_len=257, max_new_tokens=256)",
    ]


@pytest.mark.parametrize(("positions", "do"), [(256, "64"), (3, "1")])
def test_an_answer_without_room_for_its_question_is_refused(calls: Any, positions: int, do: str) -> None:
    calls.put(judge, "load_reference", model_facts=SimpleNamespace(max_positions=positions))
    settings = replace(PLAIN, judge=JudgeSettings(judge_pretrain="dir", judge_max_new_tokens=max(positions, 1)))
    with pytest.raises(OptionsError) as caught:
        judge.make_judge(settings, calls.double("machine"))
    assert caught.value.problem.code == "reward.judge_length"
    assert caught.value.problem.do == f"--judge_max_new_tokens {do}"
    assert calls.taken() == ["model_facts('dir')"]
