"""The engines of `rollout.py`, one a process: `python rollout_sides.py ENGINE DIRECTORY CASE`, a line a round."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_case import CASES, PROMPT_TOKENS, STOP_FREE, Case

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_models.decode.fast_decoder import decoder_for

Rollout = Callable[[int], list[int]]
"""A round's number -> how many tokens each sample got, prompt after prompt."""


def native(case: Case, directory: Path) -> Rollout:
    """Ours, in this process."""
    from rft_engine.native.engine import NativeEngine

    engine = NativeEngine(decoder_for(_policy(directory)), max_rows=case.prompts * case.samples, max_len=512)
    prompts, budgets = case.prompt_ids(), case.budgets()

    def rollout(number: int) -> list[int]:
        keys = [[(number << 32) + (p << 16) + s for s in range(case.samples)] for p in range(case.prompts)]
        found = engine.generate(
            prompts, keys, SamplingOptions(temperature=1.0, max_new_tokens=case.longest), budgets=budgets
        )
        return [len(completion.token_ids) for completions in found for completion in completions]

    return rollout


def hf(case: Case, directory: Path) -> Rollout:
    """transformers' `generate`: all samples in one batch, each row stopped at its length."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = torch.tensor(case.prompt_ids()).repeat_interleave(case.samples, 0)
    lengths = torch.tensor([budget for budgets in case.budgets() for budget in budgets])
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=case.longest, pad_token_id=STOP_FREE
    )

    class Ends(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return input_ids.shape[1] - PROMPT_TOKENS >= lengths

    @torch.inference_mode()
    def rollout(number: int) -> list[int]:
        torch.manual_seed(number)
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([Ends()]),
        )
        assert found.shape[1] == PROMPT_TOKENS + case.longest
        return lengths.tolist()

    return rollout


def hf_continuous(case: Case, directory: Path) -> Rollout:
    """transformers' continuous batching, `generate_batch`; one length for all of a call, so tails go in two calls.

    Its cache has room for every sample at its longest, as ours; left to itself it takes most of the machine's memory.
    """
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    prompts = [prompt for prompt in case.prompt_ids() for _ in range(case.samples)]
    lengths = [budget for budgets in case.budgets() for budget in budgets]
    page = 16
    num_blocks = len(prompts) * -(-(PROMPT_TOKENS + case.longest) // page)
    batching = ContinuousBatchingConfig(page_size=page, num_blocks=num_blocks, max_batch_tokens=len(prompts))

    @torch.no_grad()  # it computes in a thread of its own, which an inference mode of this one does not reach
    def rollout(number: int) -> list[int]:
        torch.manual_seed(number)
        made = [0] * len(prompts)
        for length in sorted(set(lengths)):
            chosen = [place for place, budget in enumerate(lengths) if budget == length]
            settings = GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length, eos_token_id=-1
            )
            found = model.generate_batch(
                [prompts[place] for place in chosen],
                generation_config=settings,
                continuous_batching_config=batching,
            )
            errors = {output.error for output in found.values()} - {None}
            if errors:
                raise RuntimeError(f"generate_batch: {sorted(errors)[0]}")
            for place, output in zip(chosen, found.values(), strict=True):
                made[place] = len(output.generated_tokens)
        return made

    return rollout


def vllm(case: Case, directory: Path) -> Rollout:
    """vLLM's CPU build, in this process; prefix caching reads a prompt once for its samples."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    import importlib

    library: Any = importlib.import_module("vllm")
    rows = case.prompts * case.samples
    engine = library.LLM(
        str(directory),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=rows,
        enforce_eager=True,
        disable_log_stats=True,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in case.prompt_ids() for _ in range(case.samples)]
    lengths = [budget for budgets in case.budgets() for budget in budgets]

    def rollout(number: int) -> list[int]:
        # without a seed of each sample: this build fails with one ("CPU Generator does not use offset")
        options = [
            library.SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0)
            for n in lengths
        ]
        engine.reset_prefix_cache()
        outputs = engine.generate(prompts, options, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return rollout


ENGINES: dict[str, Callable[[Case, Path], Rollout]] = {
    "native": native,
    "hf": hf,
    "hf_continuous": hf_continuous,
    "vllm": vllm,
}


def _policy(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from rft_models.policy.load import make_policy

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return make_policy(model, None, packed=True)


def _peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def main() -> None:
    """Make the engine, then one rollout for every line on stdin; answers are lines of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, directory, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    case = CASES[number]
    expected = [budget for budgets in case.budgets() for budget in budgets]
    rollout = ENGINES[name](case, directory)
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        cpu, start = time.process_time(), time.perf_counter()
        made = rollout(int(line))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        assert made == expected, f"{name} made {sum(made)} tokens, {sum(expected)} were asked for"
        answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": sum(made), "peak_mib": _peak_mib()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
