"""Names of settings as people write them: aliases, opposites, the name of the group in front, `no_`."""

from __future__ import annotations

from rft.config.schema import Setting
from rft.config.values import FALSE, TRUE

CONFIG = "config"
"""The name under which files of settings are given; it is no setting."""
ALIASES = {"logging_steps": "log_interval"}
"""Other names of a setting, with the same meaning; those of one command alone are in the setting's metadata."""
OPPOSITES = {"disable_engine_sleep": "enable_engine_sleep"}
"""Names that mean the contrary of a switch."""


def setting_of(name: str, schema: dict[str, Setting]) -> tuple[str, bool]:
    """The setting that a name stands for, and whether it means its contrary."""
    if name in OPPOSITES and OPPOSITES[name] in schema:
        return OPPOSITES[name], True
    if name in ALIASES and ALIASES[name] in schema:
        return ALIASES[name], False
    if name not in schema:
        for setting in schema.values():
            if name in (*setting.aliases, *setting.full_names):
                return setting.name, False
    # a setting whose own name begins with no_ is not a contrary
    positive = name.removeprefix("no_")
    if positive != name and name not in schema:
        positive = setting_of(positive, schema)[0] if positive not in schema else positive
        if positive in schema and schema[positive].is_switch:
            return positive, True
    return name, False


def negate(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the contrary of a boolean written after an opposite name; another text stays, to be refused."""
    if not texts:
        return ("false",)
    text = texts[0].lower()
    return ("false",) if text in TRUE else ("true",) if text in FALSE else texts
