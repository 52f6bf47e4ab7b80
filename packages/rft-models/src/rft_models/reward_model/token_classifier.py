"""Token classifiers of transformers with two labels as step reward models, as TRL's PRMTrainer writes them.

`AutoModelForTokenClassification` with `num_labels = 2` has the logits z = W h + b, W [2, D] "score.weight" and b [2]
"score.bias", of each token's state h; at the last token of a step's separator label 1 means that the step is right.
Its probability softmax(z)_1 is sigmoid(z_1 - z_0), so the difference of the rows is the one row of a step's logit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft_core.errors import DataError
from rft_models.files.directories import missing_weights
from rft_models.files.head_tensors import stored_tensor
from rft_models.loading.sequence_classifiers import HEAD
from rft_models.reward_model.head import ScoreHead
from rft_models.reward_model.spec import RewardSpec, TokenClassifierSteps


def is_token_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether config.json names the token classifier class of its architecture."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES as CLASSES

    return CLASSES.get(config.get("model_type", "")) in (config.get("architectures") or [])


def token_classifier_spec(path: Path, config: Mapping[str, Any]) -> RewardSpec:
    """Return the spec of the token classifier in a directory.

    The separator is a new line and the reduction the minimum, as TRL's and this project's defaults, unless the entries
    "step_separator" and "step_reduction" of config.json say otherwise: transformers has no place for them.

    Raises:
        DataError: the head has another number of labels than two, or none is there.
        OptionsError: entries of config.json that are no separator or no reduction.
    """
    weight_KD = stored_tensor(path, f"{HEAD}.weight")
    if weight_KD is None:
        raise missing_weights(path, f"the head's tensor {HEAD}.weight is not in the files")
    if weight_KD.dim() != 2 or weight_KD.shape[0] != 2:
        raise DataError(
            code="models.token_labels",
            what=f"{HEAD}.weight of a token classifier has the shape {list(weight_KD.shape)}",
            where=str(path),
            why="a step is wrong (label 0) or right (label 1), so a step reward model has two labels",
            do="use a token classifier that was trained with num_labels=2",
        )
    separator, reduction = config.get("step_separator", "\n"), config.get("step_reduction", "min")
    return RewardSpec(steps=TokenClassifierSteps(separator=separator, reduction=reduction))


def token_classifier_head(path: Path, spec: RewardSpec) -> ScoreHead:
    """Read the head: the row of label 1 less that of label 0, and the same of the bias where there is one."""
    weight_KD, bias_K = (stored_tensor(path, f"{HEAD}.{name}") for name in ("weight", "bias"))
    assert weight_KD is not None, "token_classifier_spec has found it"
    # in float32, whatever the files hold: the rows are alike, and their difference is what counts
    rows_2D = weight_KD.float()
    bias_1 = None if bias_K is None else bias_K.float().diff()
    return ScoreHead(spec, rows_2D.diff(dim=0), bias_K=bias_1)
