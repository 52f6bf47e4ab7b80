from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.input_checks import InputError
from rft_algos.losses.distillation import (
    adaptive_kl,
    forward_kl,
    jensen_shannon,
    reverse_kl,
    reverse_kl_reward,
    skew_forward_kl,
    skew_reverse_kl,
    top_k_forward_kl,
)

Row = list[float]
Divergence = Callable[..., torch.Tensor]


def doubles(rows: object) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def plain_softmax(row: Row, temperature: float) -> Row:
    largest = max(row)
    weights = [math.exp((x - largest) / temperature) for x in row]
    return [w / math.fsum(weights) for w in weights]


def plain_kl(p: Row, q: Row) -> float:
    return math.fsum(
        a * (math.log(a) - (math.log(b) if b > 0 else -math.inf)) for a, b in zip(p, q, strict=True) if a > 0
    )


def plain_divergence(name: str, student: Row, teacher: Row, temperature: float, beta: float) -> float:
    q, p = plain_softmax(student, temperature), plain_softmax(teacher, temperature)
    if name == "forward":
        value = plain_kl(p, q)
    elif name == "reverse":
        value = plain_kl(q, p)
    else:
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        value = beta * plain_kl(p, m) + (1 - beta) * plain_kl(q, m)
    return temperature**2 * value


def divergence(name: str, beta: float = 0.5) -> Divergence:
    if name == "jensen_shannon":
        return lambda student, teacher, **kwargs: jensen_shannon(student, teacher, beta=beta, **kwargs)
    return {"forward": forward_kl, "reverse": reverse_kl}[name]


def random_logits(num_tokens: int, vocab_size: int, seed: int, scale: float = 2.0) -> tuple[list[Row], list[Row]]:
    source = random.Random(seed)
    student = [[source.gauss(0, scale) for _ in range(vocab_size)] for _ in range(num_tokens)]
    return student, [[source.gauss(0, scale) for _ in range(vocab_size)] for _ in range(num_tokens)]


NAMES = ("forward", "reverse", "jensen_shannon")


# over the whole vocabulary


def test_forward_and_reverse_by_hand():
    # student 1/2, 1/2 and teacher 3/4, 1/4
    student, teacher = doubles([[0.0, 0.0]]), doubles([[math.log(3.0), 0.0]])
    assert forward_kl(student, teacher).tolist() == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5)])
    assert reverse_kl(student, teacher).tolist() == pytest.approx([0.5 * math.log(2 / 3) + 0.5 * math.log(2)])


def test_jensen_shannon_by_hand():
    # with beta 1/4 the mixture of 3/4, 1/4 and 1/2, 1/2 is 9/16, 7/16
    student, teacher = doubles([[0.0, 0.0]]), doubles([[math.log(3.0), 0.0]])
    from_teacher = 0.75 * math.log(4 / 3) + 0.25 * math.log(4 / 7)
    from_student = 0.5 * math.log(8 / 9) + 0.5 * math.log(8 / 7)
    value = jensen_shannon(student, teacher, beta=0.25)
    assert value.tolist() == pytest.approx([0.25 * from_teacher + 0.75 * from_student], rel=1e-12)
    # by default the two are alike: mixture 5/8, 3/8
    both = 0.5 * (0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3)) + 0.25 * (math.log(4 / 5) + math.log(4 / 3))
    assert jensen_shannon(student, teacher).tolist() == pytest.approx([both], rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
@given(
    seed=st.integers(0, 10**6),
    num_tokens=st.integers(0, 5),
    vocab_size=st.integers(1, 12),
    temperature=st.sampled_from([1.0, 0.5, 2.0, 3.7]),
    beta=st.sampled_from([0.5, 0.1, 0.9]),
)
def test_equals_a_plain_twin(name: str, seed: int, num_tokens: int, vocab_size: int, temperature: float, beta: float):
    student, teacher = random_logits(num_tokens, vocab_size, seed)
    expected = [plain_divergence(name, s, t, temperature, beta) for s, t in zip(student, teacher, strict=True)]
    s, t = (doubles(rows).reshape(num_tokens, vocab_size) for rows in (student, teacher))
    values = divergence(name, beta)(s, t, temperature=temperature)
    assert values.dtype == torch.float64
    assert values.tolist() == pytest.approx(expected, rel=1e-11, abs=1e-13)
    single = divergence(name, beta)(s.float(), t.float(), temperature=temperature)
    assert single.dtype == torch.float32
    assert single.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_gradients_are_right_and_flow_to_the_student_alone(name: str, temperature: float):
    student, teacher = (doubles(rows) for rows in random_logits(3, 4, 1))
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: divergence(name, 0.3)(x, teacher, temperature=temperature), (student,))
    teacher.requires_grad_()
    divergence(name)(student, teacher).sum().backward()
    assert teacher.grad is None


@pytest.mark.parametrize("name", NAMES)
def test_it_is_zero_at_the_teacher_and_positive_elsewhere(name: str):
    student, teacher = (doubles(rows) for rows in random_logits(20, 6, 2))
    assert divergence(name)(teacher, teacher).abs().max() < 1e-15
    assert bool((divergence(name)(student, teacher) > 1e-4).all())
    shifted = divergence(name)(student + 5.0, teacher - 3.0)  # a constant of the logits says nothing
    torch.testing.assert_close(shifted, divergence(name)(student, teacher), rtol=1e-11, atol=1e-13)


def test_the_gradient_of_forward_kl_is_that_of_cross_entropy_against_the_teacher():
    student, teacher = (doubles(rows) for rows in random_logits(3, 5, 3))
    leaf = student.clone().requires_grad_()
    (grad,) = torch.autograd.grad(forward_kl(leaf, teacher).sum(), leaf)
    torch.testing.assert_close(grad, student.softmax(-1) - teacher.softmax(-1), rtol=1e-12, atol=1e-15)


def test_at_a_high_temperature_the_gradient_keeps_its_size():
    # Hinton et al.: with temperature^2 the gradient tends to (z - v) / V for centred logits z and v
    student, teacher = (doubles(rows) for rows in random_logits(2, 5, 4))
    student, teacher = student - student.mean(-1, keepdim=True), teacher - teacher.mean(-1, keepdim=True)
    leaf = student.clone().requires_grad_()
    (grad,) = torch.autograd.grad(forward_kl(leaf, teacher, temperature=1e4).sum(), leaf)
    torch.testing.assert_close(grad, (student - teacher) / 5, rtol=1e-2, atol=1e-3)


def test_forward_and_reverse_are_each_other_with_the_roles_exchanged():
    student, teacher = (doubles(rows) for rows in random_logits(9, 7, 5))
    assert torch.equal(forward_kl(student, teacher, temperature=1.5), reverse_kl(teacher, student, temperature=1.5))
    torch.testing.assert_close(
        jensen_shannon(student, teacher, beta=0.3), jensen_shannon(teacher, student, beta=0.7), rtol=1e-12, atol=1e-15
    )


def test_jensen_shannon_lies_between_the_two_and_tends_to_them():
    student, teacher = (doubles(rows) for rows in random_logits(9, 7, 6))
    near = 1e-7
    torch.testing.assert_close(
        jensen_shannon(student, teacher, beta=near) / near, forward_kl(student, teacher), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(
        jensen_shannon(student, teacher, beta=1 - near) / near, reverse_kl(student, teacher), rtol=1e-4, atol=1e-6
    )


def test_jensen_shannon_of_opposites_is_the_entropy_of_beta():
    student, teacher = doubles([[0.0, -math.inf]]).requires_grad_(), doubles([[-math.inf, 0.0]])
    value = jensen_shannon(student, teacher, beta=0.25)
    value.sum().backward()
    assert value.tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3)], rel=1e-14)
    assert student.grad is not None
    assert student.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_both_forbid_reach_neither_value_nor_gradient(name: str):
    student, teacher = doubles([[1.0, -math.inf, 0.0]]).requires_grad_(), doubles([[0.0, -math.inf, 0.5]])
    value = divergence(name)(student, teacher)
    value.sum().backward()
    assert value.tolist() == pytest.approx(divergence(name)(student[:, ::2], teacher[:, ::2]).tolist(), rel=1e-13)
    assert student.grad is not None
    assert bool(student.grad.isfinite().all())
    assert student.grad[0, 1] == 0


def test_what_one_forbids_and_the_other_may_say_is_infinite_or_costs_nothing():
    free, bound = doubles([[0.0, 0.0]]), doubles([[0.0, -math.inf]])
    assert forward_kl(bound, free).tolist() == [math.inf]
    assert reverse_kl(free, bound).tolist() == [math.inf]
    assert forward_kl(free, bound).tolist() == pytest.approx([math.log(2)], rel=1e-14)
    assert reverse_kl(bound, free).tolist() == pytest.approx([math.log(2)], rel=1e-14)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e4, 3e38])
def test_extreme_logits_make_no_nan(name: str, size: float):
    student = torch.tensor([[size, -size, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[size, -size, 0.0], [0.0, 1.0, 2.0]])
    values = divergence(name)(student, teacher)
    values.sum().backward()
    assert float(values[0].detach()) == 0.0
    assert student.grad is not None
    assert bool(student.grad.isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_logits_are_compared_in_float32(name: str):
    student, teacher = (doubles(rows).bfloat16() for rows in random_logits(4, 30, 7))
    values = divergence(name)(student, teacher)
    assert values.dtype == torch.float32
    torch.testing.assert_close(
        values, divergence(name)(student.double(), teacher.double()).float(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
def test_tokens_do_not_see_each_other(name: str):
    student, teacher = (doubles(rows) for rows in random_logits(11, 6, 8))
    whole = divergence(name)(student, teacher)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(2))
    shuffled = divergence(name)(student[order], teacher[order])
    torch.testing.assert_close(shuffled, whole[order], rtol=1e-13, atol=1e-15)
    parts = [divergence(name)(student[s], teacher[s]) for s in (slice(0, 4), slice(4, 11))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shapes_and_temperatures_are_refused(name: str):
    with pytest.raises(InputError, match="one vocabulary and one length"):
        divergence(name)(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(InputError, match="temperature must be positive"):
        divergence(name)(torch.zeros(2, 3), torch.zeros(2, 3), temperature=0.0)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5, 2.0])
def test_a_mixture_of_one_alone_is_refused(beta: float):
    with pytest.raises(InputError, match="beta must be in"):
        jensen_shannon(torch.zeros(1, 2), torch.zeros(1, 2), beta=beta)


# the teacher's most likely tokens


def test_top_k_by_hand():
    # teacher 1/2, 1/4 (and 1/4 that is left out), student 1/4 each of four tokens
    logprobs, ids = doubles([[math.log(0.5), math.log(0.25)]]), torch.tensor([[2, 0]])
    value = top_k_forward_kl(torch.zeros(1, 4, dtype=torch.float64), logprobs, ids)
    assert value.tolist() == pytest.approx([0.5 * math.log(2)], rel=1e-13)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_with_the_whole_vocabulary_top_k_is_forward_kl_in_value_and_gradient(temperature: float):
    student, teacher = (doubles(rows) for rows in random_logits(6, 9, 9))
    student.requires_grad_()
    logprobs, ids = (teacher / temperature).log_softmax(-1).sort(dim=-1, descending=True)
    partial = top_k_forward_kl(student, logprobs, ids, temperature=temperature)
    whole = forward_kl(student, teacher, temperature=temperature)
    torch.testing.assert_close(partial, whole, rtol=1e-12, atol=1e-14)
    grads = [torch.autograd.grad(x.sum(), student)[0] for x in (partial, whole)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-11, atol=1e-14)


@given(seed=st.integers(0, 10**6), num_kept=st.integers(1, 6), temperature=st.sampled_from([1.0, 1.7]))
def test_top_k_equals_a_plain_twin(seed: int, num_kept: int, temperature: float):
    student, teacher = random_logits(3, 8, seed)
    logprobs, ids = (doubles(teacher) / temperature).log_softmax(-1).topk(num_kept, dim=-1)
    expected = []
    for s, row_lps, row_ids in zip(student, logprobs.tolist(), ids.tolist(), strict=True):
        q = plain_softmax(s, temperature)
        terms = [math.exp(lp) * (lp - math.log(q[v])) for lp, v in zip(row_lps, row_ids, strict=True)]
        expected.append(temperature**2 * math.fsum(terms))
    values = top_k_forward_kl(doubles(student), logprobs, ids, temperature=temperature)
    assert values.tolist() == pytest.approx(expected, rel=1e-11, abs=1e-13)
    single = top_k_forward_kl(doubles(student).float(), logprobs, ids, temperature=temperature)
    assert single.dtype == torch.float32
    assert single.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_places_of_top_k_that_are_not_used_add_nothing():
    student, teacher = (doubles(rows) for rows in random_logits(2, 5, 10))
    logprobs, ids = teacher.log_softmax(-1).topk(2, dim=-1)
    leaf = student.clone().requires_grad_()
    padded = torch.cat([logprobs, torch.full((2, 1), -math.inf, dtype=torch.float64)], -1)
    value = top_k_forward_kl(leaf, padded, torch.cat([ids, torch.zeros(2, 1, dtype=torch.int64)], -1))
    value.sum().backward()
    torch.testing.assert_close(value, top_k_forward_kl(student, logprobs, ids), rtol=1e-14, atol=0)
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())


def test_top_k_gradients_are_right_and_flow_to_the_student_alone():
    student, teacher = (doubles(rows) for rows in random_logits(2, 5, 11))
    logprobs, ids = teacher.log_softmax(-1).topk(3, dim=-1)
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: top_k_forward_kl(x, logprobs, ids, temperature=1.3), (student,))
    logprobs.requires_grad_()
    top_k_forward_kl(student, logprobs, ids).sum().backward()
    assert logprobs.grad is None


def test_top_k_log_probs_without_ids_are_refused():
    with pytest.raises(InputError, match="token ids"):
        top_k_forward_kl(torch.zeros(1, 4), torch.zeros(1, 2), torch.zeros(1, 3, dtype=torch.int64))


# the reward of sampled tokens


def test_the_reward_is_the_teachers_log_prob_less_the_students():
    student, teacher = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -0.25, -math.inf])
    for leaf in (student, teacher):
        leaf.requires_grad_()
        rewards = reverse_kl_reward(student, teacher, torch.tensor([True, True, True]))
        leaf.requires_grad_(False)
        assert rewards.dtype == torch.float64
        assert rewards.tolist() == [-0.5, 1.75, -math.inf]
        assert not rewards.requires_grad


def test_pitfall_6_nan_at_masked_positions_gives_no_reward():
    student, teacher = doubles([math.nan, -1.0, -math.inf]), doubles([-1.0, -3.0, -math.inf])
    assert reverse_kl_reward(student, teacher, torch.tensor([False, True, False])).tolist() == [0.0, -2.0, 0.0]


def test_the_mask_must_be_bool():
    with pytest.raises(InputError, match="must be bool"):
        reverse_kl_reward(torch.zeros(1), torch.zeros(1), torch.ones(1))


def test_as_advantage_of_its_token_it_has_the_gradient_of_reverse_kl():
    # exact expectation over all tokens that the student may sample
    student, teacher = (doubles(rows)[0] for rows in random_logits(1, 7, 12))
    leaf = student.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, -1)
    rewards = reverse_kl_reward(logprobs, torch.log_softmax(teacher, -1), torch.ones(7, dtype=torch.bool))
    loss = -(logprobs.detach().exp() * rewards * logprobs).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    other = student.clone().requires_grad_()
    (expected,) = torch.autograd.grad(reverse_kl(other[None], teacher[None]).sum(), other)
    torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-15)


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 4, 6, dtype=torch.float64, generator=generator) * 2
    return student.requires_grad_(), teacher


def plain_adaptive(p: list[float], q: list[float], head: float) -> float:
    total, gaps = 0.0, [0.0, 0.0]
    for v in sorted(range(len(p)), key=lambda v: -p[v]):
        gaps[total >= head] += abs(p[v] - q[v])
        total += p[v]
    return (gaps[0] * plain_kl(p, q) + gaps[1] * plain_kl(q, p)) / sum(gaps)


@pytest.mark.parametrize("seed", range(4))
def test_skewed_and_adaptive_divergences_are_those_of_loops(seed: int) -> None:
    student, teacher = distributions(seed)
    tau, alpha = 1.5, 0.2
    p_rows, q_rows = (teacher / tau).softmax(1).tolist(), (student / tau).softmax(1).tolist()
    plain: dict[str, list[float]] = {"forward": [], "reverse": [], "adaptive": []}
    for p, q in zip(p_rows, q_rows, strict=True):
        plain["forward"].append(plain_kl(p, [alpha * a + (1 - alpha) * b for a, b in zip(p, q, strict=True)]))
        plain["reverse"].append(plain_kl(q, [(1 - alpha) * a + alpha * b for a, b in zip(p, q, strict=True)]))
        plain["adaptive"].append(plain_adaptive(p, q, 0.5))
    found = {
        "forward": skew_forward_kl(student, teacher, alpha=alpha, temperature=tau),
        "reverse": skew_reverse_kl(student, teacher, alpha=alpha, temperature=tau),
        "adaptive": adaptive_kl(student, teacher, temperature=tau),
    }
    for name, losses in found.items():
        assert losses.tolist() == pytest.approx([tau**2 * x for x in plain[name]], rel=1e-9), name
    assert torch.autograd.gradcheck(lambda x: skew_forward_kl(x, teacher, alpha=alpha), (student,))
    assert torch.autograd.gradcheck(lambda x: skew_reverse_kl(x, teacher, alpha=alpha), (student,))


def test_a_skewed_divergence_is_bounded_where_the_student_forbids_and_equal_ones_give_0() -> None:
    student, teacher = torch.tensor([[0.0, -math.inf, 0.0]]).requires_grad_(), torch.tensor([[0.0, 9.0, -math.inf]])
    loss = skew_forward_kl(student, teacher, alpha=0.1)
    loss.sum().backward()
    assert 0 < float(loss.detach()) <= math.log(10)
    assert student.grad is not None
    assert not bool(student.grad.isnan().any())
    same = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    for function in (skew_forward_kl, skew_reverse_kl, adaptive_kl):
        assert function(same, same).tolist() == pytest.approx([0.0], abs=1e-12)
    for refused in (0.0, 1.0):
        with pytest.raises(InputError):
            skew_forward_kl(same, same, alpha=refused)
        with pytest.raises(InputError):
            adaptive_kl(same, same, head=refused)
