"""Ask this CPU what it multiplies by instructions of its own."""

from __future__ import annotations

import torch

_CPU_PRODUCTS = ("avx512_bf16", "amx_bf16", "bf16")
"""Names under which torch tells that a CPU multiplies bfloat16: of x86, of x86 with tiles, of ARM."""

_OLDER_CHECKS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
"""What torch before 2.12 tells it by, on x86 alone."""


def cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # from torch 2.12 on
    if capabilities is not None:
        return any(capabilities().get(name) for name in _CPU_PRODUCTS)
    checks = (getattr(torch.cpu, name, None) for name in _OLDER_CHECKS)
    return any(check is not None and check() for check in checks)
