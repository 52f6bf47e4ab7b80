"""Weight loader that runs in SGLang's workers: loads a file of shared memory, returns fingerprints of the weights.

SGLang calls a `custom_weight_loader` in each worker process with the model and a list of named tensors.
The list that we send has one empty tensor, whose name is the path of a request:

    {"weights": file to load or null, "dtype": "bfloat16", "shapes": {name: [rows, columns]}, "answer": prefix}

Each worker writes {"read": digests, "held": digests} or {"error": words} to the file named by the prefix and its
process id. SGLang pickles that list (a name and an empty tensor) for its own pipes between its own processes; weights
and answers never are. No SGLang is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_engine.weight_sync.fingerprints import Fingerprint, fingerprint_of
from rft_engine.weight_sync.fused_parameters import Fusions, held_fingerprint
from rft_engine.weight_sync.weight_file import read_weight_file

_FUSIONS: Fusions = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused modules of SGLang's models; most of the models do not declare them."""


def exchange(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Carry out the request whose path is the name of the one tensor; an error becomes the answer."""
    [(path, _)] = named_tensors
    request: dict[str, Any] = json.loads(Path(path).read_text())
    answer: dict[str, Any]
    try:
        answer = _carry_out(model, request)
    except (RuntimeError, ValueError, KeyError, AssertionError, OSError) as error:
        answer = {"error": " ".join(str(error).split())[:600] or type(error).__name__}
    answer_path = Path(f"{request['answer']}.{os.getpid()}.{id(model)}")
    hidden = answer_path.with_name("." + answer_path.name)
    hidden.write_text(json.dumps(answer))
    # the trainer's side globs for answers: a rename makes only complete files visible
    hidden.rename(answer_path)


def _carry_out(model: Any, request: dict[str, Any]) -> dict[str, Fingerprint]:
    dtype = getattr(torch, request["dtype"])
    read: Fingerprint = {}
    if request["weights"] is not None:
        tensors = read_weight_file(request["weights"])
        model.load_weights(iter(tensors.items()))
        # of the file as this worker mapped it; what the model holds is digested below
        read = fingerprint_of(tensors.items(), dtype)
    declared: Fusions | None = getattr(model, "packed_modules_mapping", None)
    fingerprint = held_fingerprint(model, request["shapes"], dtype, declared or _FUSIONS)
    return {"read": read, "held": fingerprint}
