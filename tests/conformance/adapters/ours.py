"""This project's equations, called as functions: packed tokens in, packed tokens out."""

from __future__ import annotations

from conformance.adapters import our_advantages as our_advantages  # each joins its functions to `COMPUTE`
from conformance.adapters import our_losses as our_losses
from conformance.adapters import our_recommenders as our_recommenders
from conformance.adapters import our_routers as our_routers
from conformance.adapters.base import Key
from conformance.adapters.packed import COMPUTE

__all__ = ["COMPUTE", "PACKAGES", "REFUSED"]

PACKAGES = ("rft-algos", "torch")
REFUSED: dict[Key, str] = {}
