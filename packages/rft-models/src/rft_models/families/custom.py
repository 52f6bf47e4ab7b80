"""User model code: families that transformers does not have, and files that register them or patches.

```python
class MyForCausalLM(LlamaForCausalLM):
    config_class = MyConfig  # with a model_type of its own

register_family(MyForCausalLM, decoder=MyModel, packed=True)
```

Code is run only from files that the user names; code in a model directory never is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from rft_core.errors import OptionsError
from rft_core.user_code import load_module
from rft_models.families import patches, registry

_FROM_FILES: dict[Path, list[tuple[str, patches.Patch]]] = {}
"""Patches that a file registered, so that reading it again replaces them."""


def register_family(model_class: Any, *, decoder: Any, packed: bool) -> None:
    """Load directories whose config.json has the `model_type` of `model_class.config_class` as this class from now on.

    Args:
        model_class: a transformers causal language model with `get_decoder()` and an output matrix.
        decoder: the class of what `get_decoder()` gives; a critic is made of it.
        packed: its attention goes through transformers' attention interface with nothing but scaling, a sliding
            window and softcapping, and tokens meet nowhere else. Loading compares with the model's own forward.
            False: it runs on padded blocks, exact and slower.

    Raises:
        OptionsError: the class names no configuration of its own, or that of a family of transformers.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

    config_class = getattr(model_class, "config_class", None)
    model_type = getattr(config_class, "model_type", "")
    taken = model_type in CONFIG_MAPPING and model_type not in registry.CUSTOM_FAMILIES
    if config_class is None or not model_type or taken:
        raise OptionsError(
            code="models.family_name",
            what=f"{model_class.__name__} has the model_type {model_type!r}",
            where="register_family",
            why="it is one of transformers' own" if taken else "config.json finds a family by its model_type",
            do="give the class a config_class with a model_type of its own",
        )
    decoder.config_class = config_class
    # exist_ok, since a file that is read again makes new classes of the same model_type
    AutoConfig.register(model_type, config_class, exist_ok=True)
    AutoModel.register(config_class, decoder, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    registry.CUSTOM_FAMILIES[model_type] = registry.CustomFamily(model_class.__name__, packed)


def load_model_code(text: str) -> list[str]:
    """Run files of model code (joined by commas; of a folder all .py files by name); return what each registered.

    A file that is read again replaces what it registered before.

    Raises:
        OptionsError: a file that is not there, that fails, or that registers nothing.
    """
    registered: list[str] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        path = Path(part).expanduser()
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise _refused(part, "the folder holds no .py file" if path.is_dir() else "there is no such file")
        for file in files:
            registered.append(_run(file.resolve()))
    return registered


def has_manual_patches() -> bool:
    """Return true where a patch is registered that comes from no file of model code."""
    from_files = [entry for entries in _FROM_FILES.values() for entry in entries]
    return any(entry not in from_files for entry in patches.all_registered())


def _run(file: Path) -> str:
    # what the last reading registered goes first, else a changed patch would act twice
    for model_type, patch in _FROM_FILES.pop(file, []):
        patches.unregister_patch(model_type, patch)
    known_patches, known_families = patches.all_registered(), dict(registry.CUSTOM_FAMILIES)
    name = f"rft_model_code_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}_{file.stem}"
    try:
        load_module(file, name)
    except OptionsError:
        raise
    except Exception as error:  # whatever a person's code raises
        raise _refused(str(file), f"{type(error).__name__}: {error}") from error
    added = [entry for entry in patches.all_registered() if entry not in known_patches]
    made = [name for name, family in registry.CUSTOM_FAMILIES.items() if known_families.get(name) is not family]
    if not added and not made:
        raise _refused(str(file), "it registers neither a patch nor a family")
    _FROM_FILES[file] = added
    registered = [f"family {name}" for name in made]
    registered += [f"{getattr(patch, '__name__', 'a patch')} for {model_type}" for model_type, patch in added]
    return f"{file}: {', '.join(registered)}"


def _refused(where: str, what: str) -> OptionsError:
    return OptionsError(
        code="models.model_code",
        what=f"model code {where}: {what}",
        where="--model_code",
        why="the file is run before a model is loaded, to register patches or families",
        do="--model_code FILE.py whose code calls register_patch or register_family",
    )
