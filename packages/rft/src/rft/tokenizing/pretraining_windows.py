"""Windows of tokens for pre-training, from texts of this machine and of the Hub."""

from __future__ import annotations

import sys
from pathlib import Path

from rft.hub.sources import located_sources
from rft.tokenizing.store_space import tokens_within
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.store.worker_pool import BuildWorkers, available_cores
from rft_trainer.data.token_shards.open import PretrainRows, TextSources, open_windows, store_directory
from rft_trainer.data.token_shards.stream_building import BuildTokens, in_this_process
from rft_trainer.data.token_shards.workers import FEWEST_SHARDS, tokens_in_workers
from rft_trainer.runs.stop_signals import stop_requested
from rft_trainer.settings.pretraining import PretrainDataSettings


def pretraining_windows(data: PretrainDataSettings, tokenizer: HfTokenizer, *, window: int, seed: int) -> PretrainRows:
    """Build what is missing of the tokens of a run, and open windows over them, as `open_windows` does.

    Raises:
        OptionsError, DataError, StorageError, KeyboardInterrupt: as `open_windows` raises them.
        ServiceError: the Hub cannot be reached.
    """
    sources = text_sources(data) if data.prompt_data else None
    build = _builder(tokenizer, data.data_store_workers)
    build = tokens_within(store_directory(data.data_store_path), data.data_store_max_gb, build)
    return open_windows(data, tokenizer, window=window, seed=seed, sources=sources, build=build)


def _builder(tokenizer: HfTokenizer, num_workers: int) -> BuildTokens:
    """Return what builds shards: this process, or workers that load the tokenizer from its directory."""
    here = in_this_process(tokenizer, stopped=stop_requested)
    # one that was made in memory is nowhere for another process to load it from
    if not Path(tokenizer.where).is_dir():
        return here
    workers = BuildWorkers(
        [sys.executable, "-P", "-m", "rft.tokenizing.token_worker_main"],
        {"tokenizer": tokenizer.where, "digest": tokenizer.digest},
        num_workers or available_cores(),
        2 if num_workers else FEWEST_SHARDS,
    )
    return tokens_in_workers(workers, here, stopped=stop_requested)


def text_sources(data: PretrainDataSettings) -> TextSources:
    """Return the sources of texts, with the files of those that are data sets of the Hub."""
    probabilities = data.prompt_data_probs or None
    training = located_sources(data.prompt_data, probabilities, split=data.prompt_split, flag="--prompt_data")
    if not data.eval_data:
        return TextSources(training)
    return TextSources(
        training, located_sources(data.eval_data, None, split=data.eval_split, flag="--eval_data", labelled=True)
    )
