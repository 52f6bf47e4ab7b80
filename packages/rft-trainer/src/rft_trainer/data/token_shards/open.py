"""From data settings to the windows of a run: streams are built or found on disk, and divided."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rft_core.errors import DataError, OptionsError
from rft_trainer.data.mixture import Mixture
from rft_trainer.data.sources import SourceSpec, parse_sources
from rft_trainer.data.token_shards.encode import TokenEncoder
from rft_trainer.data.token_shards.stream_building import BuildTokens, BuiltStream, build_stream, in_this_process
from rft_trainer.data.token_shards.text_files import text_files
from rft_trainer.data.token_shards.text_plan import TextStream, held_out_cut
from rft_trainer.data.token_shards.windows import (
    StreamWindows,
    TokenStream,
    TokenWindows,
    first_windows,
    num_windows_of,
)
from rft_trainer.settings.pretraining import PretrainDataSettings


@dataclass(frozen=True, slots=True)
class PretrainRows:
    """Windows to train on and held out, and the order of the former."""

    training: TokenWindows
    held_out: TokenWindows | None
    mixture: Mixture
    """Sources by their windows; `mixture.sequence(seed, epoch)` is the order of an epoch."""
    data_hash: str
    """Of the training windows."""
    seed: int
    notes: tuple[str, ...] = field(default=())
    """What a person should know of the data before training on them."""

    def order(self, epoch: int) -> Sequence[int]:
        """Return the windows of an epoch in order; a function of (seed, epoch, place), with no list in memory."""
        return self.mixture.sequence(self.seed, epoch)


@dataclass(frozen=True, slots=True)
class TextSources:
    """Sources of texts that are located: those to train on, and those held out."""

    training: tuple[SourceSpec, ...]
    held_out: tuple[SourceSpec, ...] = ()


def named_sources(data: PretrainDataSettings) -> TextSources:
    """Return the sources that are files of this machine."""
    held_out = parse_sources(data.eval_data, labelled=True) if data.eval_data else ()
    return TextSources(parse_sources(data.prompt_data, data.prompt_data_probs or None), held_out)


def open_windows(
    data: PretrainDataSettings,
    tokenizer: TokenEncoder,
    *,
    window: int,
    seed: int,
    sources: TextSources | None = None,
    build: BuildTokens | None = None,
) -> PretrainRows:
    """Build what is missing of the tokens of a run, and open windows of `window` tokens over them.

    Args:
        data: names the texts.
        tokenizer: makes the tokens.
        window: tokens of a window, each of which but the first is predicted.
        seed: of the order of the windows.
        sources: where some are not files of this machine; None = `named_sources`.
        build: builds shards; None = this process does.

    Raises:
        OptionsError: settings that do not fit. DataError: a text cannot be used. StorageError: no place for the tokens.
        KeyboardInterrupt: the process was asked to stop.
    """
    _check(data, window)
    sources = sources or named_sources(data)
    root = store_directory(data.data_store_path)
    opening = _Opening(data, tokenizer, root, build or in_this_process(tokenizer), window)
    training, held_out = opening.training(sources.training)
    if sources.held_out:
        held_out = [opening.stream(spec, data.eval_split) for spec in sources.held_out]
    chosen = opening.windows(training, data.max_samples, each=False)
    known = [spec.probability for spec in sources.training if spec.probability is not None]
    probabilities = known if len(known) == len(sources.training) else None
    return PretrainRows(
        training=chosen,
        held_out=opening.windows(held_out, data.max_eval_samples, each=True) if held_out else None,
        mixture=Mixture(chosen.sizes, probabilities, most_in_memory=0),
        data_hash=chosen.data_hash,
        seed=seed,
        notes=opening.notes(training, held_out),
    )


_Named = tuple[str, BuiltStream]


@dataclass(frozen=True, slots=True)
class _Opening:
    """The opening of the streams of one run."""

    data: PretrainDataSettings
    tokenizer: TokenEncoder
    root: Path
    build: BuildTokens
    window: int

    def training(self, specs: Sequence[SourceSpec]) -> tuple[list[_Named], list[_Named]]:
        """Build the streams to train on, and those held out of them."""
        share, split = self.data.held_out_share, self.data.prompt_split
        training: list[_Named] = []
        held_out: list[_Named] = []
        for spec in specs:
            files = self._files(spec, split)
            cut = held_out_cut(files, share) if share else None
            training.append((spec.name, self._built(TextStream(files, *self._text(), end=cut))))
            if cut is not None:
                held_out.append((spec.name, self._built(TextStream(files, *self._text(), begin=cut))))
        return training, held_out

    def stream(self, spec: SourceSpec, split: str) -> _Named:
        """Build the stream of a whole source."""
        return spec.name, self._built(TextStream(self._files(spec, split), *self._text()))

    def _text(self) -> tuple[str, str]:
        return separator_of(self.data.text_separator), self.data.text_key

    def _files(self, spec: SourceSpec, split: str) -> tuple[Path, ...]:
        return spec.files or tuple(text_files(spec.path, split=split or None))

    def _built(self, stream: TextStream) -> BuiltStream:
        return build_stream(self.root, stream, self.tokenizer, self.build)

    def windows(self, streams: Sequence[_Named], limit: int, *, each: bool) -> TokenWindows:
        """Return the windows of streams: at most `limit` of each, or of all together."""
        sizes = [self._num_windows(name, built) for name, built in streams]
        chosen = [min(size, limit or size) for size in sizes] if each else first_windows(sizes, limit)
        parts = [self._part(*one, num, size) for one, num, size in zip(streams, chosen, sizes, strict=True)]
        return TokenWindows(parts, self.window, mask_documents=self.data.mask_documents)

    def _num_windows(self, name: str, built: BuiltStream) -> int:
        if built.num_tokens < 2:
            raise DataError(
                code="data.one_token",
                what=f"{name} has {built.num_tokens} token",
                where=str(built.directory),
                why="a model learns a token from those before it, so that a text needs two",
                do="give a longer text with --prompt_data, or another --held_out_share",
            )
        return num_windows_of(built.num_tokens, self.window)

    def _part(self, name: str, built: BuiltStream, num: int, size: int) -> StreamWindows:
        stream = TokenStream(built)
        if num == size:
            return StreamWindows(name, stream, built.content_hash, num, built.num_tokens, built.num_bytes)
        end = num * (self.window - 1) + 1
        num_bytes, first = stream.bytes_before(end)
        # the piece in which the last window ends is counted by what its tokens say
        rest = self.tokenizer.decode(stream.tokens(first, end), skip_special_tokens=True) if first < end else ""
        return StreamWindows(name, stream, built.content_hash, num, end, num_bytes + len(rest.encode()))

    def notes(self, training: Sequence[_Named], held_out: Sequence[_Named]) -> tuple[str, ...]:
        """Return a sentence on each stream."""
        return tuple(
            f"{what} {name}: {built.num_tokens:,} tokens of {built.num_bytes:,} bytes in {built.num_documents:,} "
            f"documents, mapped from {built.directory}"
            for what, streams in (("source", training), ("held out of", held_out))
            for name, built in streams
        )


def store_directory(chosen: str) -> Path:
    """Return the directory of data on disk: the one that is chosen, else `data` in `RFT_CACHE` or ~/.cache/rft."""
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("RFT_CACHE") or "~/.cache/rft").expanduser() / "data"


def separator_of(text: str) -> str:
    """Return the separator that a setting means: \\n, \\t and \\\\ in it stand for the characters."""
    parts = [part.replace("\\n", "\n").replace("\\t", "\t") for part in text.split("\\\\")]
    return "\\".join(parts)


def require_texts(data: PretrainDataSettings) -> None:
    """Raise `OptionsError` where no texts are named."""
    if not data.prompt_data:
        raise OptionsError(
            code="data.no_texts_named",
            what="prompt_data is empty",
            where="--prompt_data",
            why="training needs texts: .txt files, files of rows with a column of texts, or a data set of the Hub",
            do="--prompt_data input.txt",
        )


def _check(data: PretrainDataSettings, window: int) -> None:
    require_texts(data)
    if data.eval_data and data.held_out_share:
        raise OptionsError(
            code="data.two_held_out",
            what=f"eval_data = {data.eval_data} and held_out_share = {data.held_out_share:g}",
            where="--held_out_share",
            why="the held-out loss is that of one of them, and the other would be kept out of training for nothing",
            do="--held_out_share 0",
        )
    if window < 2:
        raise OptionsError(
            code="data.window",
            what=f"a window of {window} token",
            where="--max_len",
            why="a model learns a token from those before it",
            do="--max_len 256",
        )
