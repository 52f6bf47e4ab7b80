"""Composition of a reward model's training: from resolved settings to its pairs or steps, collaborators and loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rft.build.images import row_images, tokenizer_with_images
from rft.build.lora import adapt, weights_directory
from rft.front_end import SILENT, FrontEnd
from rft.identity.contents import records_content, rows_content, run_contents
from rft.identity.record import Content
from rft.parallel.parallelize import ParallelModel, held_dtype, parallelize
from rft.parallel.reward_model_weights import reward_checkpoint_parts
from rft.parallel.shardable import ShardableRewardModel, WrappedRewardModel
from rft.planning.start_plan import RM_START
from rft.resolved import Resolved
from rft.run_lifecycle import RunStart, TrainedRun
from rft.settings import RmSettings
from rft.stages.reward_head import reward_model_to_train, take_head, trained_spec
from rft.stages.reward_pairs import RewardData, reward_data
from rft.stages.supervised.pair_texts import PairTextEncoder
from rft.stages.supervised.parts import RowOrder, run_state
from rft.stages.supervised.row_training import ReadRun, train_on_rows
from rft.stages.supervised.step_rows import StepData, refuse_images_of_steps, step_data
from rft_dist.optim.parameter_groups import require_known_names
from rft_models.loading.context_length import model_facts
from rft_models.reward_model.spec import RewardSpec
from rft_models.reward_model.step_encoding import StepTextEncoder
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.media_cache import image_digests
from rft_trainer.evaluation.pair_evaluator import PairScoreEvaluator
from rft_trainer.evaluation.step_evaluator import StepScoreEvaluator
from rft_trainer.loops.early_stop import EarlyStop
from rft_trainer.loops.reward_training import RewardEvaluator, RewardModelLoop, StepRewardLoop
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.update.optimizer_step import MicroBatchLoss
from rft_trainer.update.pair_loss import PairLoss, PairScoreObjective
from rft_trainer.update.step_loss import StepLoss, StepScoreObjective


@dataclass(frozen=True, slots=True)
class RmInputs:
    """Tokenizer, head and pairs of a reward model's run, which it reads before any weights."""

    tokenizer: HfTokenizer
    spec: RewardSpec
    pairs: RewardData | StepData
    """With `loss_type` steps rows of labelled steps."""


def rm_inputs(settings: RmSettings) -> RmInputs:
    """Read, encode and count; needs a tokenizer and no weights."""
    tokenizer = tokenizer_with_images(settings.model, settings.images)
    # the model that is saved is given images of the sizes that it was trained on
    tokenizer.keep_pixel_range()
    spec = trained_spec(settings.model.pretrain, settings.head, steps=settings.training.loss_type == "steps")
    max_positions, seed = model_facts(settings.model.pretrain, without_head=True).max_positions, settings.run.seed
    if spec.steps is not None:
        refuse_images_of_steps(settings.images.images_key)
        encoder = StepTextEncoder(tokenizer, spec.steps)
        rows = step_data(settings.data, settings.training, encoder, max_positions=max_positions, seed=seed)
        return RmInputs(tokenizer, spec, rows)
    pairs = reward_data(
        settings.data,
        settings.training,
        spec.heads,
        PairTextEncoder(tokenizer, row_images(settings.images, seed)),
        max_positions=max_positions,
        seed=seed,
    )
    return RmInputs(tokenizer, spec, pairs)


def build_rm(settings: RmSettings, started: RunStart, inputs: RmInputs) -> RewardModelLoop:
    """Build the run, ready to begin; where it continues from a checkpoint, exactly in that state."""
    machine, restored, chosen, pairs = started.machine, started.restored, settings.training, inputs.pairs
    source = weights_directory(settings.adapter, settings.model.pretrain, restored)
    model = reward_model_to_train(
        settings.model,
        inputs.spec,
        source,
        seed=settings.run.seed,
        dtype=held_dtype(settings.strategy, bf16=settings.model.bf16),
        device=machine.device,
    )
    model.tokenizer = inputs.tokenizer
    # before distribution, so that adapters are parameters like any others
    adapt(model, settings.adapter, restored, base=source, seed=settings.run.seed)
    if model.adapters is not None and restored is not None:  # the weights under the adapters have another head, or none
        take_head(model, restored.model_directory)
    require_known_names(settings.optimizer, [name for name, _ in model.named_parameters()])
    parallel = parallelize(ShardableRewardModel(model), settings.strategy, settings.optimizer, machine, restored)
    state = run_state(
        settings,
        started,
        parallel,
        RowOrder(pairs.mixture, pairs.data_hash, len(pairs.units), pairs.num_steps),
        saved=reward_checkpoint_parts(parallel, machine.collectives),
        early_stop=EarlyStop(chosen.patience, chosen.min_improvement),
        trained=[
            name for name, weight in parallel.model.named_parameters() if weight.requires_grad or model.adapters is None
        ],
    )
    loss, evaluator = _loss_and_evaluator(settings, started, parallel, inputs)
    loop = RewardModelLoop if inputs.spec.steps is None else StepRewardLoop
    return loop(**state.loop_parts(loss, state.learning_rates()), units=pairs.units, evaluator=evaluator)


def _loss_and_evaluator(
    settings: RmSettings, started: RunStart, parallel: ParallelModel[WrappedRewardModel], inputs: RmInputs
) -> tuple[MicroBatchLoss, RewardEvaluator | None]:
    """Make the loss of pairs, or of steps, and the evaluator of the held-out rows, where there are any."""
    held_out, chosen = inputs.pairs.held_out, settings.training
    if inputs.spec.steps is None:
        objective = pair_objective(settings, inputs.spec)
        evaluator = _evaluator(settings, started, parallel, objective, held_out)
        return PairLoss(parallel.model, objective), evaluator
    loss = StepLoss(parallel.model, StepScoreObjective(whole_rows=not chosen.train_on_last_step_only))
    of_steps = StepScoreEvaluator(
        model=parallel.model,
        held_out=held_out,
        collectives=parallel.data,
        max_sequences=chosen.micro_train_batch_size,
        max_tokens=chosen.max_tokens_per_micro_batch,
        device=started.machine.device,
        collective_forward=parallel.collective_forward,
    )
    return loss, of_steps if held_out else None


def pair_objective(settings: RmSettings, spec: RewardSpec) -> PairScoreObjective:
    """Return the loss that the settings select; the margin is part of the pairs."""
    chosen = settings.training
    assert chosen.loss_type != "steps", "the loss of steps is no loss of pairs"
    return PairScoreObjective(
        heads=spec.heads,
        loss_type=chosen.loss_type,
        tie_margin=chosen.tie_margin,
        centring=chosen.center_rewards_coefficient,
    )


def _evaluator(
    settings: RmSettings,
    started: RunStart,
    parallel: ParallelModel[WrappedRewardModel],
    objective: PairScoreObjective,
    held_out: Sequence[TrainingSample],
) -> PairScoreEvaluator | None:
    """Make the evaluator of the held-out pairs, where there are any."""
    if not held_out:
        return None
    return PairScoreEvaluator(
        parallel.model,
        objective,
        held_out,
        parallel.data,
        max_sequences=settings.training.micro_train_batch_size,
        max_tokens=settings.training.max_tokens_per_micro_batch,
        device=started.machine.device,
        collective_forward=parallel.collective_forward,
    )


def rm_contents(resolved: Resolved[RmSettings], pairs: RewardData | StepData) -> dict[str, Content]:
    """Return what the rows and files of a run hold."""
    chosen = resolved.settings.data
    rows = rows_content(pairs.data_hash, len(pairs.units), chosen.prompt_data)
    held_out = records_content(
        (
            [
                sample.sample_id,
                *sample.token_ids,
                *sample.sequence_numbers,
                *sample.loss_mask,
                *sample.returns,
                *image_digests(sample.media),
            ]
            for sample in pairs.held_out
        ),
        chosen.eval_data,
    )
    return run_contents(resolved, rows, held_out)


def read_rm(resolved: Resolved[RmSettings]) -> ReadRun:
    """Read what a run needs before any weights."""
    settings = resolved.settings
    inputs = rm_inputs(settings)
    return ReadRun(
        inputs,
        inputs.pairs.num_steps,
        rm_contents(resolved, inputs.pairs),
        lambda started: build_rm(settings, started, inputs),
    )


def train(
    resolved: Resolved[RmSettings],
    command: Sequence[str],
    *,
    in_place: Path | None = None,
    signals: StopSignals | None = None,
    front: FrontEnd = SILENT,
) -> TrainedRun:
    """Train a reward model from its settings to its end, as `train_on_rows` describes."""
    return train_on_rows(read_rm, resolved, command, in_place=in_place, signals=signals, front=front, fit=RM_START)
