"""The files of a data set's repository that a configuration and a split stand for; no code of it is read or run.

They are those that its card (README.md) names; without a card those whose folders or names say the split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, cast

from rft.hub.download import Files, fetched
from rft.hub.failures import refused_files
from rft.hub.hub_names import HubName
from rft_core.errors import RftError
from rft_core.nearest_names import nearest_names

CARD = "README.md"
_READ = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
_NO_DATA = ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")
_WORDS = {
    "train": "train training",
    "validation": "validation valid dev val",
    "test": "test testing eval evaluation",
}
"""Words of names that say a split, as `datasets` reads them."""

Splits = dict[str, list[str]]


def dataset_files(name: HubName, split: str, flag: str) -> list[Path]:
    """Return the files of a split of a data set at a commit, in reading order, downloaded where the cache lacks them.

    Args:
        name: a name with a commit; a split of its own comes before `split`.
        split: the one that the settings ask for.
        flag: the setting, for errors.
    """

    def choose(files: Files) -> list[str]:
        return chosen_files(files.names, _card(files.folder, name, flag), name, split, flag)

    folder, chosen = fetched(name, [CARD], choose, flag)
    return [folder / file for file in chosen]


def chosen_files(names: Sequence[str], card: Mapping[str, Any], name: HubName, split: str, flag: str) -> list[str]:
    """Choose among the files of a repository.

    Raises:
        DataError: it has no data files, no such configuration or split, or files in another format.
    """
    configs = _configs(names, card)
    if not configs:
        raise _no_data(names, name, flag)
    if not name.config and len(configs) > 1 and "default" not in configs:
        raise _choice(name, flag, "configuration", list(configs))
    config = name.config or ("default" if "default" in configs else next(iter(configs)))
    splits = configs.get(config) or _of_folder(names, config)
    if not splits:
        raise _choice(name, flag, "configuration", list(configs), config)
    wanted = name.split or split
    if wanted not in splits:
        raise _choice(name, flag, "split", list(splits), wanted, config)
    unread = [file for file in splits[wanted] if not file.lower().endswith(_READ)]
    if unread:
        raise refused_files(
            name,
            flag,
            code="hub.unread_format",
            what=f"{unread[0]} of {name.repo} is not read; read are {', '.join(_READ)}",
            why="nothing compressed is unpacked, and no loading script is run",
            do=_converted(name, config),
        )
    return splits[wanted]


def _card(folder: Path, name: HubName, flag: str) -> Mapping[str, Any]:
    """Return the metadata at the head of the card; empty where there is none."""
    import huggingface_hub

    library: Any = huggingface_hub
    file = folder / CARD
    try:
        return library.metadata_load(file) or {} if file.is_file() else {}
    except Exception as error:  # whatever a parser raises
        raise refused_files(
            name,
            flag,
            code="hub.damaged_card",
            what=f"the metadata at the head of {CARD} of {name.repo} cannot be read: {error}",
            why="they say which files belong to a configuration and a split",
            do=f"name a file of it: hf download {name.repo} --repo-type dataset --local-dir {Path(name.repo).name}",
        ) from error


def _configs(names: Sequence[str], card: Mapping[str, Any]) -> dict[str, Splits]:
    """Return the files of each split of each configuration; the default one comes first."""
    configs: dict[str, Splits] = {}
    rows = [cast("dict[str, Any]", row) for row in _as_list(card.get("configs")) if isinstance(row, dict)]
    for row in sorted(rows, key=lambda row: not row.get("default")):
        splits = _stated(names, row.get("data_files"), str(row.get("data_dir") or ""))
        configs[str(row.get("config_name") or "default")] = splits
        if row.get("default") and len(rows) > 1:
            configs.setdefault("default", splits)
    configs = {config: splits for config, splits in configs.items() if splits}
    if configs:
        return configs
    splits = _by_names(_data_files(names))
    return {"default": splits} if splits else {}


def _stated(names: Sequence[str], data_files: Any, folder: str) -> Splits:
    """Return the splits that an entry of the card names: a pattern, a list of them, or objects with split and path."""
    if data_files is None:
        return _by_names(_data_files(_below(names, folder)))
    splits: Splits = {}
    for entry in _as_list(data_files):
        stated = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {"split": "train", "path": entry}
        split = str(stated.get("split"))
        for pattern in _as_list(stated.get("path")):
            full = str(PurePosixPath(folder) / str(pattern))
            files = [file for file in names if _matches(file, full)]
            chosen = splits.setdefault(split, [])
            chosen += [file for file in files if file not in chosen]
    return {split: files for split, files in splits.items() if files}


def _as_list(value: Any) -> list[Any]:
    """Return a list as it is, nothing as an empty one, and any other value as one of its own."""
    if value is None:
        return []
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _matches(file: str, pattern: str) -> bool:
    """Return whether a pattern names a file: `*` stays in its folder, `**` does not."""
    if "**" in pattern:
        return fnmatchcase(file, pattern.replace("**/", "*").replace("**", "*"))
    return fnmatchcase(file, pattern) and file.count("/") == pattern.count("/")


def _below(names: Sequence[str], folder: str) -> list[str]:
    return [file for file in names if not folder or file.startswith(f"{folder.strip('/')}/")]


def _of_folder(names: Sequence[str], config: str) -> Splits:
    """Return the splits in a folder that has the name of a configuration, as converted data sets have them."""
    inside = [file for file in names if file.startswith(f"{config}/")]
    return _by_names(_data_files(inside), skip=len(PurePosixPath(config).parts))


def _data_files(names: Sequence[str]) -> list[str]:
    files = [file for file in names if file.lower().endswith(_READ) and not file.startswith(".")]
    return [file for file in files if PurePosixPath(file).name not in _NO_DATA]


def _by_names(files: Sequence[str], skip: int = 0) -> Splits:
    """Sort files by the split that their names or folders say; all are "train" where none says one."""
    splits: Splits = {}
    for file in files:
        for split, words in _WORDS.items():
            if _says(PurePosixPath(*PurePosixPath(file).parts[skip:]), words.split()):
                splits.setdefault(split, []).append(file)
                break
    if not splits and files:
        return {"train": list(files)}
    return {split: splits[split] for split in _WORDS if split in splits}


def _says(file: PurePosixPath, words: Sequence[str]) -> bool:
    stems = [*file.parts[:-1], file.stem]
    return any(word in re.split(r"[^a-z]+", stem.lower()) for stem in stems for word in words)


def _converted(name: HubName, config: str) -> str:
    return f"{name.repo}:{config}@refs/convert/parquet, the Hub's own conversion, where its page offers one"


def _no_data(names: Sequence[str], name: HubName, flag: str) -> RftError:
    scripts = [file for file in names if file.endswith(".py")]
    others = f"a loading script, {scripts[0]}" if scripts else ", ".join(names[:6]) or "nothing"
    return refused_files(
        name,
        flag,
        code="hub.no_data",
        what=f"{name.repo} has no data files; it holds {others}",
        why=f"rows are read from {', '.join(_READ)}; no loading script is run",
        do=_converted(name, name.config or "default"),
    )


def _choice(name: HubName, flag: str, part: str, known: list[str], found: str = "", config: str = "") -> RftError:
    near = (nearest_names(found, known, count=1) if found else []) or known
    remedy = ":".join(filter(None, (name.repo, config, near[0])))
    listed = ", ".join(known[:12]) + (f" and {len(known) - 12} more" if len(known) > 12 else "")
    state = f"has no {part} {found}" if found else f"has {len(known)} {part}s, and none is chosen"
    revision = f"@{name.revision}" if name.revision and not name.commit else ""
    return refused_files(
        name,
        flag,
        code="hub.unknown_split" if part == "split" else "hub.unknown_config",
        what=f"{name.repo} {state}; it has {listed}",
        why="a data set is named ORG/NAME:CONFIG:SPLIT; without a split, --prompt_split or --eval_split is taken",
        do=f"{flag} {remedy}{revision}",
    )
