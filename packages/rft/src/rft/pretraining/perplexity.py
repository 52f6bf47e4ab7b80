"""Loss, perplexity and bits a byte of a model on texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rft.build.models import tokenizer_of
from rft.hub.run_settings import with_model_directories
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import Machine
from rft.settings import PerplexitySettings
from rft.tokenizing.pretraining_windows import pretraining_windows
from rft_core.errors import OptionsError
from rft_models.loading.context_length import model_facts
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_trainer.data.token_shards.windows import TokenWindows
from rft_trainer.loops.pretraining import bits_per_byte, loss_of_windows, perplexity
from rft_trainer.settings.pretraining import PerplexityDataSettings, PretrainDataSettings


@dataclass(frozen=True, slots=True)
class TextMeasure:
    """Figures of a model on some texts."""

    loss: float
    """Mean negative log-likelihood of a token, in nats."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """Comparable between models of different tokenizers."""
    num_tokens: int
    """Tokens that are predicted: all but the first of each text file."""
    num_bytes: int
    num_windows: int
    window: int
    """Tokens of a window."""

    def as_record(self) -> dict[str, float]:
        """Return the figures as JSON."""
        return asdict(self)


def measure_perplexity(settings: PerplexitySettings, machine: Machine) -> TextMeasure:
    """Predict every token of the texts of the settings, window after window.

    Raises:
        OptionsError: no texts are named.
        DataError: a text or the model cannot be used.
    """
    settings = with_model_directories(settings)
    data, pretrain = settings.data, settings.model.pretrain
    positions = model_facts(pretrain).max_positions
    tokenizer = tokenizer_of(settings.model)
    policy = load_policy(pretrain, dtype=weights_dtype(settings.model.bf16), device=machine.device)
    window = min(data.max_len or positions, positions)
    rows = pretraining_windows(_as_training(data), tokenizer, window=window, seed=0)
    windows = rows.training if data.eval_data else rows.held_out
    assert windows is not None
    return _measured(policy, windows, machine, data.micro_train_batch_size, window)


def _measured(policy: CausalPolicy, windows: TokenWindows, machine: Machine, batch: int, window: int) -> TextMeasure:
    loss, num_tokens = loss_of_windows(
        policy,
        windows,
        machine.collectives,
        max_sequences=batch,
        max_tokens=batch * window,
        device=machine.device,
    )
    bits = bits_per_byte(loss, num_tokens, windows.num_bytes)
    return TextMeasure(loss, perplexity(loss), bits, num_tokens, windows.num_bytes, len(windows), window)


def _as_training(data: PerplexityDataSettings) -> PretrainDataSettings:
    """Return the data settings that open the same texts."""
    if not data.eval_data and not (data.prompt_data and data.held_out_share):
        raise OptionsError(
            code="perplexity.no_texts",
            what="eval_data is empty",
            where="--eval_data",
            why="a perplexity is that of texts: of eval_data, or of the held_out_share of prompt_data",
            do="--eval_data text.txt",
        )
    own = data.eval_data
    return PretrainDataSettings(
        prompt_data=own or data.prompt_data,
        prompt_split=data.eval_split if own else data.prompt_split,
        held_out_share=0.0 if own else data.held_out_share,
        max_samples=data.max_eval_samples if own else 0,
        max_eval_samples=0 if own else data.max_eval_samples,
        text_key=data.text_key,
        text_separator=data.text_separator,
        mask_documents=data.mask_documents,
        data_store_path=data.data_store_path,
        data_store_workers=data.data_store_workers,
        data_store_max_gb=data.data_store_max_gb,
    )
