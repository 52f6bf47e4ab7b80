"""A run's reward from its settings: which parts, with which numbers, where their models stay, and who closes them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.build import rewards
from rft.library.given_rewards import FunctionRewards
from rft.reward_names import NamedPlace
from rft_core.errors import OptionsError
from rft_models.reward_model.spec import RewardSpec
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rewards.combined import RewardComponent
from rft_trainer.rewards.in_process import FunctionReward
from rft_trainer.rewards.routed import Routes
from rft_trainer.rewards.user_function import FileReward, RewardTrial
from rft_trainer.settings.rewards import RewardModelSettings, RewardSettings


class Part:
    """A reward that notes when it is closed."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self._closed = name, closed

    def __call__(self, items: list[RewardItem]) -> list[Score]:
        return [Score(1.0) for _ in items]

    def close(self) -> None:
        self._closed.append(self.name)


class Setup:
    """Kinds of reward as doubles; `function` is the name that the settings give, "" for none."""

    def __init__(self, calls: Any, *names: str, function: str = "", weights: Any = None) -> None:
        self.closed: list[str] = []
        parts = [RewardComponent(name, Part(name, self.closed)) for name in names]  # type: ignore[arg-type]
        kinds = [
            calls.double(f"kind{number}", build=calls.double(f"kind{number}.build", returns=[part]))
            for number, part in enumerate(parts)
        ]
        self.parts = parts
        calls.put(
            rewards,
            "require_image_rewards refuse_unknown_weights CombinedReward",
            weights_of=weights,
            function_names=[function] if function else [],
            are_named=False,
            routes_of=None,
            build_order=kinds,
            reward_by_name=Part("function", self.closed),
            user_code_limits="limits",
        )
        self.settings = calls.double("settings")
        self.machine = calls.double("machine")


def test_the_only_part_is_the_reward_itself(calls: Any) -> None:
    setup = Setup(calls, "judge")
    assert rewards.build_reward(setup.settings, setup.machine) is setup.parts[0].reward
    assert calls.taken() == [
        "require_image_rewards(settings)",
        "weights_of(settings.reward)",
        "function_names(settings)",
        "routes_of(settings.reward)",
        "build_order()",
        "kind0.build(settings, machine)",
    ]
    assert setup.closed == []


@pytest.mark.parametrize(("names", "weights"), [(("judge",), {"judge": 0.5}), (("judge", "server"), None)])
def test_several_parts_and_one_with_a_weight_are_combined(calls: Any, names: tuple[str, ...], weights: Any) -> None:
    setup = Setup(calls, *names, weights=weights)
    assert rewards.build_reward(setup.settings, setup.machine) == "CombinedReward()"
    assert calls.taken()[-1] == f"CombinedReward({setup.parts!r}, {weights!r})"
    assert setup.closed == []


def test_the_function_is_the_first_part_and_one_that_is_given_takes_its_place(calls: Any) -> None:
    setup = Setup(calls, "judge", function="own.py:score")
    rewards.build_reward(setup.settings, setup.machine, columns={"level": ""})
    made = calls.taken()
    assert (
        "reward_by_name('own.py:score', columns={'level': ''}, limits='limits', log=None, "
        "num_workers=settings.reward.reward_workers, options={}, timeout=settings.reward.reward_timeout)"
    ) in made
    assert "user_code_limits(settings.reward.reward_memory, settings.reward.reward_variables)" in made
    assert made[-1].startswith("CombinedReward([RewardComponent(name='score', ")
    for name, part in (
        ("mine", Part("mine", [])),
        ("reward_fn", SimpleNamespace(close=lambda: None)),
    ):
        calls.put(rewards, build_order=[], weights_of=None)
        given: Any = part
        assert rewards.build_reward(setup.settings, setup.machine, function=given) is given
        calls.put(rewards, weights_of={"a": 1.0})
        rewards.build_reward(setup.settings, setup.machine, function=given)
        assert f"name='{name}'" in calls.taken()[-1]
        assert not [call for call in calls.taken() if call.startswith("reward_by_name")]


def test_several_functions_are_parts_under_their_names(calls: Any) -> None:
    setup = Setup(calls)
    calls.put(rewards, function_names=["math", "own.py:score"], are_named=True)
    rewards.build_reward(setup.settings, setup.machine)
    assert calls.taken()[-1].count("NamedReward object") == 2
    trials = rewards.check_reward(setup.settings, [Prompt("p", (1,), "?", "5", "rows")])
    assert [trial.written for trial in trials] == ["the rule math, on p", "the rule score, on p"]
    assert setup.closed == ["function", "function"]


def test_routes_are_one_part_whose_rewards_are_those_of_the_routes(calls: Any) -> None:
    setup = Setup(calls)
    routes = Routes({"a": ("math",), "*": ("exact", "math")})
    calls.put(rewards, routes_of=routes, are_named=True)
    rewards.build_reward(setup.settings, setup.machine)
    calls.put(rewards, weights_of={"math": 1.0})
    rewards.build_reward(setup.settings, setup.machine)
    assert calls.taken()[-1].endswith("routed=('math', 'exact'))], {'math': 1.0})")
    prompts = [Prompt("a:0", (1,), "?", "5", "a"), Prompt("b:0", (1,), "?", "6", "b")]
    trials = rewards.check_reward(setup.settings, prompts)
    assert [trial.written for trial in trials] == ["the rule math, on a:0", "the rule exact, on b:0"]


def test_a_function_of_a_script_is_bound_to_the_columns_of_the_data(calls: Any) -> None:
    setup = Setup(calls)

    def score(response: str, level: int) -> float:
        return float(level)

    given = FunctionReward(score)
    rewards.build_reward(setup.settings, setup.machine, function=given, columns={"level": ""})
    with pytest.raises(OptionsError) as caught:
        rewards.build_reward(setup.settings, setup.machine, function=given, columns={"colour": ""})
    assert caught.value.problem.code == "reward.signature"


def test_names_beside_functions_of_a_script_are_built_with_the_settings(calls: Any) -> None:
    setup = Setup(calls)

    def score(responses: list[str]) -> list[float]:
        return [1.0 for _ in responses]

    given = FunctionRewards(["gsm8k", FunctionReward(score)])
    rewards.build_reward(setup.settings, setup.machine, function=given).close()
    [made] = [call for call in calls.taken() if call.startswith("reward_by_name")]
    assert "'gsm8k'" in made
    assert "num_workers" in made


def test_a_check_calls_the_users_function_with_the_label_and_a_made_up_response(
    calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trial(FileReward):
        def __init__(self) -> None:
            self.closed = False

        def trial(self, items: Any) -> RewardTrial:
            self.items = list(items)
            texts = tuple(item.response_text for item in items)
            return RewardTrial("score", "own.py:1", {}, texts, (Score(0.0), Score(1.0)), "", "")

        def __call__(self, items: Any) -> list[Score]:
            return [Score(float(number)) for number in range(len(items))]

        def close(self) -> None:
            self.closed = True

    setup, made = Setup(calls, function="own.py:score"), Trial()
    monkeypatch.setattr(rewards, "reward_by_name", lambda name, **options: made)
    prompt = Prompt("p:0", (1,), "?", {"x": 1}, "rows", columns={"level": 2})
    setup.settings.reward.reward_random = False
    [trial] = rewards.check_reward(setup.settings, [prompt])
    repeats, order = trial.notes
    assert "depends on the order of the responses" in repeats
    assert order == "the label as a response gets 0, less than the 1 of a made-up response"
    assert made.closed
    setup.settings.reward.reward_random = True
    [trial] = rewards.check_reward(setup.settings, [prompt])
    assert trial.notes == (order,)
    items = made.items
    assert [(item.response_text, item.label, item.columns["level"]) for item in items] == [
        ('{"x": 1}', {"x": 1}, 2),
        ("a made-up response", {"x": 1}, 2),
    ]
    assert all(isinstance(item, RewardItem) for item in items)
    assert made.closed
    assert len(rewards.trial_items(Prompt("p:0", (1,), "?", None, "rows"))) == 1


def test_parts_that_were_built_are_closed_where_another_cannot_be(calls: Any) -> None:
    setup = Setup(calls, "judge", "judge", function="exact")
    with pytest.raises(OptionsError) as caught:
        rewards.build_reward(setup.settings, setup.machine)
    assert caught.value.problem.code == "reward.two_of_a_name"
    assert setup.closed == ["judge", "judge", "function"]


@pytest.mark.parametrize("function", ["", "math"])
def test_a_check_makes_the_function_and_closes_it_and_tries_every_kind(calls: Any, function: str) -> None:
    setup = Setup(calls, "a", "b", function=function)
    trials = rewards.check_reward(setup.settings, [Prompt("p", (1,), "?", "5", "rows")])
    assert [(trial.written, trial.responses, trial.arguments) for trial in trials] == (
        [("the rule math, on p", ("5", "a made-up response"), {"label": "5"})] if function else []
    )
    made = calls.taken()
    assert made[0] == "require_image_rewards(settings)"
    assert made[-2:] == ["kind0.check(settings)", "kind1.check(settings)"]
    assert setup.closed == (["function"] if function else [])


@pytest.mark.parametrize("images", [True, False])
def test_every_server_gets_the_numbers_of_its_settings_and_is_tried(calls: Any, images: bool) -> None:
    calls.put(
        rewards,
        "RemoteReward waiting_endpoint",
        has_images=images,
        server_places=[NamedPlace("a", "http://a"), NamedPlace("b", "http://b")],
    )
    parts = rewards.server_components(calls.double("settings"))
    tried: list[str] = []
    for name in "ab":
        tried += [
            f"waiting_endpoint(settings.reward_models, 'http://{name}', 'the reward server {name}', "
            f"'--remote_rm_url http://{name}')",
            f"RemoteReward('{name}', waiting_endpoint(), batch_size=settings.reward_models.remote_rm_batch_size, "
            "concurrency=settings.reward_models.remote_rm_concurrency)",
            "has_images(settings)",
            f"RemoteReward().start(with_image={images})",
        ]
    assert calls.taken() == ["server_places(settings.reward_models)", *tried]
    assert [(part.name, part.reward, part.waits) for part in parts] == [
        ("a", "RemoteReward()", True),
        ("b", "RemoteReward()", True),
    ]


def two_models(calls: Any, device: str, **models: Any) -> tuple[Any, Any, list[Any]]:
    """Settings, a machine and the doubles of two reward models that are loaded one after another."""
    spec = RewardSpec()
    loaded = [calls.double("first", spec=spec), calls.double("second", spec=spec)]
    turns = iter(loaded)

    def load(*places: Any, **options: Any) -> Any:
        calls.made.append(f"load {places} {sorted(options.items())}")
        return next(turns)

    calls.put(
        rewards,
        "RewardTextScorer ModelReward",
        weights_of={"a": 2.0},
        heads_of={"score": 1.0},
        model_places=[NamedPlace("a", "dir_a"), NamedPlace("b", "dir_b")],
        model_sizes=(SimpleNamespace(parameters=25), []),
    )
    calls.replace(rewards, load_reward_model=load)
    settings = calls.double(
        "settings",
        reward_models=RewardModelSettings(**models),
        model=SimpleNamespace(bf16=models.get("bf16", False), flash_attn=True),
    )
    return settings, SimpleNamespace(device=device), loaded


def test_every_reward_model_is_loaded_frozen_and_stays_on_a_cpu(calls: Any) -> None:
    settings, machine, _ = two_models(calls, "cpu", reward_batch_tokens=77)
    parts = rewards.model_components(settings, machine)
    expected = ["weights_of(settings.reward)", f"model_places({settings.reward_models!r})"]
    for name, model in (("a", "first"), ("b", "second")):
        place = NamedPlace(name, f"dir_{name}")
        expected += [
            f"heads_of({place!r}, {{'a': 2.0}})",
            f"load ('dir_{name}',) [('device', 'cpu'), ('dtype', torch.float32), ('flash_attn', True)]",
            f"{model}.model.requires_grad_(False)",
            f"{model}.head.requires_grad_(False)",
            f"RewardTextScorer({model}, max_tokens=77)",
            f"ModelReward('{name}', RewardTextScorer(), {{'score': 1.0}}, phase={nullcontext!r})",
        ]
    assert calls.taken() == expected
    assert [(part.name, part.reward, part.waits) for part in parts] == [
        ("a", "ModelReward()", False),
        ("b", "ModelReward()", False),
    ]


def test_a_model_that_visits_leaves_before_the_next_is_loaded_and_after_every_phase(
    calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[Any] = []
    settings, machine, _ = two_models(calls, "meta", reward_offload="phase")
    settings.model = SimpleNamespace(bf16=True)
    calls.replace(rewards, ModelReward=lambda *given, phase: phases.append(phase))
    rewards.model_components(settings, machine)
    made = [call for call in calls.taken() if call.startswith(("load", "first.to", "second.to"))]
    options = "[('device', 'meta'), ('dtype', torch.bfloat16), ('flash_attn', False)]"
    assert made == [f"load ('dir_a',) {options}", "first.to('cpu')", f"load ('dir_b',) {options}", "second.to('cpu')"]
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    with phases[1]():
        assert calls.taken() == ["second.to('meta')"]
    assert calls.taken() == ["second.to('cpu')"]
    assert emptied == []
    with rewards._visit(calls.double("model"), "cuda:0"):  # pyright: ignore[reportPrivateUsage]
        pass
    assert calls.taken() == ["model.to('cuda:0')", "model.to('cpu')"]
    assert emptied == [1]


@pytest.mark.parametrize(
    ("device", "offload", "bf16", "memory", "stay"),
    [
        ("cpu", "phase", False, 0, True),
        ("cuda:0", "held", False, 0, True),
        ("cuda:0", "phase", False, 10**9, False),
        # two models of 25 weights: 200 bytes in float32
        ("cuda:0", "auto", False, 2000, True),
        ("cuda:0", "auto", False, 1999, False),
        ("cuda:0", "auto", True, 1000, True),
        ("cuda:0", "auto", True, 999, False),
    ],
)
def test_models_stay_where_a_tenth_of_the_device_holds_them_all(
    calls: Any, monkeypatch: pytest.MonkeyPatch, device: str, offload: str, bf16: bool, memory: int, stay: bool
) -> None:
    settings, machine, _ = two_models(calls, device, reward_offload=offload)
    settings.model.bf16 = bf16
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (0, memory))
    rewards.model_components(settings, machine)
    assert any(call.startswith(("first.to", "second.to")) for call in calls.taken()) is not stay


def facts_of(calls: Any, *, device: str = "cpu", places: bool = True, **models: Any) -> Any:
    """Figures of a reward with two models and a function of one's own."""
    settings, _, _ = two_models(calls, device, **models)
    kinds = [
        calls.double("kind0", names=lambda given: ["a", "b"], values=lambda given: {"flag": "x"}, settings_type=""),
        calls.double("kind1", names=lambda given: ["own"], values=lambda given: {"f": 1, "g": 2}, settings_type="m:C"),
        calls.double("kind2", names=lambda given: [], values=lambda given: {}, settings_type="m:D"),
    ]
    kinds[1].name = "other"
    calls.put(
        rewards,
        "require_image_rewards",
        function_names=["own.py:score"],
        all_functions=["own.py:score"],
        routes_of=None,
        build_order=kinds,
        choose_device=device,
        server_places=[NamedPlace("s", "http://s")],
        judge_facts="judge",
    )
    if not places:
        calls.put(rewards, model_places=[])
    calls.replace(rewards, REWARD_KINDS=kinds)
    settings.model.device = "wanted"
    settings.reward = RewardSettings(reward="own.py:score")
    return rewards.reward_facts(settings)


def test_the_figures_of_a_reward_are_read_without_a_model(calls: Any) -> None:
    facts = facts_of(calls)
    assert "choose_device('wanted', 0)" in calls.taken()
    assert [(model.name, model.directory, model.num_bytes, model.heads) for model in facts.models] == [
        ("a", "dir_a", 100, {"score": 1.0}),
        ("b", "dir_b", 100, {"score": 1.0}),
    ]
    assert facts.functions == (rewards.RewardFunctionFacts("own.py:score", "processes", ""),)
    assert (facts.models_stay, facts.device) == (True, "cpu")
    assert (facts.servers, facts.judge, facts.weights) == ((NamedPlace("s", "http://s"),), "judge", {"a": 2.0})
    assert facts.others == ("other: f = 1, g = 2",)
    assert facts.num_parts == 4


def test_where_there_is_no_model_none_is_said_to_leave(calls: Any) -> None:
    assert facts_of(calls, device="meta", reward_offload="phase").models_stay is False
    assert facts_of(calls, device="meta", places=False, reward_offload="phase").models_stay is True


def test_two_parts_of_a_name_are_refused_before_anything_is_read(calls: Any) -> None:
    settings = calls.double("settings", reward=RewardSettings())
    kind = calls.double("kind", names=lambda given: ["score"])
    calls.put(rewards, "require_image_rewards", all_functions=["own.py:score"], build_order=[kind])
    with pytest.raises(OptionsError) as caught:
        rewards.reward_facts(settings)
    assert caught.value.problem.code == "reward.two_of_a_name"
    assert "score" in caught.value.problem.do
    assert not [call for call in calls.taken() if call.startswith("require")]
