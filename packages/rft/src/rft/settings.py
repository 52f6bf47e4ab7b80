"""The settings of each command: groups of the packages that use the values, nested in Python, flat for people.

`settings.model.pretrain` in code is `--pretrain` on the command line and `pretrain:` in a file. A
command lists only groups whose every setting has an effect in it. No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rft.reward_kinds import with_reward_groups
from rft_dist.settings import (
    AdamSettings,
    CheckpointSettings,
    LaunchSettings,
    OptimizerSettings,
    StrategySettings,
    WatchSettings,
)
from rft_engine.settings import (
    ComparedEnginesSettings,
    DecodingEngineSettings,
    EngineSettings,
    ProbeLengthSettings,
    ReplicaSettings,
    SearchedSamplingSettings,
    TrainingSamplingSettings,
)
from rft_models.settings import (
    AdapterSettings,
    BuildSettings,
    DecoderSettings,
    Device,
    LoraSettings,
    ModelSettings,
    PretrainModelSettings,
    RewardHeadSettings,
    RouterSettings,
    TokenizerSettings,
    TrainedWeightsSettings,
    WeightsSettings,
)
from rft_trainer.settings.algorithm import AlgorithmSettings
from rft_trainer.settings.batches import BatchSettings
from rft_trainer.settings.critic import CriticSettings
from rft_trainer.settings.data import (
    BuildDataSettings,
    ConformanceDataSettings,
    DataSettings,
    GenerateDataSettings,
    ScoredDataSettings,
    SftDataSettings,
)
from rft_trainer.settings.environment import EnvironmentSettings, EvalEnvironmentSettings
from rft_trainer.settings.evaluation import EvaluationSampleSettings, EvaluationSettings, RlEvaluationSettings
from rft_trainer.settings.images import ControlledImageSettings, GenerateImageSettings, ScoredImageSettings
from rft_trainer.settings.preference_training import (
    PreferenceDataSettings,
    PreferenceLossSettings,
    PreferenceTrainingSettings,
)
from rft_trainer.settings.pretraining import (
    PerplexityDataSettings,
    PretrainDataSettings,
    PretrainEvaluationSettings,
    PretrainingSettings,
    PretrainTrainingSettings,
    TokenizerDataSettings,
)
from rft_trainer.settings.reward_model import (
    AgreementSettings,
    PairDataSettings,
    RewardTrainingSettings,
    RmTestDataSettings,
)
from rft_trainer.settings.rewards import JudgeSettings, RewardModelSettings, RewardSettings, RlRewardSettings
from rft_trainer.settings.rollouts import AsyncSettings
from rft_trainer.settings.run import OutputSettings, RlRunSettings, RunSettings, SeedSettings
from rft_trainer.settings.sft import SftTrainingSettings
from rft_trainer.settings.teacher import TeacherSettings


@dataclass(frozen=True, kw_only=True)
@with_reward_groups
class RlSettings:
    """Train a policy on rewards of its own responses."""

    model: ModelSettings
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    data: DataSettings = field(default_factory=DataSettings)
    images: ControlledImageSettings = field(default_factory=ControlledImageSettings)
    reward: RlRewardSettings = field(default_factory=RlRewardSettings)
    reward_models: RewardModelSettings = field(default_factory=RewardModelSettings)
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    conversation: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    pretraining: PretrainingSettings = field(default_factory=PretrainingSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    sampling: TrainingSamplingSettings = field(default_factory=TrainingSamplingSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)
    async_rollouts: AsyncSettings = field(default_factory=AsyncSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    strategy: StrategySettings = field(default_factory=StrategySettings)
    evaluation: RlEvaluationSettings = field(default_factory=RlEvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    run: RlRunSettings = field(default_factory=RlRunSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)


@dataclass(frozen=True, kw_only=True)
class SftSettings:
    """Train a model on demonstrations."""

    model: ModelSettings
    routers: RouterSettings = field(default_factory=RouterSettings)
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    data: SftDataSettings = field(default_factory=SftDataSettings)
    images: ControlledImageSettings = field(default_factory=ControlledImageSettings)
    training: SftTrainingSettings = field(default_factory=SftTrainingSettings)
    optimizer: AdamSettings = field(default_factory=AdamSettings)
    strategy: StrategySettings = field(default_factory=StrategySettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    run: RunSettings = field(default_factory=RunSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)


@dataclass(frozen=True, kw_only=True)
class PretrainSettings:
    """Train a language model on texts, from nothing or from a model that exists."""

    model: PretrainModelSettings = field(default_factory=PretrainModelSettings)
    routers: RouterSettings = field(default_factory=RouterSettings)
    decoder: DecoderSettings = field(default_factory=DecoderSettings)
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    data: PretrainDataSettings = field(default_factory=PretrainDataSettings)
    training: PretrainTrainingSettings = field(default_factory=PretrainTrainingSettings)
    optimizer: AdamSettings = field(default_factory=AdamSettings)
    strategy: StrategySettings = field(default_factory=StrategySettings)
    evaluation: PretrainEvaluationSettings = field(default_factory=PretrainEvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    run: RunSettings = field(default_factory=RunSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)


@dataclass(frozen=True, kw_only=True)
class DpoSettings:
    """Train a model on preferences between responses."""

    model: ModelSettings
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    data: PreferenceDataSettings = field(default_factory=PreferenceDataSettings)
    images: ControlledImageSettings = field(default_factory=ControlledImageSettings)
    loss: PreferenceLossSettings = field(default_factory=PreferenceLossSettings)
    training: PreferenceTrainingSettings = field(default_factory=PreferenceTrainingSettings)
    optimizer: AdamSettings = field(default_factory=AdamSettings)
    strategy: StrategySettings = field(default_factory=StrategySettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    run: RunSettings = field(default_factory=RunSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)


@dataclass(frozen=True, kw_only=True)
class RmSettings:
    """Train a reward model on pairs of responses."""

    model: TrainedWeightsSettings
    adapter: LoraSettings = field(default_factory=LoraSettings)
    head: RewardHeadSettings = field(default_factory=RewardHeadSettings)
    data: PairDataSettings = field(default_factory=PairDataSettings)
    images: ControlledImageSettings = field(default_factory=ControlledImageSettings)
    training: RewardTrainingSettings = field(default_factory=RewardTrainingSettings)
    optimizer: AdamSettings = field(default_factory=AdamSettings)
    strategy: StrategySettings = field(default_factory=StrategySettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    run: RunSettings = field(default_factory=RunSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)


@dataclass(frozen=True, kw_only=True)
class RmTestModelSettings(WeightsSettings):
    """The reward model that is tested."""

    pretrain: str = field(metadata={"aliases": ("model",)})
    """Reward model: a directory, a run of `rft-train rm`, or ORG/NAME[@REVISION] of the Hub; --model is the same
    flag."""


@dataclass(frozen=True, kw_only=True)
class RmTestSettings:
    """Test a reward model on pairs of responses."""

    model: RmTestModelSettings
    data: RmTestDataSettings = field(default_factory=RmTestDataSettings)
    images: ScoredImageSettings = field(default_factory=ScoredImageSettings)
    compared: AgreementSettings = field(default_factory=AgreementSettings)
    output: OutputSettings = field(default_factory=OutputSettings)


@dataclass(frozen=True, kw_only=True)
class EvalSamplingSettings(SearchedSamplingSettings):
    """Sampling of the responses to held-out prompts, and how long texts may be (in tokens)."""

    temperature: float = field(default=0.0, metadata={"minimum": 0.0, "aliases": ("eval_temperature",)})
    """Divisor of the logits before sampling; 0 = greedy. --eval_temperature is the same flag."""


@dataclass(frozen=True, kw_only=True)
class EvalOutputSettings(OutputSettings):
    """The files of an evaluation, and the other one that it is compared with."""

    output: str = ""
    """File for all responses with their rewards: FILE.json with all figures, or FILE.jsonl with a line a response and
    the figures in FILE.manifest.json; empty = only the summary is printed. An evaluation that was killed goes on from
    FILE.partial when it is started again."""

    eval_by: str = ""
    """Column of the rows by whose values the accuracy is divided, such as level or subject; empty = none."""

    compare: str = ""
    """Run, checkpoint or model that answers the same rows under the same keys, or the `output` of an earlier
    evaluation of them, with which this one is compared in pairs; empty = none."""


@dataclass(frozen=True, kw_only=True)
@with_reward_groups
class EvalSettings:
    """Score a model on held-out data. Greedy unless a temperature is given."""

    model: WeightsSettings
    data: ScoredDataSettings = field(default_factory=ScoredDataSettings)
    images: ControlledImageSettings = field(default_factory=ControlledImageSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    reward_models: RewardModelSettings = field(default_factory=RewardModelSettings)
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    conversation: EvalEnvironmentSettings = field(default_factory=EvalEnvironmentSettings)
    sampling: EvalSamplingSettings = field(default_factory=EvalSamplingSettings)
    evaluation: EvaluationSampleSettings = field(default_factory=EvaluationSampleSettings)
    engine: DecodingEngineSettings = field(default_factory=DecodingEngineSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    output: EvalOutputSettings = field(default_factory=EvalOutputSettings)


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings:
    """Measure how well a model predicts texts: loss, perplexity and bits a byte."""

    model: WeightsSettings
    data: PerplexityDataSettings = field(default_factory=PerplexityDataSettings)


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Answer prompts with a model."""

    model: WeightsSettings
    data: GenerateDataSettings = field(default_factory=GenerateDataSettings)
    images: GenerateImageSettings = field(default_factory=GenerateImageSettings)
    sampling: SearchedSamplingSettings = field(default_factory=SearchedSamplingSettings)
    engine: DecodingEngineSettings = field(default_factory=DecodingEngineSettings)
    output: OutputSettings = field(default_factory=OutputSettings)


@dataclass(frozen=True, kw_only=True)
class BuildOutputSettings(SeedSettings):
    """Where the new model goes."""

    save_path: str
    """Directory of the new model; it must not be there yet."""


@dataclass(frozen=True, kw_only=True)
class BuildModelSettings:
    """Make a tokenizer and a decoder with random weights: a complete Hugging Face directory, without a download."""

    data: BuildDataSettings
    output: BuildOutputSettings
    model: BuildSettings = field(default_factory=BuildSettings)


@dataclass(frozen=True, kw_only=True)
class TokenizerOutputSettings:
    """The place of the new tokenizer."""

    save_path: str
    """Directory of the new tokenizer; it must not be there yet."""


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerSettings:
    """Make a tokenizer from texts: a Hugging Face directory without weights, for a model trained from nothing."""

    output: TokenizerOutputSettings
    data: TokenizerDataSettings = field(default_factory=TokenizerDataSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)


@dataclass(frozen=True, kw_only=True)
class ConformanceModelSettings(WeightsSettings):
    """The model whose log-probabilities are compared."""

    pretrain: str = field(metadata={"aliases": ("model",)})
    """Model to check: a Hugging Face directory, or ORG/NAME[@REVISION] of the Hub; --model is the same flag."""


@dataclass(frozen=True, kw_only=True)
class ConformanceOutputSettings(SeedSettings):
    """Where the figures go."""

    output: str = field(default="", metadata={"aliases": ("json",)})
    """File for all figures as JSON, with versions, dtype and threads (--json is the same flag); empty = none."""


@dataclass(frozen=True, kw_only=True)
class ConformanceSettings:
    """Compare the log-probabilities of the trainer and of every engine, token by token, on a model of your own."""

    model: ConformanceModelSettings
    data: ConformanceDataSettings = field(default_factory=ConformanceDataSettings)
    lengths: ProbeLengthSettings = field(default_factory=ProbeLengthSettings)
    engine: ComparedEnginesSettings = field(default_factory=ComparedEnginesSettings)
    output: ConformanceOutputSettings = field(default_factory=ConformanceOutputSettings)


@dataclass(frozen=True, kw_only=True)
class ExaminationSettings:
    """Parts of the examination beside this installation and this machine."""

    save_path: str = ""
    """Directory that runs are to be written to; empty = runs."""

    reach: str = ""
    """Machines that must be reached from here, as host:port, joined by commas; empty = none."""

    share: str = ""
    """File for the findings as JSON, without secrets, to be handed on; empty = none."""


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Examine the installation and this machine: a verdict for each fact, and the command that mends it."""

    examination: ExaminationSettings = field(default_factory=ExaminationSettings)


@dataclass(frozen=True, kw_only=True)
class ReportFileSettings:
    """The run of a report, and its file."""

    run: str
    """Directory of the run."""

    output: str = ""
    """File of the report; empty = report.html in the run's directory."""


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Write a report on a run: one page for a browser, which needs no network and can be sent to somebody."""

    report: ReportFileSettings


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Address and limits of the server."""

    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own (127.0.0.1, ::1, localhost) needs a token:
    RFT_REMOTE_TOKEN."""

    port: int = field(default=8000, metadata={"minimum": 0, "maximum": 65535})
    """Port to listen on; 0 = any free one, which is printed."""

    reward_columns: str = ""
    """Columns that requests bring for functions of your own, joined by commas; empty = none."""

    reward_log: str = ""
    """File for what functions of your own print, with their tracebacks; empty = none."""

    serve_batch_size: int = field(default=0, metadata={"minimum": 0})
    """Most responses of several waiting requests that are scored in one call; 0 = a call each request, whose scores are
    then the same bits whatever else is asked."""

    max_waiting_requests: int = field(default=256, metadata={"minimum": 1})
    """Requests that may wait; further ones are told to come back (HTTP 503 with Retry-After)."""

    max_request_mib: float = field(default=64.0, metadata={"above": 0.0})
    """Largest request, in MiB."""

    max_request_responses: int = field(default=4096, metadata={"minimum": 1})
    """Most responses in one request."""

    request_read_timeout: float = field(default=60.0, metadata={"above": 0.0})
    """Seconds in which a request must have arrived."""


@dataclass(frozen=True, kw_only=True)
class DashboardPageSettings:
    """The runs of a dashboard, and its address."""

    folders: str = "runs"
    """Folders with runs in them or below them, joined by commas; nothing beside them is read."""

    host: str = ServingSettings.host
    """Address to listen on; any but this machine's own (127.0.0.1, ::1, localhost) needs a token:
    RFT_REMOTE_TOKEN."""

    port: int = field(default=8090, metadata={"minimum": 0, "maximum": 65535})
    """Port to listen on; 0 = any free one, which is printed."""


@dataclass(frozen=True, kw_only=True)
class DashboardSettings:
    """Show running and past runs in a browser: curves, times, samples, and runs beside one another."""

    dashboard: DashboardPageSettings = field(default_factory=DashboardPageSettings)


@dataclass(frozen=True, kw_only=True)
class ServedModelSettings:
    """The precision of reward models and judges in this process, and their device."""

    bf16: bool = WeightsSettings.bf16
    """Hold and compute reward models and judges in bfloat16 (half the memory); off = float32."""

    device: Device = WeightsSettings.device
    """Where they live; auto = a CUDA GPU if there is one, else the CPU."""


@dataclass(frozen=True, kw_only=True)
@with_reward_groups
class ServeRewardSettings:
    """Serve rewards over HTTP."""

    serving: ServingSettings = field(default_factory=ServingSettings)
    model: ServedModelSettings = field(default_factory=ServedModelSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    reward_models: RewardModelSettings = field(default_factory=RewardModelSettings)
    judge: JudgeSettings = field(default_factory=JudgeSettings)
