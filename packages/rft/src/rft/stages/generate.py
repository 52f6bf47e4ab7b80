"""Completions of prompts by a model, without a reward."""

from __future__ import annotations

from rft.build.constraint import constraint_of, within
from rft.build.engines import make_engine
from rft.build.images import tokenizer_with_images
from rft.build.prompt_data import given_prompts
from rft.build.shared_parts import sampling_options
from rft.hub.run_settings import with_model_directories
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import Machine
from rft.settings import GenerateSettings
from rft_core.keyed_random import derive_key
from rft_models.decode.fast_decoder import decoder_for
from rft_models.policy.load import load_policy
from rft_trainer.rollouts.collector import sample_responses
from rft_trainer.runs.step_report import gather_rows, rollout_row


def generate(settings: GenerateSettings, machine: Machine) -> list[dict[str, object]]:
    """Sample the completions of every prompt, each rank those of its share: one row each, prompt after prompt.

    Raises:
        OptionsError: no prompt or two sources of them, or one that is too long.
    """
    settings = with_model_directories(settings)
    tokenizer, drawn = tokenizer_with_images(settings.model, settings.images), settings.sampling
    prompts = given_prompts(settings.data, tokenizer, drawn.prompt_max_len, settings.images)
    trie = constraint_of(settings, tokenizer)
    policy = load_policy(
        settings.model.pretrain, dtype=weights_dtype(settings.model.bf16), device=machine.device
    ).eval()
    longest_prompt = max(len(prompt.token_ids) for prompt in prompts)
    response = drawn.generate_max_len
    # room for the longest prompt that is allowed, as in training
    if drawn.max_len is not None:
        response = min(response, drawn.max_len - drawn.prompt_max_len)
    # nothing is trained on the result, so a response is shortened where training would refuse
    response = min(response, decoder_for(policy).max_positions - longest_prompt)
    engine = make_engine(settings.engine, machine, policy, settings.model.pretrain, longest_prompt + response)
    engine = within(engine, trie, beams=drawn.num_beams > 0)
    samples = range(drawn.num_beams or settings.data.n_samples_per_prompt)
    # the number of a prompt in the data, not on this rank: a sample does not depend on the number of ranks
    own = range(machine.ranks.rank, len(prompts), machine.ranks.world_size)
    chosen = [prompts[i] for i in own]
    keys = [[derive_key(settings.output.seed, "sample", 0, i, j) for j in samples] for i in own]
    options = sampling_options(drawn, response, tokenizer.eos_ids)
    answers = sample_responses(engine, tokenizer, chosen, keys, options) if chosen else []
    return gather_rows(
        machine.collectives,
        [[rollout_row(prompt, rollout) for rollout in part] for prompt, part in zip(chosen, answers, strict=True)],
    )
