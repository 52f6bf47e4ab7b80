"""Input that an equation cannot take is refused by name, with and without `python -O`."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from rft_algos import advantages, surrogates
from rft_algos.algorithms.published import Grpo
from rft_algos.input_checks import InputError, check_bounds, check_clip, check_not_negative, check_positive, check_unit
from rft_algos.losses import aggregation, distillation, off_policy, preference, supervised
from rft_algos.losses.logits import logprobs_from_logits
from rft_algos.losses.preference_variants import Pairs
from rft_algos.objectives import policy_loss
from rft_algos.packed import token_selection
from rft_core.errors import OptionsError

ONES, MASK, IDS = torch.ones(4), torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
ROWS, ROW_MASK, ROW_IDS = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.int64)
LOGITS = torch.zeros(2, 3, 5)

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    # sums over time in place of the vocabulary, ranks row by row with the count of the batch
    "forward_kl of [B, T, V]": (lambda: distillation.forward_kl(LOGITS, LOGITS), "student_logits_TV must have one row"),
    "reverse_kl of [B, T, V]": (lambda: distillation.reverse_kl(LOGITS, LOGITS), "student_logits_TV must have one row"),
    "jensen_shannon of [B, T, V]": (lambda: distillation.jensen_shannon(LOGITS, LOGITS), "must have one row a token"),
    "top_k_forward_kl of [B, T, V]": (
        lambda: distillation.top_k_forward_kl(LOGITS, LOGITS, LOGITS.long()),
        "must have one row a token",
    ),
    "select_kl_cov of [B, T]": (lambda: surrogates.select_kl_cov(ROWS, ROW_MASK, fraction=0.5), r"one shape \[T\]"),
    "high_entropy_tokens of [B, T]": (
        lambda: token_selection.high_entropy_tokens(ROWS, ROW_MASK, fraction=0.5),
        r"one shape \[T\]",
    ),
    "largest of [B, T]": (lambda: token_selection.largest(ROWS, ROW_MASK, 2), r"one shape \[T\]"),
    "gspo of [B, T]": (lambda: surrogates.gspo(ROWS, ROWS, ROW_MASK, ROW_IDS), r"one shape \[T\]"),
    "gae of [B, T]": (lambda: advantages.gae(ROWS, ROWS, ROW_MASK, ROW_IDS), r"one shape \[T\]"),
    "returns of [B, T]": (lambda: advantages.discounted_returns(ROWS, ROW_MASK, ROW_IDS), r"one shape \[T\]"),
    "moments of [B, T]": (lambda: advantages.moments(ROWS, ROW_MASK), r"one shape \[T\]"),
    # what is no tensor, or of another shape
    "a list of log-ratios": (
        lambda: surrogates.ppo_clip([0.1], ONES, 0.2, 0.2),
        "log_ratio_T must be a tensor, it is a list",
    ),
    "one advantage a row": (
        lambda: surrogates.ppo_clip(ROWS, ROWS[:, 0], 0.2, 0.2),
        "every argument must have one shape",
    ),
    "advantages of rows that are as many as positions": (
        lambda: surrogates.reinforce(torch.zeros(3, 3), torch.zeros(3)),
        "every argument must have one shape",
    ),
    "sapo of other lengths": (lambda: surrogates.sapo(ONES, ONES[:2]), "every argument must have one shape"),
    "cispo of other lengths": (lambda: surrogates.cispo(ONES, ONES, ONES[:2], None, 4.0), "must have one shape"),
    "dpo of tokens": (lambda: preference.dpo(ROWS, ROWS, ROWS, ROWS), r"one shape \[B\]"),
    "dpo of other numbers": (lambda: preference.dpo(ONES, ONES[:2], ONES, ONES), r"one shape \[B\]"),
    "simpo's lengths as a list": (
        lambda: preference.simpo(ONES, ONES, [1, 2, 3, 4], ONES, beta=2.0, gamma=0.5),
        "chosen_lengths_B must be a tensor",
    ),
    "pairs of other numbers": (lambda: Pairs(ONES, ONES[:2], ONES, ONES), r"one shape \[B\]"),
    "labels of good and bad as 1 and -1": (lambda: preference.kto(ONES, ONES, ONES, 0.0), "desirable_B must be bool"),
    "segment ids as floats": (lambda: surrogates.gspo(ONES, ONES, MASK, ONES), "segment_ids_T must be integers"),
    "token ids as floats": (lambda: logprobs_from_logits(LOGITS, ROWS), "token ids must be integers"),
    "a token that is ignored elsewhere": (lambda: logprobs_from_logits(LOGITS, ROW_IDS - 100), "token id -100"),
    "a token beyond the vocabulary": (lambda: logprobs_from_logits(LOGITS, ROW_IDS + 5), "token id 5 for logits of 5"),
    # masks and ids
    "a float mask of gspo": (lambda: surrogates.gspo(ONES, ONES, ONES, IDS), "loss_mask_T must be bool"),
    "a float mask of whiten": (
        lambda: advantages.whiten(ONES, ONES, advantages.moments(ONES, MASK)),
        "mask_T must be bool",
    ),
    "a float mask of largest": (lambda: token_selection.largest(ONES, ONES, 2), "loss_mask_T must be bool"),
    "group ids that are texts": (lambda: advantages.group_norm(ONES, ["a"] * 4), "tensor of integers"),  # type: ignore[arg-type]
    "group ids that are floats": (lambda: advantages.group_norm(ONES, ONES), "group_ids_N must be integers"),
    "rewards of NaN": (lambda: advantages.group_norm(ONES * math.nan, IDS), "missing or failed"),
    # ranges
    "gamma above 1": (lambda: advantages.discounted_returns(ONES, MASK, IDS, gamma=1.5), "gamma must be in"),
    "gamma of NaN": (lambda: advantages.discounted_returns(ONES, MASK, IDS, gamma=math.nan), "gamma must be in"),
    "lambda below 0": (lambda: advantages.gae(ONES, ONES, MASK, IDS, lambd=-0.1), "lambd must be in"),
    "turn_gamma above 1": (lambda: advantages.gae(ONES, ONES, MASK, IDS, turn_gamma=2.0), "turn_gamma must be in"),
    "lambda of the policy": (
        lambda: advantages.decoupled_gae(ONES, ONES, MASK, IDS, lambd_policy=1.5),
        "lambd_policy must be in",
    ),
    "alpha of 0": (lambda: advantages.length_adaptive_lambda(ONES, alpha=0.0), "alpha must be positive"),
    "a negative epsilon": (lambda: advantages.group_norm(ONES, IDS, epsilon=-1.0), "epsilon must be 0 or more"),
    "a bound for its distance": (lambda: surrogates.ppo_clip(ONES, ONES, 1.2, 0.2), "clip_low must be in"),
    "a negative clip": (lambda: surrogates.ppo_clip(ONES, ONES, 0.2, -0.2), "clip_high must be 0 or more"),
    "a negative clip of gspo": (lambda: surrogates.gspo(ONES, ONES, MASK, IDS, 3e-4, -1.0), "clip_high"),
    "a negative clip of gmpo": (lambda: surrogates.gmpo(ONES, ONES, MASK, IDS, -0.4, 0.4), "clip_low"),
    "a clip of cpgd at 0": (lambda: surrogates.cpgd(ONES, ONES, ONES, 1.0, 0.2), "clip_low must be below 1"),
    "a clip of cispo": (lambda: surrogates.cispo(ONES, ONES, ONES, None, -2.0), "clip_high"),
    "a tau of 0": (lambda: surrogates.sapo(ONES, ONES, 0.0, 1.0), "tau_positive must be positive"),
    "a limit of dppo": (lambda: surrogates.dppo_tv(ONES, ONES, ONES, -0.1, 0.1), "limit_low must be positive"),
    "a cap of 0": (lambda: off_policy.truncate_tokens(ONES, cap=0.0), "cap must be positive"),
    "bounds the wrong way round": (lambda: off_policy.mask_tokens(ONES, 5.0, 0.5), "must not be above"),
    "a beta of 0": (lambda: preference.dpo(ONES, ONES, ONES, ONES, beta=0.0), "beta must be positive"),
    "a length of 0": (lambda: aggregation.fixed_length(MASK, 1, 0), "max_tokens must be positive"),
    "a negative z loss": (lambda: supervised.z_loss(ONES, -1.0), "coefficient must be 0 or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_equation_cannot_take_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OptionsError)
    assert caught.value.problem.where.startswith("rft_algos.")
    assert "_checks" not in caught.value.problem.where


def test_the_error_names_the_function_that_was_given_it() -> None:
    with pytest.raises(InputError) as caught:
        advantages.gae(ONES, ONES, MASK, IDS, gamma=2.0)
    assert caught.value.problem.where == "rft_algos.advantages.gae.gae"
    assert caught.value.problem.code == "algorithm.input"


def test_checks_stay_under_python_O() -> None:
    code = (
        "import torch\n"
        "from rft_algos.advantages import group_norm\n"
        "try:\n"
        "    group_norm(torch.tensor([float('nan'), 1.0]), torch.tensor([0, 0]))\n"
        "except ValueError as error:\n"
        "    print(error.problem.code, __debug__)\n"
    )
    run = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["algorithm.input", "False"]


@pytest.mark.parametrize(
    ("check", "allowed", "refused"),
    [
        (lambda x: check_positive(x=x), [1e-9, math.inf, None], [0.0, -1.0, math.nan]),
        (lambda x: check_not_negative(x=x), [0.0, 1.0, math.inf, None], [-1e-9, math.nan]),
        (lambda x: check_unit(x=x), [0.0, 0.5, 1.0, None], [-1e-9, 1.0001, math.nan, math.inf]),
        (lambda x: check_clip(clip_low=x, clip_high=0.2), [0.0, 1.0, None], [-0.1, 1.1, math.nan]),
        (lambda x: check_clip(clip_low=0.2, clip_high=x), [0.0, 5.0, None], [-0.1, math.nan]),
        (lambda x: check_bounds(x, 2.0), [0.0, 2.0], [2.1, -0.1, math.nan]),
    ],
)
def test_the_ends_of_each_range(
    check: Callable[[float | None], None], allowed: list[float | None], refused: list[float]
) -> None:
    for value in allowed:
        check(value)
    for value in refused:
        with pytest.raises(InputError, match=str(value)):
            check(value)


def test_a_private_function_is_named_by_the_one_that_was_called() -> None:
    with pytest.raises(InputError) as caught:
        policy_loss(
            Grpo(),
            logprobs_T=ONES,
            old_logprobs_T=ONES,
            advantages_T=ONES,
            loss_mask_T=MASK,
            segment_ids_T=IDS,
            num_loss_tokens=4,
            num_sequences=1,
        )
    assert caught.value.problem.where == "rft_algos.objectives.policy_loss.policy_loss"
    # and with the remedy it runs
    assert caught.value.problem.do == 'kl_place="none" in the record'
    assert Grpo(kl_place="none").kl_place == "none"


def test_numbers_of_a_record_are_refused_by_the_same_kind_of_error() -> None:
    with pytest.raises(ValueError, match="kl_coef = -1"):
        Grpo(kl_coef=-1.0)
