"""Detection of traced code, in which no value may be asked for: `torch.compile` and the transforms of `torch.func`."""

from __future__ import annotations

import torch


def is_traced() -> bool:
    """Return whether `torch.compile`, `torch.export`, `torch.func.grad` or `vmap` is recording (no tensors).

    Then no branch may depend on a value: what is quicker on a CPU once a value is known is left out.
    """
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
