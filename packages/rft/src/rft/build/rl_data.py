"""Data of an RL run: prompts, lengths, and the number of its steps and updates."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from rft.build.algorithm import algorithm_record
from rft.build.images import ImageReading, refuse_beside_images, row_images
from rft.build.prompt_data import (
    PreparedPrompts,
    as_prompts,
    data_notes,
    demonstrations,
    held_out_text,
    read_held_out,
    read_training,
    renamed_settings,
    with_label_column,
)
from rft.build.reward_parts import unit_test_notes
from rft.reward_names import needs_labels, reads_columns
from rft.settings import EvalSettings, RlSettings
from rft.tokenizing.row_store import wants_store
from rft.tokenizing.stored_prompts import StoredPromptRows, open_prompts
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_core.errors import DataError, OptionsError
from rft_dist.strategies.registry import run_dims
from rft_models.loading.context_length import model_facts
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.batches.batch_plan import BatchPlan, BatchSizes, plan_batches
from rft_trainer.data.images import ImageColumn
from rft_trainer.data.mixture import Mixture
from rft_trainer.data.rendering import RenderedPrompt
from rft_trainer.evaluation.task_metrics import TaskMetrics
from rft_trainer.loops.rl import StepConfig
from rft_trainer.records.rollouts import Prompt, TrainingSample
from rft_trainer.rewards.routes import RoutedRow, require_routes
from rft_trainer.settings.data import DataSettings, PromptTextSettings, TrainRowsSettings
from rft_trainer.settings.images import RowImageSettings


def response_limits(settings: RlSettings | EvalSettings, longest_prompt: int) -> tuple[int, int]:
    """(tokens of the longest response, tokens of prompt plus response): `max_len` lowers the first where given.

    It leaves room for the longest prompt that is allowed, not for the longest that is there, so that a
    run and a later evaluation on other rows give responses the same room.

    Raises:
        OptionsError: the model has fewer positions.
    """
    limit = settings.sampling.generate_max_len
    if settings.sampling.max_len is not None:
        limit = min(limit, settings.sampling.max_len - settings.sampling.prompt_max_len)
    positions = model_facts(settings.model.pretrain).max_positions
    if longest_prompt + limit > positions:
        raise OptionsError(
            code="length.beyond_model",
            what=f"longest prompt {longest_prompt} + longest response {limit:,} = {longest_prompt + limit:,} tokens, "
            f"the model has {positions:,} positions",
            where="--generate_max_len",
            why="a prompt and its response share the positions of the model",
            do=f"--generate_max_len {positions - longest_prompt}"
            if longest_prompt < positions
            else f"--prompt_max_len {positions // 2}",
        )
    return limit, longest_prompt + limit


_PRETRAINING_FLAGS = {
    "--prompt_data": "--pretrain_data",
    "--prompt_data_probs": "--pretrain_data_probs",
    "--prompt_split": "--pretrain_split",
    "--input_key": "--pretrain_input_key",
    "--output_key": "--pretrain_output_key",
    "--prompt_max_len": "--max_len",
}


@dataclass(frozen=True, slots=True)
class PretrainingData:
    """Rows of the pre-training term."""

    samples: list[TrainingSample]
    left_out: list[tuple[str, int]]
    """(id, tokens) of rows that are too long."""
    mixture: Mixture
    data_hash: str
    num_rows: int
    """Rows of an update."""

    def line(self, coefficient: float) -> str:
        """Say in one line what is added to every update."""
        left = f"; {len(self.left_out):,} rows are too long and left out" if self.left_out else ""
        tokens = sum(sample.num_loss_tokens for sample in self.samples)
        return (
            f"pre-training: {coefficient:g} x mean loss of {self.num_rows:,} rows an update, "
            f"of {len(self.samples):,} with {tokens:,} tokens{left}"
        )


@dataclass(frozen=True, slots=True)
class RlData:
    """Training and held-out prompts of an RL run, its batch plan and step counts."""

    training: PreparedPrompts | None
    """The rendered rows; None where they are in a store."""
    stored: StoredPromptRows | None
    """The store of the training prompts, where they are in one."""
    prompts: Sequence[Prompt]
    mixture: Mixture
    data_hash: str
    """Of the training prompts."""
    held_out: list[Prompt]
    plan: BatchPlan
    num_steps: int
    num_updates: int
    longest_prompt: int
    metrics: TaskMetrics | None = None
    """What every evaluation has beside accuracy and reward."""
    notes: tuple[str, ...] = ()
    """What a person should know of the data before training on them."""
    pretraining: PretrainingData | None = None
    """Rows of the pre-training term."""

    def all_prompts(self) -> Sequence[Prompt]:
        """Return the training prompts and behind them the held-out ones; stored ones stay where they are."""
        if self.stored:
            return self.stored.prompts.followed_by(self.held_out)
        return [*self.prompts, *self.held_out]


@dataclass(frozen=True, slots=True)
class _TrainingPrompts:
    """Training prompts, in memory or in a store."""

    prepared: PreparedPrompts | None
    stored: StoredPromptRows | None
    label_key: str

    def prompts(self) -> Sequence[Prompt]:
        return self.stored.prompts if self.stored else self.in_memory().prompts()

    def in_memory(self) -> PreparedPrompts:
        assert self.prepared is not None, "the prompts are in a store"
        return self.prepared

    def mixture(self) -> Mixture:
        return self.stored.stored.mixture(()) if self.stored else self.in_memory().mixture

    def data_hash(self) -> str:
        return self.stored.stored.data_hash if self.stored else self.in_memory().data_hash

    def rows(self) -> Iterable[RoutedRow]:
        return self.stored.rows() if self.stored else self.in_memory().rendered

    def notes(self, data: DataSettings, tokenizer: HfTokenizer, held_out: Sequence[RenderedPrompt]) -> tuple[str, ...]:
        if self.stored:
            return data_notes(data, tokenizer, ()) + self.stored.notes_on([row.text for row in held_out])
        found = self.in_memory()
        return data_notes(data, tokenizer, found.rendered, held_out, unused=found.loaded.unused)


def _training_prompts(settings: RlSettings, tokenizer: HfTokenizer, images: ImageReading) -> _TrainingPrompts:
    """Read and render the rows to train on, or open their store."""
    data, limit, whole_rows = settings.data, settings.sampling.prompt_max_len, reads_columns(settings)
    reason = "the tools of an environment are part of the prompts" if settings.conversation.environment else ""
    if wants_store(data, tokenizer, images_key=settings.images.images_key, reason=reason):
        stored = open_prompts(
            data, tokenizer, max_len=limit, whole_rows=whole_rows, needs_labels=needs_labels(settings)
        )
        return _TrainingPrompts(None, stored, stored.label_key)
    read = partial(
        read_training,
        data,
        data,
        tokenizer,
        output_key=None,
        prompt_max_len=limit,
        images=images,
        whole_rows=whole_rows,
    )
    prepared, label_key = with_label_column(lambda key: read(label_key=key), settings)
    return _TrainingPrompts(prepared, None, label_key)


def rl_data(settings: RlSettings, tokenizer: HfTokenizer, world_size: int) -> RlData:
    """Read, render and count; needs a tokenizer and no weights. `world_size` counts all ranks."""
    data, batch = settings.data, settings.batch
    advantage = algorithm_record(settings).advantage
    critic = settings.critic.critic_pretrain if advantage.needs_values else ""
    refuse_beside_images(settings.images, settings.strategy, settings.model, tokenizer, critic=critic)
    images = row_images(settings.images, settings.run.seed)
    training = _training_prompts(settings, tokenizer, images)
    rendered: Sequence[RenderedPrompt] = ()
    if data.eval_data:
        rendered = read_held_out(
            data.eval_data,
            data.eval_split,
            data.max_eval_samples,
            held_out_text(data),
            tokenizer,
            label_key=data.eval_label_key or training.label_key,
            output_key=None,
            prompt_max_len=settings.sampling.prompt_max_len,
            images=images,
            whole_rows=reads_columns(settings),
        )
    require_routes(settings.reward, chain(training.rows(), rendered))
    held_out = as_prompts(rendered) if rendered else []
    prompts = training.prompts()
    sizes = BatchSizes(
        rollout_batch_size=batch.rollout_batch_size,
        n_samples_per_prompt=batch.n_samples_per_prompt,
        train_batch_size=batch.train_batch_size,
        micro_train_batch_size=batch.micro_train_batch_size,
        micro_rollout_batch_size=batch.micro_rollout_batch_size,
        max_epochs=batch.max_epochs,
        num_episodes=batch.num_episodes,
        # ranks that compute a sample together count once
        world_size=run_dims(settings.strategy, world_size).dp_size,
        group_estimator=advantage.compares_groups,
    )
    plan = plan_batches(len(prompts), sizes)
    steps_an_episode = -(-plan.rollouts_per_episode // plan.rollouts_per_update)
    num_steps, num_updates = steps_an_episode * batch.num_episodes, plan.total_steps
    if batch.max_steps and batch.max_steps < num_steps:
        num_steps = batch.max_steps
        # a run cut by max_steps makes fewer updates, and its learning-rate schedule ends with it
        num_updates = min(num_updates, num_steps * len(plan.cut(plan.collection_size)) * batch.max_epochs)
    # held-out prompts too: one engine serves training and evaluation
    # the manifests of a store say it
    lengths = [training.stored.longest] if training.stored else [len(prompt.token_ids) for prompt in prompts]
    longest = max((*lengths, *(len(prompt.token_ids) for prompt in held_out)))
    metrics = TaskMetrics.of(data.eval_metrics)
    notes = training.notes(data, tokenizer, rendered)
    notes += unit_test_notes(settings, prompts)
    mixed = pretraining_data(settings, tokenizer)
    return RlData(
        training.prepared,
        training.stored,
        prompts,
        training.mixture(),
        training.data_hash(),
        held_out,
        plan,
        num_steps,
        num_updates,
        longest,
        metrics,
        notes,
        mixed,
    )


def step_rules(settings: RlSettings, data: RlData, record: PolicyAlgorithm) -> StepConfig:
    """The numbers of one training step."""
    return StepConfig(
        prompts_per_rollout=settings.batch.rollout_batch_size,
        rollouts_per_step=data.plan.rollouts_per_update,
        train_batch_size=settings.batch.train_batch_size,
        epochs_per_step=settings.batch.max_epochs,
        # a sample of advantage 0 has a gradient where the loss holds another term
        skip_zero_advantage=not (record.has_other_terms or settings.model.aux_loss_coef),
        filter_groups=settings.algorithm.filter_groups or record.dynamic_sampling,
        refill_rounds=settings.algorithm.dynamic_sampling_rounds if record.dynamic_sampling else 0,
        smallest_group=2 if record.advantage.compares_groups else 1,
        needs_baseline=record.advantage.needs_greedy,
        frozen_steps=max(settings.critic.freezing_actor_steps, 0) if record.advantage.needs_values else 0,
        max_steps=settings.batch.max_steps,
        eval_every=_eval_every(settings.evaluation.eval_steps, data),
        max_refused_in_a_row=settings.run.max_refused_steps,
        max_unscored_share=settings.run.max_unscored_share,
        max_staleness=settings.async_rollouts.max_staleness,
    )


def _eval_every(eval_steps: int, data: RlData) -> int:
    steps_an_episode = -(-data.plan.rollouts_per_episode // data.plan.rollouts_per_update)
    return steps_an_episode if eval_steps < 0 else eval_steps


def pretraining_data(settings: RlSettings, tokenizer: HfTokenizer) -> PretrainingData | None:
    """Read and render the rows; None without any. They are cut like no prompt: a row is used whole or left out.

    Where the prompts have images, demonstrations may have images in the same column, each of them or some.

    Raises:
        DataError, OptionsError: as of training rows, with the flags of these; plain texts that have images.
    """
    chosen, data = settings.pretraining, settings.data
    if not chosen.pretrain_data:
        return None
    rows = TrainRowsSettings(
        prompt_data=chosen.pretrain_data,
        prompt_data_probs=chosen.pretrain_data_probs,
        prompt_split=chosen.pretrain_split,
        num_workers=data.num_workers,
        prefetch_factor=data.prefetch_factor,
    )
    limit = _longest_row(settings)
    with _own_flags(text_key=bool(chosen.pretrain_text_key)):
        found = read_training(
            rows,
            _row_text(settings),
            tokenizer,
            label_key=None,
            output_key=None if chosen.pretrain_text_key else chosen.pretrain_output_key,
            prompt_max_len=limit,
            images=_row_images(settings.images),
        )
        make = _texts if chosen.pretrain_text_key else demonstrations
        if chosen.pretrain_text_key:
            _refuse_images(found.rendered, settings.images.images_key, chosen.pretrain_input_key)
        samples, left_out = make(found.rendered, tokenizer, limit)
    return _prepared(settings, found, samples, left_out)


def _row_images(images: RowImageSettings) -> ImageReading:
    """Return the reading of the rows' images, which are never exchanged, and which a row need not have."""
    if not images.images_key:
        return ImageReading()
    return ImageReading(ImageColumn(images.images_key, images.limit_mm_image_per_prompt, mixed=True))


def _refuse_images(rendered: Sequence[RenderedPrompt], images_key: str, input_key: str) -> None:
    """Refuse plain texts with images: of a text every token is learned, and places of images are not text."""
    for row in rendered:
        if row.media is not None:
            raise DataError(
                code="ptx.text_with_image",
                what=f"{row.prompt_id} is a plain text (pretrain_text_key) and has an image",
                where=f"{row.place}:{images_key}" if row.place else "--pretrain_text_key",
                why="every token of a plain text is learned, and the places of an image in it stand for no text",
                do=f"give it as a demonstration, with a prompt and a response: --pretrain_text_key '' "
                f"--pretrain_input_key {input_key}",
            )


def _prepared(
    settings: RlSettings, found: PreparedPrompts, samples: list[TrainingSample], left_out: list[tuple[str, int]]
) -> PretrainingData:
    mixture = found.mixture_of([sample.sample_id for sample in samples])
    num_rows = min(settings.batch.train_batch_size, len(samples))
    return PretrainingData(samples, [*found.left_out, *left_out], mixture, found.data_hash, num_rows)


def _longest_row(settings: RlSettings) -> int:
    """Return the tokens that a row may have: those of a prompt with its response, as far as the model has positions."""
    sampling = settings.sampling
    longest = sampling.max_len or sampling.prompt_max_len + sampling.generate_max_len
    return min(longest, model_facts(settings.model.pretrain).max_positions)


def _row_text(settings: RlSettings) -> PromptTextSettings:
    chosen, data = settings.pretraining, settings.data
    if chosen.pretrain_text_key:
        return PromptTextSettings(input_key=chosen.pretrain_text_key)
    return PromptTextSettings(
        input_key=chosen.pretrain_input_key,
        input_template=data.input_template,
        apply_chat_template=data.apply_chat_template,
        system_prompt=data.system_prompt,
    )


def _texts(
    rendered: tuple[RenderedPrompt, ...], tokenizer: HfTokenizer, max_len: int
) -> tuple[list[TrainingSample], list[tuple[str, int]]]:
    """Make a sample of each text, an end token behind it; what is longer than `max_len` is left out by name."""
    rows = [replace(row, output="") for row in rendered]
    samples, left_out = demonstrations(rows, tokenizer, max_len)
    return [replace(sample, prompt_length=0) for sample in samples], left_out


@contextmanager
def _own_flags(*, text_key: bool) -> Generator[None]:
    with renamed_settings({**_PRETRAINING_FLAGS, **({"--input_key": "--pretrain_text_key"} if text_key else {})}):
        yield
