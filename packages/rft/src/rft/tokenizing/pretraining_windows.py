"""Windows of tokens for pre-training, from texts of this machine and of the Hub."""

from __future__ import annotations

from rft.hub.sources import located_sources
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.token_shards.build import in_this_process
from rft_trainer.data.token_shards.open import PretrainRows, TextSources, open_windows
from rft_trainer.runs.stop_signals import stop_requested
from rft_trainer.settings.pretraining import PretrainDataSettings


def pretraining_windows(data: PretrainDataSettings, tokenizer: HfTokenizer, *, window: int, seed: int) -> PretrainRows:
    """Build what is missing of the tokens of a run, and open windows over them, as `open_windows` does.

    Raises:
        OptionsError, DataError, StorageError, KeyboardInterrupt: as `open_windows` raises them.
        ServiceError: the Hub cannot be reached.
    """
    sources = text_sources(data) if data.prompt_data else None
    build = in_this_process(tokenizer, stopped=stop_requested)
    return open_windows(data, tokenizer, window=window, seed=seed, sources=sources, build=build)


def text_sources(data: PretrainDataSettings) -> TextSources:
    """Return the sources of texts, with the files of those that are data sets of the Hub."""
    probabilities = data.prompt_data_probs or None
    training = located_sources(data.prompt_data, probabilities, split=data.prompt_split, flag="--prompt_data")
    if not data.eval_data:
        return TextSources(training)
    return TextSources(
        training, located_sources(data.eval_data, None, split=data.eval_split, flag="--eval_data", labelled=True)
    )
