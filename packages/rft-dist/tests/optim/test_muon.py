"""Muon against torch's, stacks of matrices, its state, and what it steps on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import CheckpointError, OptionsError
from rft_dist.optim import muon as muon_module
from rft_dist.optim.adamw import LocalAdamW
from rft_dist.optim.muon import Muon, hidden_matrices, orthogonalised
from rft_dist.optim.parameter_groups import ParameterGroups

SHAPES = [(24, 8), (8, 24), (16, 16), (2, 3)]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def local(named: dict[str, Tensor], matrices: set[str], **more: object) -> LocalAdamW:
    groups = ParameterGroups(matrices=frozenset(matrices))
    return LocalAdamW(named, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1, groups=groups, **more)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_matrix_takes_the_steps_of_torchs_muon(
    shape: tuple[int, int], decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon_module, "_product_type", lambda device: torch.bfloat16)
    own, theirs = noise(*shape), nn.Parameter(noise(*shape))
    muon = Muon({"w": own}, ParameterGroups(), weight_decay=decay)
    reference = torch.optim.Muon([theirs], lr=1.0, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step, rate in enumerate((0.02, 0.05, 0.01)):
        own.grad = noise(*shape, seed=step + 1)
        theirs.grad = own.grad.clone()
        muon.step(rate)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        torch.testing.assert_close(own, theirs.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("can", [True, False])
def test_products_are_in_bfloat16_where_the_device_multiplies_it(can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_module, "cpu_multiplies_bf16", lambda: can)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: can or including_emulation)
    chosen = muon_module._product_type.__wrapped__
    assert chosen("cpu") == chosen("cuda") == (torch.bfloat16 if can else torch.float32)


@pytest.mark.parametrize("shape", [*SHAPES, (3, 16, 24)])
def test_float32_between_bfloat16_is_as_near_as_the_steps_of_bfloat16_are(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[torch.dtype, Tensor] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        monkeypatch.setattr(muon_module, "_product_type", lambda device, dtype=dtype: dtype)
        found[dtype] = orthogonalised(noise(*shape))
        assert (found[dtype].dtype, found[dtype].shape) == (torch.bfloat16, shape)
    exact = found[torch.float64].float()
    # the last rounding to bfloat16 is all that is left of the difference
    torch.testing.assert_close(found[torch.float32].float(), exact, atol=2**-8, rtol=2**-8)
    torch.testing.assert_close(found[torch.bfloat16].float(), exact, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_singular_values_come_near_one_and_directions_stay(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_module, "_product_type", lambda device: dtype)
    matrix = noise(48, 32)
    direction = orthogonalised(matrix).float()
    assert direction.shape == matrix.shape
    sizes = torch.linalg.svdvals(direction)
    assert sizes.min() > 0.6
    assert sizes.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    mixed = u.mT @ direction @ v.mT
    torch.testing.assert_close(mixed, torch.diag(mixed.diagonal()), atol=0.05, rtol=0)


def test_a_stack_is_so_many_matrices() -> None:
    stack = noise(4, 24, 8)
    one = [each.clone() for each in stack]
    whole = Muon({"w": stack}, ParameterGroups(), weight_decay=0.1)
    parts = Muon({str(n): each for n, each in enumerate(one)}, ParameterGroups(), weight_decay=0.1)
    for step in range(2):
        # an expert without a token has no gradient, and none of the others' steps
        stack.grad = noise(4, 24, 8, seed=step + 1)
        stack.grad[2] = 0.0
        for number, each in enumerate(one):
            each.grad = stack.grad[number].clone()
        whole.step(0.1)
        parts.step(0.1)
    torch.testing.assert_close(stack, torch.stack(one), atol=1e-6, rtol=0)
    assert bool(stack.isfinite().all())


def test_rates_and_decays_follow_the_names() -> None:
    first, second = noise(6, 4), noise(6, 4)
    groups = ParameterGroups(rates=(("a", 0.5),), decays=(("b", 0.0),))
    muon = Muon({"a": first, "b": second}, groups, weight_decay=0.5)
    first.grad, second.grad = torch.zeros(6, 4), torch.zeros(6, 4)
    muon.step(0.1)
    # no gradient, no direction: the decay alone is left
    torch.testing.assert_close(first, noise(6, 4) * (1 - 0.05 * 0.5))
    assert torch.equal(second, noise(6, 4))


def test_the_update_has_the_size_of_adamws() -> None:
    for shape in ((64, 32), (32, 96)):
        matrix = torch.zeros(shape)
        matrix.grad = noise(*shape)
        Muon({"w": matrix}, ParameterGroups(), weight_decay=0.0).step(1.0)
        assert 0.12 < matrix.square().mean().sqrt().item() < 0.28


def test_the_state_is_one_momentum_of_a_matrix_and_adamws_of_the_rest() -> None:
    optimizer = local({"w": noise(4, 3), "norm": noise(3), "table": noise(5, 3)}, {"w"})
    kinds = ("exp_avg", "exp_avg_sq", "step")
    assert set(optimizer.state_tensors()) == {"momentum/w"} | {f"{k}/{n}" for k in kinds for n in ("norm", "table")}


@pytest.mark.parametrize("more", [{}, {"master": True, "ema_decay": 0.9}])
def test_a_resumed_run_takes_the_same_steps_to_the_bit(more: dict[str, object]) -> None:
    dtype = torch.bfloat16 if more else torch.float32

    def named() -> dict[str, Tensor]:
        return {"w": noise(6, 4).to(dtype), "norm": noise(4, seed=9).to(dtype)}

    def train(tensors: dict[str, Tensor], optimizer: LocalAdamW, steps: range) -> None:
        for step in steps:
            optimizer.update({name: noise(*each.shape, seed=step) for name, each in tensors.items()}, 0.01)

    whole, begun, resumed = named(), named(), named()
    train(whole, local(whole, {"w"}, **more), range(6))
    first = local(begun, {"w"}, **more)
    train(begun, first, range(3))
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    for name, tensor in resumed.items():
        tensor.copy_(begun[name])
    second = local(resumed, {"w"}, **more)
    second.load_state_tensors(saved)
    train(resumed, second, range(3, 6))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_state_of_the_other_optimizer_is_refused() -> None:
    saved = local({"w": noise(4, 3)}, {"w"}).state_tensors()
    with pytest.raises(CheckpointError) as caught:
        local({"w": noise(4, 3)}, set()).load_state_tensors(saved)
    assert "momentum/w" in str(caught.value)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 6), nn.LayerNorm(4)
        self.experts, self.gate = nn.Parameter(torch.zeros(3, 4, 6)), nn.Parameter(torch.zeros(1, 4))


def test_matrices_of_the_layers_alone_are_hidden() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "block": Block(), "head": nn.Linear(4, 9)})
    block = model["block"]
    assert hidden_matrices([block], model.named_parameters()) == {"block.up.weight", "block.experts"}
    block.up.weight.requires_grad_(False)
    assert hidden_matrices([block], model.named_parameters()) == {"block.experts"}
    block.requires_grad_(False)
    with pytest.raises(OptionsError) as caught:
        hidden_matrices([block], model.named_parameters())
    assert caught.value.problem.code == "optimizer.no_matrix"
