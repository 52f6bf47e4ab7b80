"""User patches of models of one `model_type`, applied whenever such a model is loaded.

```python
def patch_your_model(model):  # a transformers model, its weights loaded
    model.model.norm.variance_epsilon = 1e-5

register_patch("qwen2", patch_your_model)
```

A patched model is decoded by its own forward, never by the fast decoder, which computes the unpatched layers. Loading
compares the packed forward with the model's own as for every model, and refuses a patch that the packed forward
would not see.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from rft_core.errors import OptionsError

Patch = Callable[[Any], Any]
"""Changes the model that it is given; returns None, or another model to take its place."""

_PATCHES: dict[str, list[Patch]] = {}
_PATCHED: weakref.WeakSet[Any] = weakref.WeakSet()  # weak: the table keeps no model alive


def register_patch(model_type: str, patch: Patch) -> None:
    """Register a patch for every model whose config.json has this `model_type`, from the next load on.

    Several patches of one kind act in the order in which they were registered; one that is registered twice acts once.
    The policy, the reference policy and models that are evaluated are loaded alike. A critic is not patched: it is
    the decoder without its head.

    Raises:
        OptionsError: transformers has no such `model_type`, so that the patch would never act.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise OptionsError(
            code="models.unknown_patch",
            what=f"model_type {model_type!r} is not one of transformers'",
            where="register_patch",
            why="a patch acts on models whose config.json has its model_type; this one would never act",
            do='register_patch("qwen2", patch), or with the model_type in config.json',
        )
    registered = _PATCHES.setdefault(model_type, [])
    if patch not in registered:
        registered.append(patch)


def unregister_patch(model_type: str, patch: Patch) -> None:
    """Remove a patch; later loads are without it. Nothing happens where it is not registered."""
    registered = _PATCHES.get(model_type, [])
    if patch in registered:
        registered.remove(patch)


def registered_patches(model_type: str) -> tuple[Patch, ...]:
    """Return the patches of models of this `model_type`, in order."""
    return tuple(_PATCHES.get(model_type, ()))


def apply(model: Any) -> Any:
    """Apply the patches of the model's `model_type` and return the patched model."""
    for patch in registered_patches(model.config.model_type):
        changed = patch(model)
        model = model if changed is None else changed
        _PATCHED.add(model)
    return model


def is_patched(model: Any) -> bool:
    """Return true where a patch has been applied to this model."""
    return model in _PATCHED


def all_registered() -> list[tuple[str, Patch]]:
    """Return every registered (model_type, patch)."""
    return [(model_type, patch) for model_type, registered in _PATCHES.items() for patch in registered]
