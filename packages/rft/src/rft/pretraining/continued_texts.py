"""Texts that the model of a run continues at its end: drawn with keys, so that a resume gives the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rft.build.engines import native_engine
from rft.parallel.parallelize import weights_dtype
from rft.run_lifecycle import RunStart, final_model
from rft.settings import PretrainSettings
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import RftError
from rft_core.keyed_random import derive_key
from rft_models.decode.fast_decoder import decoder_for
from rft_models.policy.load import load_policy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.token_shards.windows import TokenWindows
from rft_trainer.records.rollouts import TrainingSample

_LOG = logging.getLogger(__name__)
_NONE = "no texts of the model at the end of the run: %s"
_PROMPT_TOKENS = 16
"""Tokens of held-out text that a text begins with, at most half of those that are there."""


@dataclass(frozen=True, slots=True)
class ContinuedTexts:
    """Continues a few texts with the model of a run's last checkpoint, and writes them beside its other samples."""

    settings: PretrainSettings
    started: RunStart
    tokenizer: HfTokenizer
    held_out: TokenWindows | None

    def __call__(self, step: int) -> None:
        """Write the rows of the step; a failure costs the texts, and not the run.

        One rank calls it, once the checkpoint of the step is on the disk.
        """
        try:
            rows = self._rows()
        except RftError as error:
            _LOG.warning(_NONE, error.problem.what)
            return
        except torch.OutOfMemoryError:
            _LOG.warning(_NONE, "no memory for a second copy of the model")
            return
        self.started.directory.write_rollouts(step, rows)

    def _rows(self) -> list[dict[str, object]]:
        machine, chosen = self.started.machine, self.settings.evaluation
        # the files, which hold the model whole however it was sharded
        policy = load_policy(
            final_model(self.started.directory.path),
            dtype=weights_dtype(self.settings.model.bf16),
            device=machine.device,
        ).eval()
        prompts = first_tokens(self.tokenizer, self.held_out, chosen.sample_texts)
        longest = max(map(len, prompts))
        positions = decoder_for(policy).max_positions or longest + chosen.sample_tokens
        new_tokens = min(chosen.sample_tokens, positions - longest)
        engine = native_engine(policy, len(prompts), longest + new_tokens, machine.device, graphs=False)
        options = SamplingOptions(
            temperature=1.0, max_new_tokens=new_tokens, stop_token_ids=tuple(self.tokenizer.eos_ids)
        )
        keys = [[derive_key(self.settings.run.seed, "continued text", number)] for number in range(len(prompts))]
        completions = [group[0] for group in engine.generate(prompts, keys, options)]
        texts = self.tokenizer.decode_batch([*prompts, *(one.token_ids for one in completions)])
        return [
            {
                "prompt_id": f"text-{number}",
                "sample": 0,
                "prompt": texts[number],
                "response": texts[len(prompts) + number],
                "finish_reason": str(completion.finish_reason),
                "num_tokens": len(completion.token_ids),
            }
            for number, completion in enumerate(completions)
        ]


def first_tokens(tokenizer: HfTokenizer, held_out: TokenWindows | None, count: int) -> list[list[int]]:
    """Return the tokens that each text begins with: those of held-out windows, spread over all of them.

    Where there are fewer windows, or none, the other texts begin with the token that ends a document.
    """
    size = min(count, len(held_out)) if held_out is not None else 0
    found = [_start(held_out[number * len(held_out) // size]) for number in range(size)] if held_out is not None else []
    return found + [[tokenizer.eos_ids[0]]] * (count - len(found))


def _start(window: Sequence[TrainingSample]) -> list[int]:
    """Return the first tokens of the longest document in a window."""
    ids: tuple[int, ...] = max((sample.token_ids for sample in window), key=len)
    return list(ids[: max(1, min(_PROMPT_TOKENS, len(ids) // 2))])
