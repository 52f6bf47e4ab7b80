"""A file of settings: YAML, one line a setting, at the left margin or below its group; every line number is kept.

Only the parser is used, never a constructor: a file cannot make objects, whatever its tags say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from rft.config import errors
from rft.config.names import negate, setting_of
from rft.config.origins import GivenSetting
from rft.config.schema import Setting
from rft.resolved import Origin, OriginKind
from rft_core.errors import Problem
from rft_core.nearest_names import nearest_names

HEADER = "recipe"
STAGES = "stages"
LARGEST = 1_000_000
_FORM = "a setting stands at the left margin under the name of its flag, or below the name of its group"
_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp", "seq", "map")
)
_NAME_TAGS = _PLAIN_TAGS | {"tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"}
"""`<<` and `=` have tags of their own; there they are names that no setting has."""


@dataclass(slots=True)
class FileSettings:
    """Settings, header and problems of one file."""

    options: list[GivenSetting] = field(default_factory=list[GivenSetting])
    header: dict[str, str] = field(default_factory=dict[str, str])
    """The fields under `recipe:` that hold one value, as text."""
    stages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """What stands under `stages:` in the header, each stage's fields as text."""
    problems: list[Problem] = field(default_factory=list[Problem])


def read(path: Path, schema: Mapping[str, Setting], *, kind: OriginKind = "file") -> FileSettings:
    """Every setting of a file with its line; what cannot be read becomes a problem."""
    file = FileSettings()
    root = _parsed(path, kind, file)
    if root is None:
        return file
    if not isinstance(root, yaml.MappingNode):
        why = "a file of settings has one `name: value` a line"
        file.problems.append(_problem("not_settings", "it holds no settings", path, root, kind, why, "seed: 42"))
        return file
    reader = _Reader(path, kind, schema, file)
    if reader.is_plain("the file", root):
        for key, value in root.value:
            reader.entry(key, value)
    return file


def _parsed(path: Path, kind: OriginKind, file: FileSettings) -> yaml.Node | None:
    origin = Origin(kind, str(path))
    try:
        # a wrong path may be that of a file of weights, which must not be read as text
        if path.stat().st_size > LARGEST:
            why = f"a file of settings has at most {LARGEST} bytes"
            file.problems.append(errors.unreadable("file.large", f"{path} is too large", origin, why, "check the path"))
            return None
        return _compose(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8"
        file.problems.append(errors.unreadable("file.encoding", f"{path} is not text", origin, why, "save it as UTF-8"))
    except (ValueError, OverflowError) as error:
        # an escape of no character, such as "\\U00110000", for which the parser has no error of its own
        what = f"not YAML: {error}"
        file.problems.append(
            errors.unreadable("file.yaml", what, origin, "it could not be parsed", "write one `name: value` a line")
        )
    except RecursionError:
        why = "a setting has one value, and a group no group in it"
        file.problems.append(
            errors.unreadable("file.nested", f"{path} is nested too deeply", origin, why, "flatten it")
        )
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 0
        what = f"not YAML: {getattr(error, 'problem', None) or 'an unexpected character'}"
        why = f"column {mark.column + 1}" if mark else "the file could not be parsed"
        origin = Origin(kind, str(path), line)
        file.problems.append(errors.unreadable("file.yaml", what, origin, why, "write one `name: value` a line"))
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        file.problems.append(
            errors.unreadable("file.read", what, origin, "the file must be readable", "check the path")
        )
    return None


def _compose(text: str) -> yaml.Node | None:
    compose: Callable[..., yaml.Node | None] = cast("Any", yaml).compose  # its stub has no types
    return compose(text, Loader=yaml.SafeLoader)


def _problem(code: str, what: str, path: Path, node: yaml.Node, kind: OriginKind, why: str, do: str) -> Problem:
    return errors.unreadable(f"file.{code}", what, Origin(kind, str(path), node.start_mark.line + 1), why, do)


@dataclass(slots=True)
class _Reader:
    """Walks the entries of one file."""

    path: Path
    kind: OriginKind
    schema: Mapping[str, Setting]
    settings: FileSettings
    lines: dict[str, int] = field(default_factory=dict[str, int])

    def entry(self, key: yaml.Node, value: yaml.Node, group: str = "") -> None:
        """Read one `name: value` entry, at the left margin or below the name of a group."""
        if not isinstance(key, yaml.ScalarNode):
            self._refuse("name", "a name must be one word", key, _FORM, "seed: 42")
            return
        written = f"{group}.{key.value}" if group else key.value
        if not self.is_plain(f"the name {written}", key, _NAME_TAGS):
            return
        if not group and isinstance(value, yaml.MappingNode) and self._is_group(key.value):
            if self.is_plain(written, value):
                for inner, inner_value in value.value:
                    self.entry(inner, inner_value, key.value)
            return
        name, negated = setting_of(written.lstrip("-").replace("-", "_"), dict(self.schema))
        line = key.start_mark.line + 1
        # under the setting's own name, so that an alias counts as a second line
        if name in self.lines:
            why = f"line {self.lines[name]} gives it already"
            self._refuse("duplicate", f"{written} is given twice", key, why, "keep one of the two lines")
            return
        self.lines[name] = line
        if name == HEADER and isinstance(value, yaml.MappingNode):
            self._header(value)
            return
        texts = self._texts(written, value)
        if texts is not None:
            shown = ", ".join(texts)
            is_null = value.tag.endswith(":null")
            texts = ("none",) if is_null else negate(texts) if negated else texts
            origin = Origin(self.kind, str(self.path), line, shown)
            self.settings.options.append(GivenSetting(written, name, texts, origin, is_null))

    def is_plain(self, name: str, node: yaml.Node, tags: frozenset[str] = _PLAIN_TAGS, *, do: str = "") -> bool:
        """Return whether a node has no tag of its own, such as `!!python/name`; refuse it otherwise."""
        if node.tag in tags:
            return True
        why = "only plain text, numbers, booleans and lists are read from a file"
        tag = _short(node.tag)
        self._refuse("tag", f"{name} has the tag {tag}", node, why, do or f"take {tag} away")
        return False

    def _is_group(self, name: str) -> bool:
        return any(setting.group == name.replace("-", "_") for setting in self.schema.values())

    def _header(self, header: yaml.MappingNode) -> None:
        if not self.is_plain(HEADER, header):
            return
        for key, value in header.value:
            if not self.is_plain(f"{HEADER}.{_raw(key)}", value):
                continue
            if isinstance(value, yaml.ScalarNode):
                self.settings.header[_raw(key)] = value.value
            elif _raw(key) == STAGES and isinstance(value, yaml.SequenceNode):
                stages = [stage for stage in value.value if isinstance(stage, yaml.MappingNode)]
                self.settings.stages = [{_raw(k): _raw(v) for k, v in stage.value} for stage in stages]

    def _texts(self, name: str, value: yaml.Node) -> tuple[str, ...] | None:
        if not self.is_plain(name, value, do=f"{name}: VALUE"):
            return None
        if isinstance(value, yaml.ScalarNode):
            return (value.value,)
        if isinstance(value, yaml.SequenceNode) and all(_is_plain_scalar(item) for item in value.value):
            return tuple(item.value for item in value.value)
        groups = {setting.group for setting in self.schema.values()}
        near = nearest_names(name, groups) if isinstance(value, yaml.MappingNode) else []
        why = f"no group has this name; nearest: {', '.join(near)}" if near else _FORM
        do = f"{near[0]}: in the place of {name}:" if near else f"{_first_key(value)}: VALUE"
        self._refuse("nested", f"{name} holds other settings", value, why, do)
        return None

    def _refuse(self, code: str, what: str, node: yaml.Node, why: str, do: str) -> None:
        self.settings.problems.append(_problem(code, what, self.path, node, self.kind, why, do))


def _is_plain_scalar(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag in _PLAIN_TAGS


def _raw(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""


def _first_key(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode) and node.value:
        return _raw(node.value[0][0]) or "name"
    return "name"


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")
