"""The in-process engine on a GPU: tokens a second beside transformers' generate, and what an update of its copy costs.

    python benchmarks/rollout_gpu.py [--device cuda] [--dtype bfloat16] [--rounds 3] [--small]

Qwen2 with random weights in the shape of its 0.5 B model, 64 prompts of 32 tokens x 4 samples of 128 tokens. The gate:
transformers gives the first tokens of every sample the log-probabilities that the engine gives. `--small` is a shape
that a CPU does in seconds, to try the program.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rollout_case import PROMPT_TOKENS
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.completions import Completion
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.native.engine import NativeEngine
from rft_models.attention.hf_interface import IMPLEMENTATION
from rft_models.decode.fast_decoder import decoder_for
from rft_models.decode.weight_copy import GenerationCopy
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy

PROMPTS, SAMPLES, TOKENS = 64, 4, 128
HALF_BILLION = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
HALF_BILLION |= {"num_attention_heads": 14, "num_key_value_heads": 2}
SMALL = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def make_model(shape: dict[str, int], device: torch.device, dtype: torch.dtype) -> CausalPolicy:
    """Random weights, tied, ready to decode."""
    config = Qwen2Config(**shape, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=None)
    torch.manual_seed(0)
    with device:
        model = Qwen2ForCausalLM(config)
    return make_policy(model.to(dtype).eval(), None, packed=True)


def timed(work: Callable[[int], object], rounds: int, device: torch.device) -> float:
    """Median seconds after one round that does not count."""
    seconds = []
    for number in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


@torch.inference_mode()
def require_equal(policy: CausalPolicy, prompts: torch.Tensor, found: list[list[Completion]]) -> None:
    """The gate, before anything is timed."""
    policy.model.set_attn_implementation("sdpa")
    logits = policy.model(input_ids=prompts, logits_to_keep=1).logits[:, -1].float()
    policy.model.set_attn_implementation(IMPLEMENTATION)
    expected = logits.log_softmax(-1)
    gap = max(
        abs(float(expected[row, one.token_ids[0]]) - one.logprobs[0]) for row, own in enumerate(found) for one in own
    )
    limit = 0.3 if policy.dtype == torch.bfloat16 else 1e-3
    if gap > limit:
        raise SystemExit(f"the engine's log-probabilities are {gap:.3g} nats off, at most {limit} are rounding")


def main() -> None:
    """Both engines, then the update."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    policy = make_model(SMALL if arguments.small else HALF_BILLION, device, dtype)
    vocabulary, number = policy.head.weight.shape[0], policy.num_parameters
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(1, vocabulary, (PROMPTS, PROMPT_TOKENS), generator=generator)
    engine = NativeEngine(decoder_for(policy), max_rows=PROMPTS * SAMPLES, max_len=256, device=device)
    keys = [[(p << 16) + s for s in range(SAMPLES)] for p in range(PROMPTS)]
    eager = NativeEngine(decoder_for(policy, graphs=False), max_rows=PROMPTS * SAMPLES, max_len=256, device=device)
    rows = prompts.repeat_interleave(SAMPLES, 0).to(device)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=0
    )

    def native(round_number: int) -> list[list[Completion]]:
        own = [[key + (round_number << 40) for key in row] for row in keys]
        return engine.generate(prompts.tolist(), own, SamplingOptions(temperature=1.0, max_new_tokens=TOKENS))

    def without_graphs(round_number: int) -> list[list[Completion]]:
        own = [[key + (round_number << 40) for key in row] for row in keys]
        return eager.generate(prompts.tolist(), own, SamplingOptions(temperature=1.0, max_new_tokens=TOKENS))

    @torch.inference_mode()
    def transformers(round_number: int) -> object:
        torch.manual_seed(round_number)
        return policy.model.generate(input_ids=rows, attention_mask=torch.ones_like(rows), generation_config=settings)

    require_equal(policy, prompts.to(device), native(0))
    tokens = PROMPTS * SAMPLES * TOKENS
    ours = timed(native, arguments.rounds, device)
    plain = timed(without_graphs, arguments.rounds, device)
    policy.model.set_attn_implementation("sdpa")
    theirs = timed(transformers, arguments.rounds, device)
    shape = f"{PROMPTS * SAMPLES} sequences of {TOKENS} tokens"
    print(f"{number / 1e6:.3g} M parameters, {arguments.dtype}, {device}, {shape}")
    print(f"  native {tokens / ours:12,.0f} tokens/s   {ours:.2f} s")
    print(f"  native, without CUDA graphs {tokens / plain:12,.0f} tokens/s   {plain:.2f} s")
    print(f"  hf     {tokens / theirs:12,.0f} tokens/s   {theirs:.2f} s")
    copied = NativeEngineOnCopy(GenerationCopy(policy), policy.named_parameters, max_rows=8, max_len=64, device=device)
    copied.refresh()
    update = timed(lambda version: copied.load_weights(version + 1), arguments.rounds, device)
    print(f"  an update of the engine's own copy, verified: {1e3 * update:.0f} ms")
    print(f"worst_ratio={theirs / ours:.2f} against hf at {number / 1e6:.3g} M parameters")


if __name__ == "__main__":
    main()
