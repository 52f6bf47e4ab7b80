"""Composition of a reward model's test: its pairs, its scores, and the other model that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from rft.build.images import ImageReading, row_images
from rft.hub.run_settings import with_model_directories
from rft.hub.sources import located_sources
from rft.process.machine import Machine
from rft.settings import RmTestSettings
from rft.stages.reward_pairs import pair_keys
from rft.stages.reward_probe import Agreement, Pair, ProbeReport, agreement, probe_reward_model
from rft.stages.supervised.step_rows import refuse_images_of_steps
from rft.stages.supervised.step_test import StepTest, has_steps, score_labelled_steps
from rft_core.errors import DataError, OptionsError
from rft_models.families.custom import load_model_code
from rft_models.files.directories import checked_model_directory
from rft_models.reward_model.loading import spec_in_files
from rft_models.vision.processor import load_processor, load_vision_processor
from rft_trainer.data.preference_rows.preferences import load_pairs
from rft_trainer.data.rendering import with_places
from rft_trainer.settings.reward_model import RmTestDataSettings


@dataclass(frozen=True, slots=True)
class RmTest:
    """Outcome of a test."""

    report: ProbeReport | None
    """None where the steps of rows were scored."""
    other: ProbeReport | None
    """Of the model that it is compared with."""
    agreement: Agreement | None
    pairs: tuple[Pair, ...]
    """Empty where a few sums were scored."""
    steps: StepTest | None = None
    """Of a step reward model on rows of labelled steps."""

    def rows(self) -> list[dict[str, object]]:
        """Return a row a pair: texts, label, and both rewards; of labelled steps a row each."""
        if self.steps is not None:
            return self.steps.records()
        assert self.report is not None, "pairs have a report"
        scores = zip(self.pairs, self.report.chosen, self.report.rejected, strict=True)
        return [
            {
                "prompt": list(pair.messages) or pair.prompt,
                "chosen": pair.chosen,
                "rejected": pair.rejected,
                "outcome": pair.outcome,
                "reward_chosen": chosen,
                "reward_rejected": rejected,
                **({"images": [image.path or image.where for image in pair.images]} if pair.images else {}),
            }
            for pair, chosen, rejected in scores
        ]


def rm_test(settings: RmTestSettings, machine: Machine) -> RmTest:
    """Score the pairs of the settings.

    Raises:
        DataError: a directory that is no reward model, or a row without its fields.
        PreflightError: scores that cannot be trained on.
    """
    settings = with_model_directories(settings)
    chosen = settings.model
    load_model_code(chosen.model_code)
    spec = spec_in_files(*checked_model_directory(chosen.pretrain))
    if spec.steps is not None:
        refuse_images_of_steps(settings.images.images_key)
    if spec.steps is not None and settings.data.eval_data and has_steps(settings.data):
        if settings.compared.agree_with:
            raise _no_comparison(settings.compared.agree_with)
        steps = score_labelled_steps(chosen.pretrain, settings.data, bf16=chosen.bf16, device=machine.device)
        return RmTest(None, None, None, (), steps)
    if settings.images.images_key:
        # the other model too is refused before anything is scored
        for directory in filter(None, (chosen.pretrain, settings.compared.agree_with)):
            load_vision_processor(directory)
    reading = row_images(settings.images, settings.output.seed)
    pairs = read_pairs(settings.data, chosen.pretrain, reading) if settings.data.eval_data else None
    report = probe_reward_model(chosen.pretrain, pairs, bf16=chosen.bf16, device=machine.device)
    if not settings.compared.agree_with:
        return RmTest(report, None, None, tuple(pairs or ()))
    other = probe_reward_model(settings.compared.agree_with, pairs, bf16=chosen.bf16, device=machine.device)
    return RmTest(report, other, agreement(report, other), tuple(pairs or ()))


def _no_comparison(other: str) -> OptionsError:
    return OptionsError(
        code="rm.steps_agreement",
        what=f"agree_with = {other} beside rows of labelled steps",
        where="--agree_with",
        why="agreement is counted over pairs, of which two models prefer the same response",
        do="leave agree_with out, or test on pairs",
    )


def read_pairs(data: RmTestDataSettings, directory: str, reading: ImageReading | None = None) -> list[Pair]:
    """Read the pairs as training reads them, for a reward model in this directory."""
    specs = located_sources(data.eval_data, split=data.eval_split, flag="--eval_data")
    chat = load_processor(directory).has_chat_template
    reading = reading or ImageReading()
    loaded = load_pairs(specs, pair_keys(data, ()), split=data.eval_split or None, chat=chat, images=reading.column)
    pairs = loaded.pairs[: data.max_eval_samples] if data.max_eval_samples else loaded.pairs
    found: list[Pair] = []
    prompts = map(with_places, reading.arranged([pair.prompt for pair in pairs]))
    for pair, prompt in zip(pairs, prompts, strict=True):
        messages = tuple(message.as_dict() for message in prompt.messages or ())
        text = prompt.text
        if text is None:  # where the tokenizer has no template, what the turns say is the text
            text = "\n".join(str(turn.get("content", "")) for turn in messages)
        outcome = (pair.outcomes or (1.0,))[0]
        found.append(Pair(text, messages, pair.chosen, pair.rejected, outcome, prompt.images))
    if not any(abs(pair.outcome) == 1 for pair in found):
        raise DataError(
            code="data.no_decided_pair",
            what=f"in none of {len(found)} pairs one response is the better",
            where="--eval_data",
            why="how often a model prefers the better response is counted over such pairs",
            do="name the column that says which is better with --outcome_key",
        )
    return found
