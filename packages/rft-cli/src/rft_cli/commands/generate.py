"""`rft-train generate`: answer prompts with a model."""

from __future__ import annotations

import json
from pathlib import Path

from rft.build.engines import make_engine
from rft.build.images import codec_with_images, given_images, row_images
from rft.build.prompt_data import as_prompts, renderer_for
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import open_machine
from rft_cli.commands.eval import words_of_run
from rft_cli.config.resolve import resolve
from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key
from rft_models.decode.fast_decoder import decoder_for
from rft_models.policy.load import load_policy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.prompts import PromptRow, prompts_from_rows
from rft_trainer.data.readers.formats import read_rows
from rft_trainer.records.rollouts import Prompt, Sampling
from rft_trainer.rollouts.collector import sample_responses
from rft_trainer.runs.step_report import rollout_row
from rft_trainer.settings.data import GenerateDataSettings
from rft_trainer.settings.images import GenerateImageSettings

_NO_IMAGES = GenerateImageSettings()


def run(argv: list[str]) -> int:
    """Resolve, answer, print or write."""
    words = words_of_run(Path(argv[0]), argv[1:], "generate") if argv and not argv[0].startswith("-") else argv
    settings = resolve("generate", words).settings
    with open_machine(settings.model.device) as machine:
        codec = codec_with_images(settings.model, settings.images)
        prompts = prompts_of(settings.data, codec, settings.sampling.prompt_max_len, settings.images)
        policy = load_policy(
            settings.model.pretrain, dtype=weights_dtype(settings.model.bf16), device=machine.device
        ).eval()
        longest_prompt = max(len(prompt.token_ids) for prompt in prompts)
        response = settings.sampling.generate_max_len
        if settings.sampling.max_len is not None:
            response = min(response, settings.sampling.max_len - settings.sampling.prompt_max_len)
        decoder = decoder_for(policy)
        response = min(response, decoder.max_positions - longest_prompt)
        engine = make_engine(settings.engine, machine, policy, settings.model.pretrain, longest_prompt + response)
        keys = [
            [derive_key(settings.output.seed, "sample", 0, i, j) for j in range(settings.data.n_samples_per_prompt)]
            for i in range(len(prompts))
        ]
        sampling = Sampling(
            temperature=settings.sampling.temperature,
            max_new_tokens=response,
            stop_token_ids=codec.eos_ids,
            top_p=settings.sampling.top_p,
            top_k=max(settings.sampling.top_k, 0),
            min_p=settings.sampling.min_p,
        )
        answers = sample_responses(engine, codec, prompts, keys, sampling)
    rows = [
        rollout_row(prompt, rollout) for prompt, rollouts in zip(prompts, answers, strict=True) for rollout in rollouts
    ]
    _write(rows, settings.output.output)
    return 0


def prompts_of(
    data: GenerateDataSettings,
    codec: HfTokenizer,
    prompt_max_len: int,
    images: GenerateImageSettings = _NO_IMAGES,
) -> list[Prompt]:
    """The one prompt that is given as text, or those of a file.

    Raises:
        OptionsError: both or neither are given, or a prompt has more than `prompt_max_len` tokens.
    """
    if bool(data.prompt) == bool(data.prompt_data):
        raise OptionsError(
            code="generate.one_source",
            what="both prompt and prompt_data are given" if data.prompt else "neither prompt nor prompt_data is given",
            where="--prompt, --prompt_data",
            why="the prompts come from one place: a text, or the rows of a file",
            do="--prompt 'your text'",
        )
    if data.prompt:
        rows = [PromptRow("prompt:0", data.prompt, None, None, None, "prompt", 0, given_images(images, data.prompt))]
    else:
        table = read_rows(data.prompt_data, split=data.prompt_split or None)
        column = row_images(images, 0).column
        rows = prompts_from_rows(table, source=Path(data.prompt_data).stem, input_key=data.input_key, images=column)
    rows = rows[: data.max_samples] if data.max_samples else rows
    rendered = [renderer_for(data, codec).render(row) for row in rows]
    too_long = [r for r in rendered if len(r.token_ids) > prompt_max_len]
    if too_long:
        raise OptionsError(
            code="generate.prompt_too_long",
            what=f"{too_long[0].prompt_id} has {len(too_long[0].token_ids)} tokens, prompt_max_len = {prompt_max_len}",
            where="--prompt_max_len",
            why="a prompt is used whole or not at all",
            do=f"--prompt_max_len {max(len(r.token_ids) for r in too_long)}",
        )
    return as_prompts(rendered)


def _write(rows: list[dict[str, object]], output: str) -> None:
    if output:
        Path(output).write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{len(rows)} completions written to {output}")
        return
    for row in rows:
        print(f"{row['prompt']}{row['response']}" + ("" if row["finish_reason"] == "stop" else " [cut at the limit]"))
