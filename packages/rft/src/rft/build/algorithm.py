"""Algorithm from flags: a name selects a published `PolicyAlgorithm`, further flags change parts of it."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

from rft.settings import RlSettings
from rft_algos.algorithms import components
from rft_algos.algorithms.components import Correction, Surrogate
from rft_algos.algorithms.published import (
    ALIASES,
    PUBLISHED,
    REWARD_KL_ESTIMATORS,
    Aggregation,
    KlPlace,
    PolicyAlgorithm,
    by_name,
)
from rft_algos.algorithms.registry import component_of, components_by_flag
from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
from rft_core.user_code import load_module
from rft_trainer.settings.algorithm import AlgorithmSettings

Choice = TypeVar("Choice", components.Advantage, components.Surrogate, components.Correction)

AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "fixed_length",
}
"""The flag's words to the record's."""

SHORTCUTS = {"use_gspo": "gspo", "use_gmpo": "gmpo", "use_cpg_loss": "cpgd"}
"""Switches that stand for a `policy_loss`."""

_PREFERENCES = "it learns from preferences between given responses, and no rewards"
_OTHER_METHODS = {
    "dpo": (_PREFERENCES, "rft-train dpo"),
    "cdpo": (_PREFERENCES, "rft-train dpo --label_smoothing 0.1"),
    **{name: (_PREFERENCES, f"rft-train dpo --loss_type {name}") for name in ("ipo", "kto", "orpo", "simpo", "cpo")},
    "rm": ("reward models are trained by a command of their own", "rft-train rm"),
}
"""Methods that are no algorithms of reinforcement learning: why, and what to do."""


def algorithm_type(name: str) -> type[PolicyAlgorithm]:
    """The record type of a name, or of `file.py:Class`.

    Raises:
        OptionsError: neither a published algorithm nor a class in a file.
    """
    if ":" in name:
        return _own(name)
    known = sorted([record.name for record in PUBLISHED] + list(ALIASES))
    if name.lower() not in known:
        near = nearest_names(name.lower(), known, count=1)
        other = _OTHER_METHODS.get(name.lower())
        raise OptionsError(
            code="algorithm.unknown",
            what=f"advantage_estimator = {name!r}",
            where="--advantage_estimator",
            why=f"{other[0] + '; here ' if other else ''}it is one of {', '.join(known)}, or file.py:Class",
            do=other[1] if other else f"--advantage_estimator {near[0] if near else 'with one of these names'}",
        )
    return by_name(name.lower())


def _is_algorithm(value: object) -> TypeGuard[type[PolicyAlgorithm]]:
    return isinstance(value, type) and issubclass(value, PolicyAlgorithm)


def _own(reference: str) -> type[PolicyAlgorithm]:
    path, _, name = reference.rpartition(":")
    if not Path(path).is_file() or not path.endswith(".py"):
        raise OptionsError(
            code="algorithm.file_missing",
            what=f"{path} is not a Python file (looked in {Path.cwd()})",
            where="--advantage_estimator",
            why="an algorithm of your own is given as file.py:Class",
            do="--advantage_estimator group_norm",
        )
    try:
        module = load_module(path, "rft_user_algorithm")
    except Exception as error:
        raise _not_importable(path, error) from error
    algorithm = getattr(module, name, None)
    if not _is_algorithm(algorithm):
        # classes that the file itself defines: the ones it imports would only lengthen the list
        kinds = [
            own_name
            for own_name, value in vars(module).items()
            if _is_algorithm(value) and value.__module__ == module.__name__
        ]
        raise OptionsError(
            code="algorithm.class_missing",
            what=f"{path} has no subclass of PolicyAlgorithm called {name}; it has: {', '.join(kinds) or 'none'}",
            where="--advantage_estimator",
            why="an algorithm of your own is given as file.py:Class",
            do=f"--advantage_estimator {path}:{kinds[-1]}" if kinds else f"class {name}(PolicyAlgorithm): in {path}",
        )
    return algorithm


def _not_importable(path: str, error: Exception) -> OptionsError:
    """Return the error that the user's file raised, with the last line of that file that was running."""
    own_file = Path(path).resolve()
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    # a file with a syntax error never ran, so the traceback has no frame of it
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    lines = [line for file, line in frames if Path(file).resolve() == own_file]
    return OptionsError(
        code="algorithm.file_fails",
        what=f"{path} cannot be imported: {type(error).__name__}: {error}",
        where=f"{path}{f':{lines[-1]}' if lines else ''} (--advantage_estimator)",
        why="the file of an algorithm is imported before anything starts",
        do=f"python {path}, until it runs without an error",
    )


def value_head(settings: RlSettings) -> str:
    """Return the name of the weight of the critic's head; empty where the algorithm needs no critic."""
    return f"{settings.critic.value_head_prefix}.weight" if algorithm_record(settings).advantage.needs_values else ""


def algorithm_record(settings: RlSettings) -> PolicyAlgorithm:
    """The algorithm of the settings as one record.

    Raises:
        OptionsError: a flag that does not belong to the algorithm, or flags that contradict each other.
    """
    chosen = settings.algorithm
    kind = algorithm_type(chosen.advantage_estimator)
    base = _published(kind, settings.sampling.generate_max_len)
    aggregation = AGGREGATIONS[chosen.loss_agg_mode] if chosen.loss_agg_mode else base.aggregation
    surrogate = _surrogate(chosen, base)
    changes: dict[str, Any] = {
        "advantage": _advantage(settings, base),
        "surrogate": surrogate,
        "correction": _correction(settings, base),
        "aggregation": aggregation,
        # the record refuses `fixed_length` without the number that it divides by, and any other with one
        "max_tokens": settings.sampling.generate_max_len if aggregation == "fixed_length" else None,
        "off_policy_delta": chosen.off_policy_delta,
        **_divergence(chosen, base),
        **_given(
            entropy_coef=chosen.entropy_coef,
            normalise_advantages=chosen.advantages_norm,
            dynamic_sampling=chosen.dynamic_sampling,
            kl_estimator=chosen.kl_estimator,
        ),
        "advantage_clip": chosen.advantage_clip or base.advantage_clip,
        "high_entropy_fraction": chosen.high_entropy_token_ratio or base.high_entropy_fraction,
        "overlong_buffer_share": _overlong_share(chosen, base),
    }
    record = replace(base, **changes)
    _check(settings, record)
    return record


def _published(kind: type[PolicyAlgorithm], longest_response: int) -> PolicyAlgorithm:
    # asked of the field's default: no instance can be made before the length is known
    divides = next(field.default for field in fields(kind) if field.name == "aggregation") == "fixed_length"
    return kind(max_tokens=longest_response) if divides else kind()


def _given(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _surrogate(chosen: AlgorithmSettings, base: PolicyAlgorithm) -> Surrogate:
    asked = {name: SHORTCUTS[name] for name in SHORTCUTS if getattr(chosen, name)}
    asked |= {"policy_loss": chosen.policy_loss} if chosen.policy_loss else {}
    # two switches may stand for the same surrogate
    if len(set(asked.values())) > 1:
        written = " and ".join(
            f"{name} = {getattr(chosen, name)}" if name == "policy_loss" else name for name in sorted(asked)
        )
        keep = next(iter(asked.values()))
        raise _refused("algorithm.two_surrogates", written, "a step minimises one surrogate", f"--policy_loss {keep}")
    surrogate = _surrogate_of(next(iter(asked.values()))) if asked else base.surrogate
    bounds = _given(low=chosen.eps_clip, high=chosen.eps_clip_high)
    # one bound that is given means a symmetric range, also where two unequal ones were published
    if chosen.eps_clip is not None and chosen.eps_clip_high is None:
        bounds["high"] = chosen.eps_clip
    bounds |= _given(dual=chosen.dual_clip)
    return _with(surrogate, bounds, {"low": "eps_clip", "high": "eps_clip_high", "dual": "dual_clip"}, "surrogate")


def _surrogate_of(word: str) -> Surrogate:
    if word not in components_by_flag(Surrogate):
        # its file holds the equation too, which needs torch; the published components do without
        importlib.import_module("rft_algos.surrogates")
    return component_of(Surrogate, word)


def _with(choice: Choice, changes: Mapping[str, object], flags: Mapping[str, str], noun: str) -> Choice:
    """Return the component with other numbers; a number that it does not have is refused by its flag."""
    has = {field.name for field in fields(choice)}  # type: ignore[arg-type]
    foreign = [name for name in changes if name not in has]
    if foreign:
        raise _refused(
            "algorithm.foreign_flag",
            f"{flags[foreign[0]]} = {changes[foreign[0]]}",
            f"the {noun} {type(choice).__name__} has no such parameter",
            f"leave {flags[foreign[0]]} out",
        )
    return replace(choice, **changes) if changes else choice  # type: ignore[type-var]


def _advantage(settings: RlSettings, base: PolicyAlgorithm) -> components.Advantage:
    chosen, turns = settings.algorithm, settings.conversation
    turn_gamma = turns.turn_gamma if turns.environment else None
    if chosen.lambd is not None and chosen.lambd_value is not None and chosen.length_alpha is not None:
        raise _refused(
            "algorithm.idle_lambda",
            f"lambd = {chosen.lambd:g} with lambd_value and length_alpha",
            "the returns have lambd_value and the advantages the lambda of their length, so that lambd is used nowhere",
            "leave lambd out",
        )
    changes = _given(
        gamma=chosen.gamma,
        lambd=chosen.lambd,
        turn_gamma=turn_gamma,
        k=chosen.pass_k,
        lambd_value=chosen.lambd_value,
        length_alpha=chosen.length_alpha,
    )
    flags = {name: name for name in changes} | {"k": "pass_k"}
    return _with(base.advantage, changes, flags, "advantage")


def _correction(settings: RlSettings, base: PolicyAlgorithm) -> Correction:
    chosen = settings.algorithm
    word = chosen.off_policy_correction
    if word is None and settings.sampling.use_fire and not base.correction.is_active:
        word = "tis"  # the first token is drawn from another distribution than the one that is trained
    correction = component_of(Correction, word) if word else base.correction
    has = {field.name for field in fields(correction)}
    # below the lower bound a mask gives 0, and truncation gives the bound itself
    lower = "floor" if "floor" in has else "low"
    changes = _given(high=chosen.off_policy_high, limit=chosen.off_policy_limit) | _given(
        **{lower: chosen.off_policy_low}
    )
    if word and "cap" in has:
        changes["cap"] = chosen.off_policy_cap
    flags = {lower: "off_policy_low", "high": "off_policy_high", "limit": "off_policy_limit"}
    correction = _with(correction, changes, flags, "correction")
    if chosen.off_policy_veto is not None:
        veto = components.Veto(low=chosen.off_policy_veto)
        correction = components.Product(parts=(correction, veto)) if correction.is_active else veto
    if chosen.off_policy_normalize and not correction.is_active:
        raise _refused(
            "algorithm.nothing_to_normalize",
            "off_policy_normalize without a correction",
            "it scales the weights of a correction, and without one all are 1",
            "--off_policy_correction tis",
        )
    return components.SelfNormalised(part=correction) if chosen.off_policy_normalize else correction


def _divergence(chosen: AlgorithmSettings, base: PolicyAlgorithm) -> dict[str, object]:
    # the coefficient weighs the drift where the objective has that in place of a KL term
    if base.drift_coef > 0:
        return _given(drift_coef=chosen.init_kl_coef)
    coefficient = base.kl_coef if chosen.init_kl_coef is None else chosen.init_kl_coef
    kl_place: KlPlace = base.kl_place
    if chosen.use_kl_loss is not None:
        kl_place = "loss" if chosen.use_kl_loss else "reward"
    elif chosen.init_kl_coef and kl_place == "none":
        # a coefficient that was asked for must act: where the algorithm has no place for it, in the reward
        kl_place = "reward"
    if kl_place == "reward" and coefficient > 0 and chosen.kl_estimator not in (None, *REWARD_KL_ESTIMATORS):
        raise _refused(
            "kl.estimator_of_a_loss",
            f"kl_estimator = {chosen.kl_estimator} with a divergence in the reward",
            "it differs from k1 or k3 by its gradient alone, and a reward has none",
            "--use_kl_loss",
        )
    # without a weight there is no term, and no reference model is loaded for it
    return {"kl_coef": coefficient, "kl_place": kl_place if coefficient > 0 else "none"}


def _overlong_share(chosen: AlgorithmSettings, base: PolicyAlgorithm) -> float:
    wanted = base.overlong_buffer_share > 0 if chosen.overlong_buffer is None else chosen.overlong_buffer
    return (base.overlong_buffer_share or 0.2) if wanted else 0.0


def _check(settings: RlSettings, record: PolicyAlgorithm) -> None:
    chosen, name = settings.algorithm, settings.algorithm.advantage_estimator
    if record.surrogate.by_sequence and record.aggregation not in record.surrogate.aggregations:
        words = {aggregation: word for word, aggregation in AGGREGATIONS.items()}
        allowed = [
            words[aggregation] for aggregation in AGGREGATIONS.values() if aggregation in record.surrogate.aggregations
        ]
        raise _refused(
            "algorithm.sequence_loss",
            f"{type(record.surrogate).__name__} with loss_agg_mode {chosen.loss_agg_mode or words[record.aggregation]}",
            f"its value belongs to a sequence; the published loss is a mean over sequences: {', '.join(allowed)}",
            f"--loss_agg_mode {words[cast(Aggregation, record.surrogate.aggregations[0])]}",
        )
    by_turn = bool(settings.conversation.environment) and isinstance(
        record.advantage, components.Gae | components.Returns
    )
    scaled = chosen.reward_running_norm or chosen.reward_running_norm_minus_mean or chosen.reward_clip > 0
    if by_turn and scaled:
        what = "reward_clip" if chosen.reward_clip > 0 else "reward_running_norm"
        raise _refused(
            "algorithm.scaled_turns",
            f"{what} with {name} and an environment",
            "it scales the reward of a whole response, and here every turn has its own",
            f"leave {what} out",
        )
    if chosen.kl_target is not None and not (record.needs_reference or record.drift_coef > 0):
        raise _refused(
            "kl.no_controller",
            f"kl_target = {chosen.kl_target:g} with {name}",
            "it adjusts the weight of a divergence or of a drift, and this objective has neither",
            "--init_kl_coef 0.01",
        )
    if chosen.entropy_target is not None and not record.entropy_coef:
        raise _refused(
            "entropy.no_weight",
            f"entropy_target = {chosen.entropy_target:g}",
            "it adjusts the weight of the entropy bonus, and there is none",
            "--entropy_coef 0.001",
        )
    if record.advantage.compares_groups and settings.batch.n_samples_per_prompt < 2:
        raise _refused(
            "batch.group_of_one",
            f"n_samples_per_prompt = {settings.batch.n_samples_per_prompt} with {name}",
            "an advantage is relative to the other responses of its prompt: a group of one always gets 0",
            "--n_samples_per_prompt 8",
        )


def _refused(code: str, what: str, why: str, do: str) -> OptionsError:
    return OptionsError(code=code, what=what, where="the algorithm", why=why, state="nothing was started", do=do)
