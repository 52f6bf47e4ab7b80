"""Prompts as token ids and demonstrations as samples, from data settings."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from rft.build.images import ImageReading, given_images, row_images
from rft.hub.download import ASIDE
from rft.hub.hub_names import dataset_name
from rft.hub.sources import located_sources
from rft.reward_names import needs_labels
from rft.settings import EvalSettings, RlSettings
from rft.tokenizing.texts import all_too_long, held_out_note
from rft_core.errors import DataError, OptionsError, Problem
from rft_core.keyed_random import derive_key, permutation
from rft_core.nearest_names import nearest_names
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.columns import MissingColumnError
from rft_trainer.data.images import ImageColumn
from rft_trainer.data.media_cache import MediaProcessor, MediaStore
from rft_trainer.data.mixture import Mixture
from rft_trainer.data.prefetch import Prefetcher
from rft_trainer.data.prompts import ROLES, PromptRow, content_hash
from rft_trainer.data.rendering import PromptRenderer, RenderedPrompt
from rft_trainer.data.sources import LoadedPrompts, SourceSpec, load_prompts, source_sizes
from rft_trainer.data.task_rows import is_task
from rft_trainer.data.turn_masks import ASSISTANT_TURNS, TrainedTurns
from rft_trainer.records.rollouts import Prompt, TrainingSample
from rft_trainer.settings.data import (
    DataSettings,
    GenerateDataSettings,
    PromptTextSettings,
    SftDataSettings,
    TrainRowsSettings,
)
from rft_trainer.settings.images import GenerateImageSettings

_LOG = logging.getLogger(__name__)
Rows = TypeVar("Rows")

_CHUNK = 256
_NO_IMAGES = ImageReading()
_NO_GIVEN_IMAGES = GenerateImageSettings()


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """Rendered rows that fit, the rows left out, and the mixture by which an epoch visits them."""

    rendered: tuple[RenderedPrompt, ...]
    left_out: tuple[tuple[str, int], ...]
    """(prompt id, tokens) of rows that are too long."""
    limit: int
    loaded: LoadedPrompts
    mixture: Mixture
    data_hash: str

    def mixture_of(self, prompt_ids: Sequence[str]) -> Mixture:
        """Return the mixture by which an epoch visits these rows, in their order (source after source)."""
        sources = [prompt_id.rpartition(":")[0] for prompt_id in prompt_ids]
        sizes = [sources.count(spec.name) for spec in self.loaded.specs]
        return Mixture(sizes, self.mixture.probabilities)

    def prompts(self) -> list[Prompt]:
        """Return the prompts in the RL loop's form."""
        return as_prompts(self.rendered)


def as_prompts(rendered: Sequence[RenderedPrompt]) -> list[Prompt]:
    """Return the prompts in the form of the RL loop and the evaluator."""
    return [
        Prompt(r.prompt_id, r.token_ids, r.text, r.label, r.source, r.media, r.messages, r.columns) for r in rendered
    ]


def renderer_for(text: PromptTextSettings, tokenizer: HfTokenizer, turns: TrainedTurns | None = None) -> PromptRenderer:
    """The settings' way from a row to text; plain text gets the tokenizer's own special tokens."""
    return PromptRenderer(
        tokenizer,
        input_template=text.input_template or None,
        system_prompt=text.system_prompt or None,
        apply_chat_template=text.apply_chat_template,
        add_special_tokens=not text.apply_chat_template,
        media=MediaStore(tokenizer) if isinstance(tokenizer, MediaProcessor) else None,
        turns=turns or ASSISTANT_TURNS,
    )


def trained_turns(data: SftDataSettings) -> TrainedTurns:
    """Return the turns of whole conversations that are learned.

    Raises:
        OptionsError: a role that messages do not have.
    """
    roles = tuple(dict.fromkeys(role.strip() for role in data.roles_to_train.split(",") if role.strip()))
    unknown = [role for role in roles if role not in ROLES]
    meant = nearest_names(unknown[0], ROLES, count=1) if unknown else []
    if unknown or not roles:
        raise OptionsError(
            code="data.roles_to_train",
            what=f"roles_to_train = {data.roles_to_train!r}",
            where="--roles_to_train",
            why=f"a role is one of {', '.join(ROLES)}; several are joined by commas",
            do=f"--roles_to_train {meant[0] if meant else 'assistant'}",
        )
    return TrainedTurns(roles, last_only=data.train_on_turns == "last")


def read_training(
    rows: TrainRowsSettings,
    text: PromptTextSettings,
    tokenizer: HfTokenizer,
    *,
    label_key: str | None,
    output_key: str | None,
    prompt_max_len: int,
    images: ImageReading = _NO_IMAGES,
    whole_rows: bool = False,
    turns: TrainedTurns | None = None,
    limit_flag: str = "--prompt_max_len",
    weight_key: str = "",
) -> PreparedPrompts:
    """Read and render the rows to train on; with `whole_rows` they keep all columns, for code of the user.

    `turns`: of whole conversations, which are read as such then; None = the last reply is what a prompt is asked for.
    """
    if not rows.prompt_data:
        raise OptionsError(
            code="data.no_prompt_data",
            what="prompt_data is empty",
            where="--prompt_data",
            why="training needs rows: a .jsonl, .json, .csv or .parquet file, or a directory of a data set",
            do="--prompt_data train.jsonl",
        )
    probabilities = rows.prompt_data_probs or None
    specs = located_sources(rows.prompt_data, probabilities, split=rows.prompt_split, flag="--prompt_data")
    loaded = load_prompts(
        specs,
        split=rows.prompt_split or None,
        input_key=text.input_key,
        label_key=label_key,
        output_key=output_key,
        images=images.column,
        whole_rows=whole_rows,
        conversations=turns is not None,
        weight_key=weight_key or None,
    )
    _tell(loaded)
    chosen = first_rows(loaded.prompts, rows.max_samples) if rows.max_samples else list(loaded.prompts)
    # after the selection, so that images are exchanged among the rows that are used
    chosen = images.arranged(chosen)
    kept, left_out = render_rows(
        chosen,
        renderer_for(text, tokenizer, turns),
        prompt_max_len,
        rows.num_workers,
        rows.prefetch_factor,
        limit_flag,
    )
    kept_ids = {r.prompt_id for r in kept}
    used = [row for row in chosen if row.prompt_id in kept_ids]
    known = [spec.probability for spec in specs if spec.probability is not None]
    mixture = Mixture(source_sizes(used, specs), known if len(known) == len(specs) else None)
    # the hash is of the rows in use: a ledger counts in them, and continues with no others
    return PreparedPrompts(tuple(kept), tuple(left_out), prompt_max_len, loaded, mixture, content_hash(used))


def with_label_column(read: Callable[[str], Rows], settings: RlSettings | EvalSettings) -> tuple[Rows, str]:
    """Return what `read` gives for the label column, and that column; "" where there is none and none is needed.

    A reward function compares with a label. Reward models, servers and judges score without one, and then rows
    that all lack the column are read without labels.

    Raises:
        MissingColumnError: a reward function compares with the column, or some of the rows have it.
    """
    label_key = settings.data.label_key
    try:
        return read(label_key), label_key
    except MissingColumnError as error:
        if needs_labels(settings) or error.flag != "--label_key" or not error.in_no_row:
            raise
    return read(""), ""


def first_rows(prompts: Sequence[PromptRow], limit: int) -> list[PromptRow]:
    """`limit` rows, from each source in proportion to its size, the first ones of each; global order is kept."""
    sizes = Counter(prompt.source for prompt in prompts)
    # by the quantile of a row within its source: the smallest are the first rows of each, in proportion
    indices = sorted(range(len(prompts)), key=lambda i: ((prompts[i].index + 0.5) / sizes[prompts[i].source], i))
    return [prompts[i] for i in sorted(indices[:limit])]


def held_out_text(data: DataSettings | SftDataSettings) -> PromptTextSettings:
    """Return how the prompt of a held-out row is rendered: as of a training row, from a column of its own if given."""
    return replace(data, input_key=data.eval_input_key) if data.eval_input_key else data


_HELD_OUT_FLAGS = {
    f"--{training}": f"--{held_out}"
    for training, held_out in (
        ("prompt_data", "eval_data"),
        ("prompt_split", "eval_split"),
        ("input_key", "eval_input_key"),
        ("label_key", "eval_label_key"),
        ("output_key", "eval_output_key"),
    )
}


def held_out_settings() -> AbstractContextManager[None]:
    """Let errors of reading, which name the settings of training data, name those of held-out data."""
    return renamed_settings(_HELD_OUT_FLAGS)


@contextmanager
def renamed_settings(names: Mapping[str, str]) -> Generator[None]:
    """Let errors of reading, which name the flags of training data, name those of other rows: `names` by old name."""
    try:
        yield
    except MissingColumnError as error:
        missing = MissingColumnError(**_renamed(error.problem, names))
        missing.flag, missing.in_no_row = error.flag, error.in_no_row
        raise missing from error
    except (DataError, OptionsError) as error:
        raise type(error)(**_renamed(error.problem, names)) from error


def _renamed(problem: Problem, names: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a problem with other flags in the place of those of training data."""
    return {
        name: re.sub(r"--[a-z_]+", lambda flag: names.get(flag[0], flag[0]), text)
        for name, text in asdict(problem).items()
    }


def read_held_out(
    path: str,
    split: str,
    limit: int,
    text: PromptTextSettings,
    tokenizer: HfTokenizer,
    *,
    label_key: str | None,
    output_key: str | None,
    prompt_max_len: int,
    images: ImageReading = _NO_IMAGES,
    whole_rows: bool = False,
    turns: TrainedTurns | None = None,
    limit_flag: str = "--prompt_max_len",
) -> tuple[RenderedPrompt, ...]:
    """The first `limit` held-out rows of each set (0 = all).

    One that does not fit is an error, since the evaluation would be another without it.
    """
    with renamed_settings(_HELD_OUT_FLAGS):
        loaded = load_prompts(
            located_sources(path, split=split, flag="--eval_data", labelled=True),
            split=split or None,
            input_key=text.input_key,
            label_key=label_key,
            output_key=output_key,
            images=images.column,
            whole_rows=whole_rows,
            conversations=turns is not None,
        )
    _tell(loaded)
    chosen = images.arranged([prompt for prompt in loaded.prompts if not limit or prompt.index < limit])
    kept, left_out = render_rows(chosen, renderer_for(text, tokenizer, turns), prompt_max_len, 0, 1, limit_flag)
    if left_out:
        name, length = max(left_out, key=lambda item: item[1])
        raise DataError(
            code="eval.prompt_too_long",
            what=f"{len(left_out)} of {len(chosen)} held-out prompts are longer than {prompt_max_len} tokens, "
            f"{name} has {length}",
            where=limit_flag,
            why="an evaluation that leaves rows out would not be the evaluation that was asked for",
            do=f"{limit_flag} {length}",
        )
    return tuple(kept)


def given_prompts(
    data: GenerateDataSettings,
    tokenizer: HfTokenizer,
    prompt_max_len: int,
    images: GenerateImageSettings = _NO_GIVEN_IMAGES,
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
        rows = _given_rows(data, row_images(images, 0).column)
    rows = rows[: data.max_samples] if data.max_samples else rows
    rendered = [renderer_for(data, tokenizer).render(row) for row in rows]
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


def _given_rows(data: GenerateDataSettings, column: ImageColumn | None) -> list[PromptRow]:
    """Read the rows of one source; its path is not divided at commas."""
    if dataset_name(data.prompt_data) is not None:
        specs = located_sources(data.prompt_data, split=data.prompt_split, flag="--prompt_data")
    else:
        name = data.prompt_data.rstrip(":") if is_task(data.prompt_data) else Path(data.prompt_data).stem
        specs = (SourceSpec(data.prompt_data, name, None),)
    loaded = load_prompts(specs, split=data.prompt_split or None, input_key=data.input_key, images=column)
    _tell(loaded)
    return list(loaded.prompts)


def _tell(loaded: LoadedPrompts) -> None:
    """Log which columns were taken, where the settings do not name them."""
    for note in loaded.notes:
        _LOG.info("%s", note, extra=ASIDE)


def hold_out(
    samples: Sequence[TrainingSample], count: int, seed: int
) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """(those to train on, `count` others chosen by the seed), both in their order."""
    chosen, kept = held_out_indices(len(samples), count, seed)
    return [samples[index] for index in kept], [samples[index] for index in chosen]


def held_out_indices(num: int, count: int, seed: int) -> tuple[list[int], Iterator[int]]:
    """Return (indices of `count` of `num` rows chosen by the seed, those of the others), both ascending."""
    if count >= num:
        raise OptionsError(
            code="data.held_out_rows",
            what=f"held_out_rows = {count}, and there are {num} training rows",
            where="--held_out_rows",
            why="at least one row must be left to train on",
            do=f"--held_out_rows {max(1, num // 20)}" if num > 1 else "--held_out_rows 0",
        )
    chosen = {int(index) for index in permutation(derive_key(seed, "held_out"), num)[:count]}
    return sorted(chosen), (index for index in range(num) if index not in chosen)


def render_rows(
    rows: Sequence[PromptRow],
    renderer: PromptRenderer,
    prompt_max_len: int,
    num_workers: int,
    prefetch_factor: int,
    flag: str,
) -> tuple[list[RenderedPrompt], list[tuple[str, int]]]:
    """Render all rows, `num_workers` threads ahead; what is longer than the limit is left out by name."""
    chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
    kept: list[RenderedPrompt] = []
    left_out: list[tuple[str, int]] = []
    with Prefetcher(
        chunks,
        renderer.render_all,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
    ) as rendered:
        for chunk in rendered:
            for row in chunk:
                if len(row.token_ids) > prompt_max_len:
                    left_out.append((row.prompt_id, len(row.token_ids)))
                else:
                    kept.append(row)
    if not kept:
        raise all_too_long(left_out, prompt_max_len, flag)
    return kept, left_out


def demonstrations(
    rendered: Sequence[RenderedPrompt], tokenizer: HfTokenizer, max_len: int
) -> tuple[list[TrainingSample], list[tuple[str, int]]]:
    """Prompt, output and end token as one sample each; what is longer than `max_len` is left out by name.

    A row of weight 0 is left out too: it has no part in the loss or in its denominator.
    """
    samples: list[TrainingSample] = []
    left_out: list[tuple[str, int]] = []
    for row in rendered:
        sample = demonstration(row, tokenizer)
        if sample.num_tokens > max_len:
            left_out.append((row.prompt_id, sample.num_tokens))
        elif sample.weight > 0:
            samples.append(sample)
    if not samples:
        raise all_left_out(left_out, len(rendered) - len(left_out), max_len)
    return samples, left_out


def all_left_out(too_long: Sequence[tuple[str, int]], weightless: int, max_len: int) -> DataError:
    """Return the error of demonstrations of which none is left, for their lengths or for their weights of 0."""
    if weightless:
        return DataError(
            code="data.all_weigh_nothing",
            what=f"the weights of all {weightless} rows that fit are 0",
            where="--weight_key",
            why="a row of weight 0 is left out, and here all would be",
            do="leave --weight_key out",
        )
    longest = max((length for _, length in too_long), default=0)
    return DataError(
        code="data.all_too_long",
        what=f"0 of {len(too_long)} demonstrations have at most {max_len} tokens (the longest has {longest})",
        where="--max_len",
        why="a demonstration is used whole or left out, and here all would be left out",
        do=f"--max_len {longest}",
    )


def demonstration(row: RenderedPrompt, tokenizer: HfTokenizer) -> TrainingSample:
    """Return the sample of a row: a whole conversation, or prompt, output and end token."""
    if row.learned:
        return _conversation_sample(row)
    # sampling stops at any of the end tokens; one of them is enough to learn
    end = tokenizer.eos_ids[:1]
    assert row.output is not None, "demonstrations are read with an output key"
    # the output is encoded apart, so that the prompt has the tokens that it has when responses are sampled
    tokens = (*row.token_ids, *tokenizer.encode(row.output), *end)
    return TrainingSample(row.prompt_id, tokens, len(row.token_ids), 0.0, media=row.media, weight=row.weight)


def _conversation_sample(row: RenderedPrompt) -> TrainingSample:
    """A whole conversation: what stands before its first learned token is the prompt."""
    first = row.learned.index(True)
    mask = row.learned[first:]
    return TrainingSample(
        row.prompt_id,
        row.token_ids,
        first,
        0.0,
        media=row.media,
        loss_mask=() if all(mask) else mask,
        weight=row.weight,
    )


def weight_notes(rendered: Sequence[RenderedPrompt]) -> tuple[str, ...]:
    """Return what a person should know of the weights of rows."""
    without = sum(row.weight == 0 for row in rendered)
    return (f"{without:,} of {len(rendered):,} rows have weight 0 and are left out",) if without else ()


def data_notes(
    text: PromptTextSettings,
    tokenizer: HfTokenizer,
    training: Sequence[RenderedPrompt],
    held_out: Sequence[RenderedPrompt] = (),
    *,
    unused: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return what a person should know of prompts, tokenizer and held-out rows before training on them.

    `unused` are sentences on columns that nothing reads.
    """
    notes: list[str] = []
    if tokenizer.has_chat_template and not text.apply_chat_template:
        notes.append("the model has a chat template, and prompts are given without it; --apply_chat_template uses it")
    if not tokenizer.eos_ids:
        notes.append("the model has no end token: every response goes on to the limit")
    # rows with images are not compared: the same text asks about another picture
    known = {row.text for row in training if row.media is None}
    shared = sum(row.media is None and row.text in known for row in held_out)
    return (*notes, *held_out_note(shared, len(held_out)), *unused)
