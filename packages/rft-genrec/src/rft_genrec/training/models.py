"""The model that a run begins with: a new decoder, or one whose vocabulary has the tokens of the IDs.

Each is a function of its settings, of the model it is made from and of the seed. It lies in the cache under the hash of
these and may be removed at any time: the next start writes the same bytes again.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

from rft.identity.model_files import directory_content
from rft.process.cache import written_once
from rft.settings import TokenizerOutputSettings, TrainTokenizerSettings
from rft.tiny_models.new_tokenizer import new_tokenizer
from rft_core.errors import OptionsError
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.prompts.model_record import ModelRecord, other_ids, read_record
from rft_genrec.settings.sft import GenrecSftSettings
from rft_models.files.directories import existing_directory
from rft_models.new_decoders.build import build_new_decoder
from rft_models.new_decoders.extended_vocabulary import extend_vocabulary
from rft_models.settings import TokenizerSettings
from rft_models.tokenization.added_tokens import known_tokens, token_ids_of, with_added_tokens
from rft_models.tokenization.tokenizer import load_tokenizer

_ROOM = "recommenders"
_FORMAT = 1
"""Counts up when the same settings make other weights."""


def prepared_model(settings: GenrecSftSettings, builder: PromptBuilder) -> tuple[Path, int]:
    """Return the directory of the model that a run begins with, and the id of its first new token, -1 if it has none.

    Raises:
        DataError: a vocabulary that has some of the tokens, or a model that was trained on other IDs.
        OptionsError: freeze_llm without new tokens.
    """
    if not settings.model.pretrain:
        return _new_decoder(settings, builder), -1
    source = existing_directory(settings.model.pretrain)
    tokens = builder.ids.vocabulary
    known = known_tokens(load_tokenizer(source), tokens)
    if len(known) < len(tokens):
        return _extended(source, builder, settings)
    record = read_record(source)
    if record is not None and record.ids != builder.ids.digest:
        raise other_ids(record, builder.ids, source)
    token_ids_of(load_tokenizer(source), tokens)
    if settings.model.freeze_llm:
        raise OptionsError(
            code="genrec.no_new_tokens",
            what=f"freeze_llm, and all {len(tokens)} tokens of the IDs are in the vocabulary of {source} already",
            where="--freeze_llm, --pretrain",
            why="only the rows of new tokens would be trained, and there are none: nothing would be trained",
            do=f"leave freeze_llm out, or --train_only_tokens_from {min(token_ids_of(load_tokenizer(source), tokens))}",
        )
    return _with_record(source, builder), -1


def _new_decoder(settings: GenrecSftSettings, builder: PromptBuilder) -> Path:
    seed = settings.run.seed
    content = {
        "format": _FORMAT,
        "decoder": asdict(settings.decoder),
        "record": asdict(ModelRecord.of(builder)),
        "seed": seed,
    }

    def write(target: Path) -> None:
        tokenizer = target.with_name(f"{target.name}-tokenizer")
        try:
            of_bytes = TokenizerSettings(tokenizer_type="bytes")
            place = TokenizerOutputSettings(save_path=str(tokenizer))
            new_tokenizer(TrainTokenizerSettings(tokenizer=of_bytes, output=place))
            with_added_tokens(load_tokenizer(tokenizer), builder.ids.vocabulary).save_pretrained(tokenizer)
            build_new_decoder(target, settings.decoder, tokenizer, seed=seed)
        finally:
            shutil.rmtree(tokenizer, ignore_errors=True)
        ModelRecord.of(builder).write(target)

    return written_once(_ROOM, content, write)


def _extended(source: Path, builder: PromptBuilder, settings: GenrecSftSettings) -> tuple[Path, int]:
    first = load_tokenizer(source).vocab_size
    content = {
        "format": _FORMAT,
        "model": directory_content(str(source)).digest,
        "record": asdict(ModelRecord.of(builder)),
        "tokens": builder.ids.vocabulary,
        "seed": settings.run.seed,
    }

    def write(target: Path) -> None:
        extend_vocabulary(source, target, builder.ids.vocabulary, seed=settings.run.seed)
        ModelRecord.of(builder).write(target)

    return written_once(_ROOM, content, write), first


def _with_record(source: Path, builder: PromptBuilder) -> Path:
    """Return the model itself where its record says what it is trained on now, else a copy with another record."""
    wanted = ModelRecord.of(builder)
    if read_record(source) == wanted:
        return source
    content = {"format": _FORMAT, "model": directory_content(str(source)).digest, "record": asdict(wanted)}

    def write(target: Path) -> None:
        shutil.copytree(source, target)
        wanted.write(target)

    return written_once(_ROOM, content, write)
