"""The files of a model's repository that are downloaded: configuration, safetensors, tokenizer, templates."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from rft.hub.download import Files, fetched
from rft.hub.failures import refused_files
from rft.hub.hub_names import HubName

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_WEIGHTS, _INDEX = ".safetensors", ".safetensors.index.json"
_TEMPLATES = "additional_chat_templates"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")


def model_directory(name: HubName, flag: str, *, weights: bool = True) -> Path:
    """Return the directory of a model at a commit, downloaded where the cache lacks it.

    `weights=False`: without its safetensors, for what reads the configuration alone.
    """

    def choose(files: Files) -> list[str]:
        return _chosen(files, name, flag, weights=weights)

    return fetched(name, ["config.json"], choose, flag)[0]


def listed_model(name: HubName, flag: str) -> tuple[Path, dict[str, int]]:
    """Return the directory of a model at a commit without its weights, and the bytes of each weight file it lacks.

    Files that a start would download are asked for by the list of the repository alone.
    """
    sizes: dict[str, int] = {}

    def choose(files: Files) -> list[str]:
        chosen = _chosen(files, name, flag, weights=True)
        weights = [file for file in chosen if file.endswith(_WEIGHTS)]
        sizes.update({file: files.sizes[file] for file in weights})
        return [file for file in chosen if file not in weights]

    folder, _ = fetched(name, ["config.json"], choose, flag)
    return folder, {file: size for file, size in sizes.items() if not (folder / file).is_file()}


def _chosen(files: Files, name: HubName, flag: str, *, weights: bool) -> list[str]:
    here = [file for file in files.names if "/" not in file or file.startswith(f"{_TEMPLATES}/")]
    if not any(file in here for file in ("config.json", "adapter_config.json")):
        raise refused_files(
            name,
            flag,
            code="hub.no_model",
            what=f"{name.repo} has no config.json: it holds {', '.join(files.names[:6]) or 'nothing'}",
            why="config.json says what a model is",
            do=f"--prompt_data {name.repo}" if _has_data(files) else f"{flag} of a repository that is a model's",
        )
    tensors = [file for file in here if file.endswith(_WEIGHTS)]
    if weights and not tensors:
        pickled = [file for file in here if file.endswith(_PICKLED)]
        raise refused_files(
            name,
            flag,
            code="hub.no_safetensors",
            what=f"{name.repo} has no safetensors" + (f", only {pickled[0]}" if pickled else ""),
            why="weights are read from safetensors; a pickled file can run code, and is not downloaded",
            do=f"{flag} of a revision that has them, such as {name.repo}@refs/pr/1, if its pages list one",
        )
    texts = [file for file in here if PurePosixPath(file).suffix in _SUFFIXES]
    return sorted({*texts, *(_of_transformers(tensors) if weights else [])})


def _of_transformers(tensors: list[str]) -> list[str]:
    """Leave out a second copy of the weights in a form of their authors' own program."""
    named = [file for file in tensors if not file.startswith("consolidated")]
    return named or tensors


def _has_data(files: Files) -> bool:
    return any(file.endswith((".parquet", ".jsonl", ".csv")) for file in files.names)
