"""AdamW as every strategy takes it: its groups, its state by name, the norm that clips, and what is refused.

    g  <- g * min(1, max_norm / n),  n = |g|_2 over all parameters of all ranks      (max_norm > 0)
    AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2)

The rate and the decay of each parameter follow `parameter_groups`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from rft_core.errors import CheckpointError, OptionsError
from rft_dist.optim import ema, loss_scaler
from rft_dist.optim.ema import MovingAverage
from rft_dist.optim.muon import Muon
from rft_dist.optim.parameter_groups import ParameterGroups, adamw, set_learning_rate

_DOT_BLOCK = 65536  # float32 dot products of this length are exact to 6e-8; longer ones lose digits on CPU
STATES = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of a parameter: two moments of its shape, and the number of its steps."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Outcome of one optimizer step."""

    gradient_norm: float
    """L2 norm over all parameters, summed over ranks, before clipping."""
    applied: bool
    """False where the norm was not finite: weights and moments are as before, on every rank."""
    loss_scale: float | None = None
    """What the losses of the step were multiplied with (float16); None = they were not."""


class LocalAdamW:
    """AdamW over the tensors that this rank holds: whole parameters, or its blocks of them; Muon on some of them.

    Example::

        adamw = LocalAdamW({"w": w}, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0)
        adamw.update({"w": gradient}, learning_rate=1e-3)     # w has changed in place
    """

    def __init__(
        self,
        local: Mapping[str, Tensor],
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        groups: ParameterGroups | None = None,
        master: bool = False,
        offload: bool = False,
        ema_decay: float | None = None,
    ) -> None:
        """Set up the moments, and master copies and averages where asked for.

        Args:
            local: the tensors by name; they are changed in place.
            betas, epsilon, weight_decay: of AdamW.
            groups: rates and decays by name, and the matrices that Muon steps on; None = one rate, a decay of what has
                two or more dimensions, and AdamW alone.
            master: keep a float32 copy of tensors of fewer bits, step on it and round it back: an update smaller than
                the last bit of a weight is then not lost.
            offload: keep moments and copies in host memory and step there; gradients go to the host, weights back.
                On a CPU everything is in host memory already.
            ema_decay: keep a moving average of what is stepped on, see `ema`; None = none.
        """
        self.local = dict(local)
        self._stepped = {name: _stepped(tensor, master, offload) for name, tensor in self.local.items()}
        groups = groups or ParameterGroups()
        matrices = {name: each for name, each in self._stepped.items() if name in groups.matrices}
        others = {name: each for name, each in self._stepped.items() if name not in matrices}
        self._optimizer = adamw(others, groups, betas=betas, epsilon=epsilon, weight_decay=weight_decay)
        self._muon = Muon(matrices, groups, weight_decay=weight_decay)
        self._matrices = frozenset(matrices)
        self._average = MovingAverage(self._stepped, ema_decay) if ema_decay is not None else None

    def update(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """One step with a gradient for every tensor, already summed and clipped."""
        for name, parameter in self._stepped.items():
            # to where the step is taken: in float32 for a master copy, in host memory with offload
            parameter.grad = gradients[name].detach().to(parameter.device, parameter.dtype)
        set_learning_rate(self._optimizer.param_groups, learning_rate)
        self._optimizer.step()
        self._muon.step(learning_rate)
        for name, parameter in self._stepped.items():
            # a converted gradient has no other owner: it is freed here and does not wait for the next step
            parameter.grad = None
            # round a master copy back, or bring it from the host
            if self._is_copy(name):
                self.local[name].detach().copy_(parameter.detach())
        if self._average is not None:
            self._average.update(self._stepped)

    def follow(self, written: Tensor) -> None:
        """Take values that something else than a step has written into the copies that are stepped on, where there are.

        Without it the next step would bring the values before back.

        Args:
            written: one of the tensors, or one that has its memory, as a matrix has that of its trained rows.
        """
        for name, tensor in self.local.items():
            if self._is_copy(name) and _share_memory(tensor, written):
                self._stepped[name].detach().copy_(tensor.detach())

    def _is_copy(self, name: str) -> bool:
        """Return whether another tensor than the one that was given is stepped on."""
        return self._stepped[name].data_ptr() != self.local[name].data_ptr()

    def state_tensors(self) -> dict[str, Tensor]:
        """ "exp_avg/<name>", "exp_avg_sq/<name>", "step/<name>"; "master/<name>" of a copy, "ema/<name>" of an average.

        Of a matrix that Muon steps on, "momentum/<name>" in the place of the first three.
        The tensors are the live state, not copies of it; before the first step the moments are zeros.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._stepped.items():
            tensors |= {f"{kind}/{name}": tensor.detach() for kind, tensor in self._state(name, parameter).items()}
            if parameter.dtype != self.local[name].dtype:
                tensors[f"master/{name}"] = parameter.detach()
        return tensors | {f"{ema.KIND}/{name}": average for name, average in self._averages().items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_tensors` gave, bit for bit; the next step equals the uninterrupted one.

        Averages that are missing begin anew from the weights; those that are not kept are left.

        Raises:
            CheckpointError: missing or unexpected names, another shape or another dtype; nothing has changed then.
        """
        averages = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{ema.KIND}/")}
        begins = self._average is not None and not averages
        if self._average is None or begins:
            tensors = {name: tensor for name, tensor in tensors.items() if name not in averages}
        # names, shapes and dtypes are compared, which takes no memory on the meta device
        expected = {name: torch.empty_like(tensor, device="meta") for name, tensor in self.state_tensors().items()}
        if begins:
            expected = {name: tensor for name, tensor in expected.items() if not name.startswith(f"{ema.KIND}/")}
        # before anything is written: a state that is refused leaves the optimizer as it was
        compare_states(expected, tensors)
        for name, parameter in self._stepped.items():
            # not load_state_dict, which knows parameters by their position and not by name
            state = self._muon.state(name) if name in self._matrices else fresh_state(parameter)
            for kind, tensor in state.items():
                tensor.copy_(tensors[f"{kind}/{name}"])
            if name not in self._matrices:
                self._optimizer.state[parameter] = state
            if f"master/{name}" in tensors:
                parameter.detach().copy_(tensors[f"master/{name}"])
        if self._average is not None and begins:
            # after the loop: averages that begin anew begin from the copies that it has put back
            self._average.restart(self._stepped)
        for name, average in self._averages().items():
            average.copy_(tensors.get(f"{ema.KIND}/{name}", average))

    def _state(self, name: str, parameter: Parameter) -> dict[str, Tensor]:
        """Return the live state of a parameter; before AdamW's first step, what it would be then."""
        if name in self._matrices:
            return self._muon.state(name)
        state = self._optimizer.state.get(parameter) or fresh_state(parameter)
        return {kind: state[kind] for kind in STATES}

    def _averages(self) -> dict[str, Tensor]:
        return {} if self._average is None else self._average.tensors()


def trained_parameters(named_parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Parameter]:
    """Those that require a gradient, in the order of their names, the same on every rank.

    Raises:
        OptionsError: there are none.
    """
    everything = dict(named_parameters)
    trained = {name: everything[name] for name in sorted(everything) if everything[name].requires_grad}
    if not trained:
        raise nothing_to_train(len(everything))
    return trained


def rows_name(name: str, first: int | None) -> str:
    """Return the name, among an optimizer's parameters, of a matrix's rows from `first` on; None = all rows."""
    return name if first is None else f"{name}[{first}:]"


def is_optional(key: str) -> bool:
    """Return whether a run may continue without this tensor of the state, which then begins anew."""
    return key.partition("/")[0] in (ema.KIND, loss_scaler.KEY)


def clip(gradients: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """g <- g * min(1, max_norm / n), in place, where `max_norm` is above 0."""
    if not 0 < max_norm < norm:
        return
    gradients = list(gradients)
    if _on_one_gpu(gradients):
        torch._foreach_mul_(gradients, max_norm / norm)  # pyright: ignore[reportPrivateImportUsage]  # as torch clips
        return
    for gradient in gradients:
        gradient.mul_(max_norm / norm)


def _stepped(tensor: Tensor, master: bool, offload: bool) -> Parameter:
    """Return the tensor that the optimizer steps on: itself, or a copy of more bits or in another memory."""
    dtype = torch.float32 if master and tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    device = torch.device("cpu") if offload else tensor.device
    return Parameter(tensor.detach().to(device, dtype))  # which is the tensor itself where neither differs


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors without gaps overlap in memory."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def total_norm(gradients: list[Tensor]) -> float:
    """L2 norm over all entries, added up in float64 across blocks."""
    device = gradients[0].device
    # added up on the device: one wait for it, and not one for each gradient
    if _on_one_gpu(gradients):
        norms = torch._foreach_norm(gradients, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        squares = torch.stack(norms).double().square()
    else:
        squares = torch.stack([squared_norm(gradient).to(device) for gradient in gradients])
    total = squares.sum().sqrt().item()
    if math.isfinite(total):
        return total
    # Squares of finite entries above 1e19 overflow float32: only this slow form tells them from infinities.
    slow = [torch.linalg.vector_norm(gradient, dtype=torch.float64).to(device) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(slow)).item()


def _on_one_gpu(gradients: list[Tensor]) -> bool:
    """Return whether one kernel can take all of them, in place of one kernel or several for each."""
    device = gradients[0].device if gradients else torch.device("cpu")
    return device.type == "cuda" and all(
        type(each) is Tensor and each.device == device and each.dtype != torch.float64 for each in gradients
    )


def squared_norm(gradient: Tensor) -> Tensor:
    """Scalar float64. On CPU `vector_norm` adds up 30 million float32 squares with an error of 2e-3, so blocks."""
    if gradient.device.type != "cpu" or gradient.dtype == torch.float64:
        return torch.linalg.vector_norm(gradient).to(torch.float64).square()
    flat = gradient.to(torch.float32).reshape(-1)
    return torch.stack([torch.dot(block, block) for block in flat.split(_DOT_BLOCK)]).sum(dtype=torch.float64)


def fresh_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter before its first step."""
    moments = torch.zeros_like(parameter)
    beside = parameter.device.type in ("cpu", "cuda")  # fused AdamW keeps its step count beside the parameter
    step = torch.zeros((), dtype=torch.float32, device=parameter.device if beside else "cpu")
    return {"exp_avg": moments, "exp_avg_sq": torch.zeros_like(moments), "step": step}


def compare_states(expected: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless names, shapes and dtypes are the same."""
    missing = sorted(set(expected) - set(saved))
    unexpected = sorted(set(saved) - set(expected))
    different = [
        f"{name} {list(saved[name].shape)} {saved[name].dtype} for {list(want.shape)} {want.dtype}"
        for name, want in expected.items()
        if name in saved and (saved[name].shape != want.shape or saved[name].dtype != want.dtype)
    ]
    if not (missing or unexpected or different):
        return
    examples = [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in unexpected] + different
    raise other_state(
        f"{len(missing)} missing, {len(unexpected)} unexpected, {len(different)} of another shape or dtype: "
        + "; ".join(examples[:5]),
        where=f"{len(saved)} saved tensors against {len(expected)} of this optimizer",
        state="the optimizer was left as it was",
    )


def other_state(difference: str, *, where: str, state: str) -> CheckpointError:
    """Return the error for a saved state that is not one of this optimizer."""
    return CheckpointError(
        code="optimizer.state_differs",
        what=f"optimizer state: {difference}",
        where=where,
        why="moments belong to one parameter of one shape",
        state=state,
        do="resume with the model and the trained parameters of the run that saved the checkpoint",
    )


def nothing_to_train(num_parameters: int) -> OptionsError:
    """Return the error for an optimizer without a parameter that requires a gradient."""
    return OptionsError(
        code="optimizer.nothing_to_train",
        what=f"nothing to train: 0 of {num_parameters} parameters require gradients",
        where="parameters given to the optimizer",
        why="an optimizer needs at least one parameter that is not frozen",
        do="unfreeze the policy, or train an adapter",
    )
