"""Flags become one record of an algorithm: what each changes, what it leaves, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from rft.build.algorithm import AGGREGATIONS, algorithm_record, algorithm_type, value_head
from rft.settings import RlSettings
from rft_algos.algorithms import components
from rft_algos.algorithms.published import REWARD_KL_ESTIMATORS, Dapo, DrGrpo, PolicyAlgorithm, by_name
from rft_core.errors import OptionsError
from rft_models.settings import ModelSettings
from rft_trainer.settings.algorithm import KlEstimator

BASE = RlSettings(model=ModelSettings(pretrain="m"))
OWN = "from rft_algos.algorithms.published import Grpo\n"


def settings(estimator: str = "group_norm", **chosen: Any) -> RlSettings:
    return replace(BASE, algorithm=replace(BASE.algorithm, advantage_estimator=estimator, **chosen))


def record(estimator: str = "group_norm", **chosen: Any) -> PolicyAlgorithm:
    return algorithm_record(settings(estimator, **chosen))


def refused(given: RlSettings) -> OptionsError:
    with pytest.raises(OptionsError) as caught:
        algorithm_record(given)
    return caught.value


def test_without_a_flag_the_record_is_the_published_one() -> None:
    for name in ("group_norm", "dapo", "gspo", "cpgd", "reinforce"):
        assert record(name) == by_name(name)()
    longest = BASE.sampling.generate_max_len
    assert record("dr_grpo") == DrGrpo(max_tokens=longest)
    assert type(record("DAPO")) is Dapo


def test_a_name_that_is_not_published_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionsError) as caught:
        algorithm_type("dappo")
    assert caught.value.problem.code == "algorithm.unknown"
    assert caught.value.problem.do == "--advantage_estimator dapo"


@pytest.mark.parametrize(
    ("text", "line"), [("a = 1\nraise ValueError('x')", 2), ("a = 1\n\nb = (", 3), ("import no_such_module_at_all", 1)]
)
def test_a_file_that_fails_is_named_with_its_line_however_its_path_is_written(
    text: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for path in ("own.py", str(tmp_path / "own.py")):
        with pytest.raises(OptionsError) as caught:
            algorithm_type(f"{path}:Mine")
        assert caught.value.problem.where == f"{path}:{line} (--advantage_estimator)"


@pytest.mark.parametrize(
    ("text", "name", "code", "do"),
    [
        (None, "Mine", "algorithm.file_missing", "--advantage_estimator group_norm"),
        ("raise ValueError('x')", "Mine", "algorithm.file_fails", "python own.py, until it runs without an error"),
        ("a = (", "Mine", "algorithm.file_fails", "python own.py, until it runs without an error"),
        (OWN + "class A(Grpo): pass\nclass B(Grpo): pass\nMine = 3", "Mine", "algorithm.class_missing", "own.py:B"),
        ("class Mine: pass", "Mine", "algorithm.class_missing", "class Mine(PolicyAlgorithm): in own.py"),
        (OWN, "Mine", "algorithm.class_missing", "class Mine(PolicyAlgorithm): in own.py"),
    ],
)
def test_a_file_without_an_algorithm_is_refused(text: str | None, name: str, code: str, do: str) -> None:
    if text is not None:
        Path("own.py").write_text(text + "\n")
    with pytest.raises(OptionsError) as caught:
        algorithm_type(f"own.py:{name}")
    assert caught.value.problem.code == code
    assert caught.value.problem.do.endswith(do)


def test_an_algorithm_of_a_file_is_taken_and_another_ending_is_not() -> None:
    text = "from rft_algos.algorithms.published import Grpo\nclass Mine(Grpo): pass\n"
    Path("own.py").write_text(text)
    Path("own.txt").write_text(text)
    assert algorithm_type("own.py:Mine").__name__ == "Mine"
    with pytest.raises(OptionsError) as caught:
        algorithm_type("own.txt:Mine")
    assert caught.value.problem.code == "algorithm.file_missing"


def test_the_line_of_the_user_s_file_is_named() -> None:
    own, other = Path("own.py").absolute(), Path("other.py").absolute()
    own.write_text("x = 1\n\nint('a')\n")
    other.write_text("x = 1\ny = (\n")
    for file, line in ((own, 3), (other, 2)):
        with pytest.raises(OptionsError) as caught:
            algorithm_type(f"{file}:Mine")
        assert caught.value.problem.where.startswith(f"{file}:{line} ")


@pytest.mark.parametrize("word", AGGREGATIONS)
def test_the_mean_over_tokens_is_chosen_and_a_length_given_where_it_divides(word: str) -> None:
    found = record("reinforce", loss_agg_mode=word)
    assert found.aggregation == AGGREGATIONS[word]
    length = BASE.sampling.generate_max_len if word == "seq-mean-token-sum-norm" else None
    assert found.max_tokens == length
    assert record("dr_grpo", loss_agg_mode="token-mean").max_tokens is None


def test_a_switch_and_a_policy_loss_choose_the_surrogate() -> None:
    mean = "seq-mean-token-mean"
    assert type(record(use_gspo=True, loss_agg_mode=mean).surrogate) is components.Gspo
    assert type(record(use_gmpo=True, loss_agg_mode=mean).surrogate) is components.Gmpo
    assert type(record(policy_loss="cispo").surrogate) is components.Cispo
    assert type(record(use_gspo=True, policy_loss="gspo", loss_agg_mode=mean).surrogate) is components.Gspo
    assert record().surrogate == components.PpoClip()
    twice = refused(settings(use_gspo=True, policy_loss="ppo"))
    assert twice.problem.code == "algorithm.two_surrogates"
    assert twice.problem.what == "policy_loss = ppo and use_gspo"
    assert twice.problem.do == "--policy_loss gspo"


def test_clip_ranges_of_the_surrogate() -> None:
    assert record(eps_clip=0.1).surrogate == components.PpoClip(low=0.1, high=0.1)
    assert record(eps_clip=0.1, eps_clip_high=0.3).surrogate == components.PpoClip(low=0.1, high=0.3)
    assert record("dapo", eps_clip_high=0.4).surrogate == components.PpoClip(low=0.2, high=0.4)
    dual: Any = record(policy_loss="dual_clip", dual_clip=4.0, eps_clip=0.1).surrogate
    assert (dual.dual, dual.low, dual.high) == (4.0, 0.1, 0.1)


def test_a_number_that_a_component_does_not_have_is_refused_by_its_flag() -> None:
    for given, flag in (
        (settings(policy_loss="sapo", eps_clip=0.1), "eps_clip"),
        (settings("reinforce", eps_clip_high=0.1), "eps_clip_high"),
        (settings(lambd=0.9), "lambd"),
        (settings(gamma=0.9), "gamma"),
        (settings(pass_k=2), "pass_k"),
        (settings(off_policy_low=0.5), "off_policy_low"),
    ):
        problem = refused(given).problem
        assert problem.code == "algorithm.foreign_flag"
        assert problem.what.startswith(f"{flag} = ")
        assert problem.do == f"leave {flag} out"


def test_numbers_of_the_advantage() -> None:
    found = record("gae", gamma=0.9, lambd=0.8)
    assert isinstance(found.advantage, components.Gae)
    assert (found.advantage.gamma, found.advantage.lambd) == (0.9, 0.8)
    turns = replace(BASE.conversation, environment="own.py:E", turn_gamma=0.5)
    with_turns = algorithm_record(replace(settings("gae"), conversation=turns))
    assert with_turns.advantage == replace(by_name("gae")().advantage, turn_gamma=0.5)
    alone = algorithm_record(replace(settings("gae"), conversation=replace(BASE.conversation, turn_gamma=0.5)))
    assert alone.advantage == by_name("gae")().advantage


def test_a_correction_with_its_bounds_and_its_cap() -> None:
    tis = record(off_policy_correction="tis", off_policy_cap=3.0).correction
    assert tis == components.TokenTis(cap=3.0)
    bounds = {"low", "high"}
    masked = next(word for word, kind in _corrections().items() if bounds <= set(kind.__dataclass_fields__))
    found: Any = record(off_policy_correction=masked, off_policy_low=0.25, off_policy_high=4.0).correction
    assert (found.low, found.high) == (0.25, 4.0)
    assert not record().correction.is_active


def _corrections() -> dict[str, Any]:
    from rft_algos.algorithms.registry import components_by_flag

    return dict(components_by_flag(components.Correction))


def test_a_first_token_of_another_distribution_is_corrected() -> None:
    fire = replace(BASE.sampling, use_fire=True)
    assert algorithm_record(replace(BASE, sampling=fire)).correction == components.TokenTis(
        cap=BASE.algorithm.off_policy_cap
    )
    given = algorithm_record(replace(settings(off_policy_correction="tis", off_policy_cap=5.0), sampling=fire))
    assert given.correction == components.TokenTis(cap=5.0)


@pytest.mark.parametrize(
    ("name", "chosen", "place", "coefficient"),
    [
        ("group_norm", {}, None, None),
        ("dapo", {"init_kl_coef": 0.1}, "reward", 0.1),
        ("dapo", {"init_kl_coef": 0.1, "use_kl_loss": True}, "loss", 0.1),
        ("grpo", {"init_kl_coef": 0.0}, "none", 0.0),
        ("grpo", {"init_kl_coef": 0.3}, "loss", 0.3),
        ("grpo", {"use_kl_loss": False}, "reward", 0.04),
        ("dapo", {"init_kl_coef": 0.0}, "none", 0.0),
    ],
)
def test_where_the_divergence_goes_and_its_weight(
    name: str, chosen: dict[str, Any], place: str | None, coefficient: float | None
) -> None:
    found, base = record(name, **chosen), by_name(name)()
    assert found.kl_place == (base.kl_place if place is None else place)
    assert found.kl_coef == (base.kl_coef if coefficient is None else coefficient)


def test_the_weight_of_a_drift_is_that_of_the_divergence() -> None:
    found = record("cpgd", init_kl_coef=0.25)
    assert (found.drift_coef, found.kl_coef, found.kl_place) == (0.25, 0.0, "none")
    assert record("cpgd").drift_coef == by_name("cpgd")().drift_coef


def test_a_buffer_for_overlong_responses() -> None:
    assert record("dapo").overlong_buffer_share == 0.2
    assert record("dapo", overlong_buffer=False).overlong_buffer_share == 0.0
    assert record(overlong_buffer=True).overlong_buffer_share == 0.2
    assert record().overlong_buffer_share == 0.0


@pytest.mark.parametrize(
    ("word", "kind"),
    [("tis", components.TokenTis), ("seq-tis", components.SequenceTis), ("geo-tis", components.GeometricTis)],
)
def test_the_lower_bound_of_a_truncation_is_its_smallest_weight(word: str, kind: type[Any]) -> None:
    found = record(off_policy_correction=word, off_policy_cap=3.0, off_policy_low=0.25).correction
    assert found == kind(cap=3.0, floor=0.25)
    problem = refused(settings(off_policy_correction=word, off_policy_high=4.0)).problem
    assert (problem.code, problem.do) == ("algorithm.foreign_flag", "leave off_policy_high out")


def test_a_critic_may_have_a_lambda_of_its_own() -> None:
    found = record("gae", lambd=0.9, lambd_value=1.0).advantage
    assert found == components.Gae(lambd=0.9, lambd_value=1.0)
    assert record("gae", lambd=0.9, length_alpha=0.05).advantage == components.Gae(lambd=0.9, length_alpha=0.05)
    vapo = {"lambd_value": 1.0, "length_alpha": 0.05}
    assert record("gae", **vapo).advantage == components.Gae(**vapo)
    problem = refused(settings("gae", lambd=0.9, **vapo)).problem
    assert (problem.code, problem.do) == ("algorithm.idle_lambda", "leave lambd out")
    for given in vapo:
        assert refused(settings(**{given: vapo[given]})).problem.do == f"leave {given} out"


def test_corrections_are_combined() -> None:
    assert record(off_policy_correction="m2po").correction == components.SecondMoment(limit=0.04)
    assert record(off_policy_correction="m2po", off_policy_limit=0.1).correction == components.SecondMoment(limit=0.1)
    assert refused(settings(off_policy_correction="mis", off_policy_limit=0.1)).problem.code == "algorithm.foreign_flag"
    veto, mask = components.Veto(low=1e-3), components.TokenMis()
    assert record(off_policy_veto=1e-3).correction == veto
    both = components.Product(parts=(mask, veto))
    assert record(off_policy_correction="mis", off_policy_veto=1e-3).correction == both
    found = record(off_policy_correction="mis", off_policy_veto=1e-3, off_policy_normalize=True)
    assert found.correction == components.SelfNormalised(part=both)
    assert found.needs_old_logprobs
    problem = refused(settings(off_policy_normalize=True)).problem
    assert (problem.code, problem.do) == ("algorithm.nothing_to_normalize", "--off_policy_correction tis")


@pytest.mark.parametrize("word", ["dro", "vespo", "topr"])
def test_a_sum_over_a_sequence_may_be_divided_by_a_length(word: str) -> None:
    for mean in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        assert record(policy_loss=word, loss_agg_mode=mean).aggregation == AGGREGATIONS[mean]
    problem = refused(settings("dapo", policy_loss=word)).problem
    assert (problem.code, problem.do) == ("algorithm.sequence_loss", "--loss_agg_mode seq-mean-token-sum")
    assert "token-mean" in problem.what


def test_what_is_given_replaces_what_is_published_and_nothing_else() -> None:
    found = record(
        "dapo",
        entropy_coef=0.01,
        advantages_norm=True,
        dynamic_sampling=False,
        kl_estimator="k2",
        advantage_clip=3.0,
        high_entropy_token_ratio=0.3,
        off_policy_delta=0.7,
    )
    assert found == Dapo(
        entropy_coef=0.01,
        normalise_advantages=True,
        dynamic_sampling=False,
        kl_estimator="k2",
        advantage_clip=3.0,
        high_entropy_fraction=0.3,
        off_policy_delta=0.7,
    )


@pytest.mark.parametrize("estimator", sorted({*get_args(KlEstimator)} - {*REWARD_KL_ESTIMATORS}))
def test_an_estimator_of_a_loss_is_refused_in_the_reward(estimator: str) -> None:
    problem = refused(settings("dapo", init_kl_coef=0.1, kl_estimator=estimator)).problem
    assert (problem.code, problem.do) == ("kl.estimator_of_a_loss", "--use_kl_loss")
    found = record("dapo", init_kl_coef=0.1, kl_estimator=estimator, use_kl_loss=True)
    assert (found.kl_estimator, found.kl_place) == (estimator, "loss")
    # without a divergence it is left out with a note, as k2 is
    assert record("dapo", kl_estimator=estimator).kl_place == "none"
    assert refused(settings("rloo", kl_estimator=estimator)).problem.do == "--use_kl_loss"


def test_a_value_of_a_whole_sequence_has_one_mean() -> None:
    assert refused(settings(use_gspo=True, loss_agg_mode="token-mean")).problem.code == "algorithm.sequence_loss"
    assert record("gspo").aggregation == "sequence_mean_token_mean"


def test_rewards_of_turns_are_not_scaled() -> None:
    turns = replace(BASE.conversation, environment="own.py:E")
    for chosen, flag in (
        ({"reward_clip": 1.0}, "reward_clip"),
        ({"reward_running_norm": True}, "reward_running_norm"),
        ({"reward_running_norm_minus_mean": True}, "reward_running_norm"),
    ):
        problem = refused(replace(settings("gae", **chosen), conversation=turns)).problem
        assert (problem.code, problem.do) == ("algorithm.scaled_turns", f"leave {flag} out")
        algorithm_record(settings("gae", **chosen))
        algorithm_record(replace(settings(**chosen), conversation=turns))
    assert refused(replace(settings("reinforce", reward_clip=1.0), conversation=turns)).problem.code
    algorithm_record(replace(settings("gae"), conversation=turns))


def test_a_target_needs_the_weight_that_it_moves() -> None:
    assert refused(settings("dapo", kl_target=0.1)).problem.code == "kl.no_controller"
    record("dapo", kl_target=0.1, init_kl_coef=0.01)
    record("cpgd", kl_target=0.1)
    assert refused(settings(entropy_target=0.1)).problem.code == "entropy.no_weight"
    record(entropy_target=0.1, entropy_coef=0.01)


def test_a_comparison_within_a_group_needs_two() -> None:
    one = replace(BASE.batch, n_samples_per_prompt=1)
    assert refused(replace(BASE, batch=one)).problem.code == "batch.group_of_one"
    algorithm_record(replace(settings("gae"), batch=one))
    algorithm_record(replace(BASE, batch=replace(BASE.batch, n_samples_per_prompt=2)))


def test_only_a_critic_has_a_head() -> None:
    assert value_head(settings("gae")) == "score.weight"
    assert value_head(settings("rloo")) == ""


@pytest.mark.parametrize(
    ("name", "do"),
    [
        ("gpro", "--advantage_estimator grpo"),
        ("ppo2", "--advantage_estimator ppo"),
        ("sft", "--advantage_estimator with one of these names"),
        ("dpo", "rft-train dpo"),
        ("kto", "rft-train dpo --loss_type kto"),
        ("qwertz", "--advantage_estimator with one of these names"),
    ],
)
def test_an_unknown_algorithm_is_answered_with_what_is_near_or_meant_or_with_all(name: str, do: str) -> None:
    with pytest.raises(OptionsError) as caught:
        algorithm_type(name)
    assert (caught.value.problem.code, caught.value.problem.do) == ("algorithm.unknown", do)
