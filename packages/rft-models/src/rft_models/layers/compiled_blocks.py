"""Layers that are compiled one by one (`torch.compile`), with a fall back to eager that is real.

A layer is compiled by its first forward with gradients, where it is also compared with eager: outputs further apart
than a thousandth, or an error of the compiler, and all layers compute as they did before. Names of parameters stay.
Forwards without gradients (sampling, evaluations) are eager, and so is the packed attention inside of a layer, whose
layout is another one in each micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_LOG = logging.getLogger(__name__)
BACKEND = "inductor"
_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Relative distance of the outputs; in types of fewer bits, what their rounding explains."""
_NARROW = 3e-2


class CompiledBlocks:
    """The compiled layers of a model, until one of them fails.

    Example::

        compiled = CompiledBlocks(model.layers)
        ...                         # train
        compiled.failure            # None, or why the layers compute in eager
    """

    def __init__(self, blocks: Sequence[nn.Module], *, backend: str | Callable[..., Any] | None = None) -> None:
        """Compile layers at their first forward with gradients, in place; `backend` as of `torch.compile`."""
        self.failure: str | None = None
        self.recompilations: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Shapes of the inputs before and at each compilation after the first."""
        self._blocks = list(blocks)
        self._backend = backend or BACKEND
        self._checked: set[int] = set()
        self._shape: tuple[int, ...] | None = None
        for block in self._blocks:
            block.compile(backend=self._backend)
            block._compiled_call_impl = self._guarded(block, block._compiled_call_impl)  # type: ignore[assignment]

    def restore(self) -> None:
        """Let every layer compute in eager again."""
        for block in self._blocks:
            block._compiled_call_impl = None  # type: ignore[assignment]

    def _guarded(self, block: nn.Module, compiled: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.failure is not None or not torch.is_grad_enabled():
                return block._call_impl(*arguments, **options)
            if id(block) not in self._checked:
                self._checked.add(id(block))
                self._try(block, compiled, arguments, options)
                return call(*arguments, **options)
            count = _num_graphs()
            output = compiled(*arguments, **options)
            self._note(arguments, options, recompiled=_num_graphs() > count)
            return output

        return call

    def _try(self, block: nn.Module, compiled: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Run a layer forward and backward, and compare it with eager; the layers are eager where that fails."""
        try:
            # drawn twice alike where a layer drops out
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                found = _first(compiled(*arguments, **options))
            # the backward is compiled when it first runs; its gradients are thrown away
            weights = [each for each in block.parameters() if each.requires_grad]
            torch.autograd.grad(found.float().sum(), weights, allow_unused=True)
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.no_grad():
                eager = _first(block._call_impl(*arguments, **options))
            apart = float((found.detach() - eager).float().norm() / eager.float().norm().clamp(min=1e-20))
            most = _TOLERANCES.get(_narrowest(eager), _NARROW)
            if not apart <= most:
                self._fall_back(f"outputs are {apart:.2g} apart from eager, at most {most:g} is allowed")
        except Exception as error:  # noqa: BLE001 - a compiler raises what it likes, and training goes on without it
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = " ".join(lines[:2])
            self._fall_back(f"{type(error).__name__}: {reason}")
        self._note(arguments, options, recompiled=False)

    def _fall_back(self, reason: str) -> None:
        self.failure = reason
        self.restore()
        _LOG.warning("compile: the layers are not compiled and compute in eager, as with --compile off (%s)", reason)

    def _note(self, arguments: tuple[Any, ...], options: dict[str, Any], *, recompiled: bool) -> None:
        """Keep the shape of the input, and say so where another one was compiled anew."""
        inputs = arguments[0] if arguments else options.get("hidden_states")
        shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else ()
        if recompiled and self._shape is not None and shape != self._shape:
            self.recompilations.append((self._shape, shape))
            _LOG.warning(
                "compile: number %d after the first, inputs %s after %s", len(self.recompilations), shape, self._shape
            )
        self._shape = shape


def choose(asked: str, device: str) -> tuple[bool, str]:
    """Return whether the layers are compiled, and why: `asked` is auto, on or off."""
    if asked != "auto":
        return asked == "on", "asked for"
    if device == "cpu":
        return False, "on a CPU compilation takes longer than it saves in all but long runs; --compile on compiles"
    return True, "on a GPU it fuses what stands between the products"


def _narrowest(output: Tensor) -> torch.dtype:
    kind = output.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else output.dtype


def _first(output: Any) -> Tensor:
    found = output[0] if isinstance(output, tuple | list) else output
    assert isinstance(found, Tensor), f"a layer returns a {type(found).__name__}"
    return found


def _num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]  # pyright: ignore
