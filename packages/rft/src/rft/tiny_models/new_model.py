"""A small decoder with random weights and its tokenizer, as a complete Hugging Face directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rft.settings import BuildModelSettings
from rft_core.errors import DataError, OptionsError, RftError
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_bpe_tokenizer, build_decoder
from rft_trainer.data.prompts import prompts_from_rows
from rft_trainer.data.readers.formats import read_rows
from rft_trainer.data.readers.rows import Row
from rft_trainer.data.row_forms import Keys, as_read
from rft_trainer.settings.data import BuildDataSettings, DataSettings, SftDataSettings

_FEWEST_CHARACTERS_FOR_MERGES = 100_000
"""Below, BPE makes tokens of whole words of the training rows, which other rows do not have: 500 rows of 4.3 letters a
word gave 1,515 merges, and nothing about the letters of a word could be learned."""
_MERGED_VOCABULARY, _BYTE_VOCABULARY = 2048, 258
_DEFAULT_NAMES = [BuildDataSettings.text_keys]
_TRAINED_KEYS = Keys(SftDataSettings.input_key, DataSettings.label_key, SftDataSettings.output_key)


@dataclass(frozen=True, slots=True)
class NewModel:
    """Sizes of a model that was written, and of the texts that its tokenizer was learned from."""

    directory: Path
    num_texts: int
    num_characters: int
    num_tokens: int
    """Of these texts, by the new tokenizer."""
    vocab_size: int
    num_parameters: int

    @property
    def has_merges(self) -> bool:
        """True where tokens longer than a byte were learned from the texts."""
        return self.vocab_size > _BYTE_VOCABULARY


def new_model(settings: BuildModelSettings) -> NewModel:
    """Learn a tokenizer, draw the weights, write the directory and read it back; the same seed writes the same bytes.

    Raises:
        OptionsError: the target exists.
        DataError: a file, a column or any text at all is missing.
    """
    target = Path(settings.output.save_path).expanduser()
    refuse_existing(target)
    texts = list(read_texts(settings.data.texts, settings.data.text_keys))
    build(settings, texts, target)
    # read back, so that the sizes are those of the files
    policy = load_policy(target)
    tokenizer = policy.tokenizer
    assert tokenizer is not None
    return NewModel(
        directory=target,
        num_texts=len(texts),
        num_characters=sum(map(len, texts)),
        num_tokens=sum(len(tokenizer.encode(text)) for text in texts),
        vocab_size=tokenizer.vocab_size,
        num_parameters=policy.num_parameters,
    )


def refuse_existing(target: Path) -> None:
    """Raise `OptionsError` where the target exists: a model is never written over another."""
    if target.exists():
        raise OptionsError(
            code="build.exists",
            what=f"{target} already exists",
            where="--save_path",
            why="a new model never overwrites another",
            do=f"--save_path {target.with_name(target.name + '-2')}",
        )


def read_texts(files: str, keys: str) -> Iterator[str]:
    """The texts of every file, column by column of each row.

    Raises:
        DataError: a file, a column or any text at all is missing.
    """
    names = [key.strip() for key in keys.split(",") if key.strip()]
    paths = [Path(part.strip()).expanduser() for part in files.split(",") if part.strip()]
    has_text = False
    for path in paths:
        for text in _lines(path) if path.suffix == ".txt" else _columns(path, names):
            has_text = True
            yield text
    if not has_text:
        raise DataError(
            code="build.no_texts",
            what=f"--texts {files!r} with --text_keys {keys!r} gives no text",
            where="--texts",
            why="a tokenizer is learned from texts",
            do="--texts train.jsonl --text_keys input,output",
        )


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            code="build.unreadable",
            what=f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}",
            where="--texts",
            why="a .txt file is read as UTF-8 text",
            do=f"ls -l {path if path.exists() else path.parent}",
        ) from error


def _columns(path: Path, names: list[str]) -> Iterator[str]:
    with _own_flags():
        rows, names = _named_columns(read_rows(path), names)
        columns = [prompts_from_rows(rows, source=path.stem, input_key=name) for name in names]
    for row in zip(*columns, strict=True):
        for cell in row:
            if cell.text is None:
                raise DataError(
                    code="build.not_text",
                    what=f"a column of {path} holds messages, not text",
                    where=f"row {cell.index} of {path}",
                    why="a tokenizer is learned from plain texts",
                    do="--text_keys COLUMN, one that holds text",
                )
            yield cell.text


def _named_columns(rows: Sequence[Row], names: list[str]) -> tuple[Sequence[Row], list[str]]:
    """Return rows and columns; where `text_keys` is left out and rows have no such column, those that training reads.

    These are the prompt with the response of `sft`, or with the label of `rl` where no row has a response.
    """
    if names != _DEFAULT_NAMES or not rows or set(names) & set(rows[0].fields):
        return rows, names
    found = as_read(rows, _TRAINED_KEYS)
    first = found.rows[0].fields
    # what is missing is said of `text_keys`, where no form is known
    if found.keys.input not in first:
        return rows, names
    answers = (found.keys.output, found.keys.label)
    return found.rows, [found.keys.input, *[key for key in answers if key and isinstance(first.get(key), str)][:1]]


@contextmanager
def _own_flags() -> Generator[None]:
    """Replace the training flags in errors of the readers by the flags of this command."""
    try:
        yield
    except RftError as error:
        fields = asdict(error.problem)
        for name in ("why", "do"):
            fields[name] = fields[name].replace("--prompt_data", "--texts").replace("--input_key", "--text_keys")
        raise type(error)(**fields) from error


def vocabulary_of(texts: list[str]) -> int:
    """Return the size of a vocabulary for these texts: bytes alone where they are too few to learn merges from."""
    is_enough = sum(map(len, texts)) >= _FEWEST_CHARACTERS_FOR_MERGES
    return _MERGED_VOCABULARY if is_enough else _BYTE_VOCABULARY


def build(settings: BuildModelSettings, texts: list[str], target: Path) -> None:
    """Write the directory whole or not at all: it is made beside its place and moved there."""
    sizes, seed = settings.model, settings.output.seed
    staging = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        build_decoder(
            staging,
            build_bpe_tokenizer(texts, sizes.vocab_size or vocabulary_of(texts)),
            hidden=sizes.hidden,
            layers=sizes.layers,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads or sizes.heads,
            ffn=sizes.ffn or 3 * sizes.hidden,
            max_positions=sizes.max_positions,
            seed=seed,
        )
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
