"""Write a reward model as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from rft_models.files.directories import no_progress_bars
from rft_models.files.processor_files import keep_processor_files
from rft_models.loading.sequence_classifiers import classifiers, decoder_class, edit_config
from rft_models.reward_model.spec import RECORD, RewardSpec
from rft_models.tokenization.tokenizer import HfTokenizer


def write(
    model: Any,
    spec: RewardSpec,
    codec: HfTokenizer | None,
    directory: Path,
    tensors: dict[str, Tensor],
    *,
    processor_from: str | None,
) -> None:
    """Write `tensors` by their saved names with the configuration, the tokenizer and the image processor.

    Args:
        model: the transformers decoder, whose configuration is saved.
        spec: what the head computes.
        codec: the tokenizer, where there is one.
        directory: made if absent.
        tensors: weights of decoder and head, by the names that they have in the file.
        processor_from: the directory whose image processor is kept; None: the model takes no images.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(str(directory), state_dict=tensors)
    kind = model.config.model_type
    names = {str(number): name for number, name in enumerate(spec.heads)}
    changes: dict[str, Any] = {RECORD: spec.as_record()}
    if spec.is_classifier:
        changes |= {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
    named = classifiers().get(kind) if spec.is_classifier else decoder_class(kind)
    edit_config(directory / "config.json", changes | ({"architectures": [named]} if named else {}))
    if codec is not None:
        codec.save_pretrained(directory)
    if processor_from is not None:
        keep_processor_files(processor_from, directory)
