"""Settings of the weights: which ones, how precise, on which device, and at what memory.

Metadata keys of a field, read by the command line: `minimum`, `maximum` (inclusive), `above`
(exclusive), `bare` (the value of the flag given without one). No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rft_core.errors import SettingsRefusal

Device = Literal["auto", "cpu", "cuda"]
CheckpointingMode = Literal["full", "selective"]


@dataclass(frozen=True, kw_only=True)
class WeightsSettings:
    """The weights to load, and where they live."""

    pretrain: str
    """Model to start from: a Hugging Face directory on this machine, or ORG/NAME[@REVISION] of the Hub."""

    bf16: bool = False
    """Hold and compute the weights in bfloat16 (half the memory); off = float32."""

    model_code: str = ""
    """Python files or folders, joined by commas, that register patches or families of models; empty = none."""

    device: Device = "auto"
    """Where the model lives; auto = a CUDA GPU if there is one, else the CPU."""


@dataclass(frozen=True, kw_only=True)
class TrainedWeightsSettings(WeightsSettings):
    """The model that is trained: its memory and its kernels."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    gradient_checkpointing_mode: CheckpointingMode = "full"
    """What `gradient_checkpointing` recomputes; selective keeps the results of matrix products and attention."""

    gradient_checkpointing_every: int = field(default=1, metadata={"minimum": 1})
    """Recompute every n-th layer only (with `gradient_checkpointing`); 1 = every layer."""

    flash_attn: bool = False
    """Use the flash-attn package where it can run; the first lines of a run say which kernels are used. Off = torch's
    own kernels."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(TrainedWeightsSettings):
    """The model that is trained."""

    freeze_prefix: str = field(default="", metadata={"bare": "visual"})
    """Freeze the parameters whose names begin so, joined by commas; bare = visual; empty = none."""

    train_only_tokens_from: int = field(default=-1, metadata={"minimum": -1})
    """Train only the embedding and output rows of tokens with this id or a higher one; -1 = train all weights."""

    aux_loss_coef: float = field(default=0.0, metadata={"minimum": 0.0})
    """Weight of the load-balancing loss of the routers (mixture-of-experts models); 0 = none."""

    fused_linear_logprob: bool = False
    """Compute the output head and its log-probabilities in chunks of rows, so that the full logits never exist in
    memory."""

    chunk_size: int = field(default=4096, metadata={"minimum": 1})
    """Rows (tokens) of the head computed at once by `fused_linear_logprob`."""


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """The routers of a mixture of experts, beside `aux_loss_coef`."""

    router_z_loss_coef: float = field(default=0.0, metadata={"minimum": 0.0})
    """Weight of the squared normaliser of the routers' logits (mixture-of-experts models), which keeps them small; 0 =
    none, usual is 0.001."""

    balance_bias_rate: float = field(default=0.0, metadata={"minimum": 0.0})
    """Step by which the bias that experts are chosen with is moved after each update towards equal loads, without a
    loss (models with such a bias: dots1); 0 = it stays, usual is 0.001, in short runs 0.01."""

    balance_bias_rate_end: float = field(default=0.001, metadata={"minimum": 0.0})
    """What a higher `balance_bias_rate` falls to by the last update of a run, by the same factor at each: large steps
    find the balance, small ones keep it; 0 = it does not fall."""


@dataclass(frozen=True, kw_only=True)
class PretrainModelSettings(ModelSettings):
    """The model that a pre-training run begins with: a new one, or one that exists."""

    pretrain: str = ""
    """Model whose training goes on with texts: a Hugging Face directory on this machine, or ORG/NAME[@REVISION] of the
    Hub; empty = a new decoder."""

    tokenizer: str = "bpe"
    """Tokenizer of a new decoder: a Hugging Face directory or a name of the Hub; or one that is trained on the training
    text: char (a token a character of the text), byte (a token a byte) or bpe (merges of bytes)."""

    tokenizer_size: int = field(default=4096, metadata={"minimum": 258})
    """Tokens of a vocabulary that is trained (with `tokenizer` bpe): 256 bytes, two special tokens, and merges."""


PoolingMethod = Literal["last", "attn"]
StepReduction = Literal["min", "product", "mean", "last"]


@dataclass(frozen=True, kw_only=True)
class RewardHeadSettings:
    """The head that scores texts; of a model that has one already, that head is trained on."""

    heads_types: str = "score"
    """Names of the scores, joined by commas, each a linear layer on the pooled state; with several, each is trained on
    the column of its name."""

    heads_weights: str = ""
    """Weight of each head in the reward that the finished model gives, joined by commas; empty = 1 each."""

    pooling_method: PoolingMethod = "last"
    """State that is scored: last = of the last token (then transformers loads the model as a sequence classifier),
    attn = a mean of all states that a learned query weights."""

    probing_layer: int = field(default=-1, metadata={"minimum": -1})
    """Layer whose states are scored, counted from 1: those above are not kept; -1 = the last, after the final norm."""

    scale_for_train: bool = False
    """Multiply the scores by a learned factor while training, from 1 / 0.07; the finished model scores without it."""

    step_separator: str = r"\n"
    """Text behind each step of a response (with `loss_type` steps), at whose last token the step is scored; \\n is a
    new line, \\t a tab."""

    step_reduction: StepReduction = "min"
    """Reward that the finished model gives a response from the probabilities of its steps (with `loss_type` steps): the
    smallest, their product, their mean, or the last."""


def freezing_refusal(freeze_prefix: str, train_only_tokens_from: int) -> SettingsRefusal | None:
    """Return the refusal of two ways to freeze beside each other; None where at most one is chosen."""
    if not freeze_prefix or train_only_tokens_from < 0:
        return None
    return SettingsRefusal(
        code="freezing.two_ways",
        names=("freeze_prefix", "train_only_tokens_from"),
        why="where only the rows of some tokens are trained, every other weight is frozen already",
        do=f"--train_only_tokens_from {train_only_tokens_from} (and leave freeze_prefix out)",
    )


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """The sizes of a tokenizer and a decoder that are made from nothing."""

    vocab_size: int | None = field(default=None, metadata={"minimum": 258})
    """Tokens of the byte-level BPE tokenizer: 2 special ones, 256 bytes, and merges learned from the texts; none =
    2048, or 258 (no merges) for texts of fewer than 100,000 characters, whose whole words would become tokens."""

    hidden: int = field(default=256, metadata={"minimum": 2})
    """Width of the decoder."""

    layers: int = field(default=4, metadata={"minimum": 1})
    """Blocks of the decoder."""

    heads: int = field(default=4, metadata={"minimum": 1})
    """Query heads of each block; hidden / heads is an even whole number."""

    kv_heads: int | None = field(default=None, metadata={"minimum": 1})
    """Key and value heads of each block, a divisor of `heads`; none = as many as `heads`."""

    ffn: int | None = field(default=None, metadata={"minimum": 1})
    """Width of the gated feed-forward part; none = 3 x hidden."""

    max_positions: int = field(default=2048, metadata={"minimum": 2})
    """Longest sequence that the decoder can place, in tokens: by default what the defaults of `prompt_max_len` and
    `generate_max_len` take together."""


DecoderFamily = Literal["auto", "qwen3", "llama", "mixtral", "qwen3_moe", "qwen2_moe", "dots1", "own"]


@dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """The architecture of a decoder that is trained from nothing."""

    family: DecoderFamily = "auto"
    """Architecture by transformers' name of it; auto = qwen3, with `use_moe` its mixture (qwen2_moe with
    `shared_experts`); own = this project's decoder, which auto takes for `use_glu` off or `dropout` above 0."""

    hidden_size: int = field(default=512, metadata={"minimum": 2})
    """Width of the decoder."""

    num_layers: int = field(default=2, metadata={"minimum": 1})
    """Blocks of the decoder."""

    num_heads: int = field(default=8, metadata={"minimum": 1})
    """Query heads of each block; hidden_size / num_heads is an even whole number."""

    num_kv_heads: int | None = field(default=None, metadata={"minimum": 1})
    """Key and value heads of each block, a divisor of `num_heads`; none = as many as `num_heads`."""

    ffn_hidden_size: int | None = field(default=None, metadata={"minimum": 1})
    """Width of the feed-forward part, with `use_moe` of each expert; none = 8/3 x hidden_size in whole 64s (4 x
    hidden_size with `use_glu` off), with `use_moe` shared out among the experts of a token."""

    use_glu: bool = True
    """Gate the feed-forward part (SwiGLU); off = GELU without a gate, in the family own."""

    dropout: float = field(default=0.0, metadata={"minimum": 0.0, "maximum": 0.95})
    """Probability that training zeroes an entry of the embeddings, or of what a block's attention or feed-forward
    part adds; above 0 in the family own."""

    vocab_size: int | None = field(default=None, metadata={"minimum": 1})
    """Rows of the embedding, no fewer than the tokenizer has tokens; none = as many."""

    max_seq_len: int = field(default=512, metadata={"minimum": 2})
    """Longest sequence that the decoder can place, in tokens."""

    tie_embeddings: bool = True
    """Use the matrix of the embedding as the output matrix too."""

    init_std: float = field(default=0.02, metadata={"above": 0.0})
    """Standard deviation of the first weights; of a block's output matrices it is divided by sqrt(2 x num_layers)."""

    use_moe: bool = False
    """Make the feed-forward part of each block a mixture of experts."""

    num_experts: int = field(default=0, metadata={"minimum": 0})
    """Experts of each block (with `use_moe`); 0 = 8."""

    top_k: int = field(default=0, metadata={"minimum": 0})
    """Experts that a token goes to (with `use_moe`); 0 = 2."""

    shared_experts: int = field(default=0, metadata={"minimum": 0})
    """Experts of each block that every token goes to (with `use_moe`, families qwen2_moe and dots1)."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """A tokenizer that is made from texts."""

    tokenizer_type: Literal["bpe", "characters", "bytes"] = "bpe"
    """bpe = byte-level BPE, whose merges are learned from the texts; characters = one token for each character of the
    texts; bytes = one for each byte of UTF-8."""

    vocab_size: int | None = field(default=None, metadata={"minimum": 258})
    """Tokens of a `bpe` tokenizer: 2 special ones, 256 bytes, and merges; none = 2048, or 258 (no merges) for texts of
    fewer than 100,000 characters, whose whole words would become tokens."""

    chat_template_file: str = ""
    """File of a chat template (Jinja) for later training on conversations; empty = a line a message, `role: content`,
    and the end token behind an assistant's."""


AdapterKind = Literal["lora", "rslora", "dora"]


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters, trained in place of the model's weights."""

    lora_rank: int = field(default=0, metadata={"minimum": 0})
    """Rank of the LoRA adapters that are trained while the model's own weights stay frozen; 0 = train all weights, no
    adapters."""

    lora_alpha: float = field(default=16.0, metadata={"above": 0.0})
    """Scale of the adapters: their product is multiplied by alpha / rank (`lora_type` rslora: alpha / sqrt(rank))."""

    target_modules: str = "all-linear"
    """Layers that get an adapter: all-linear, or endings of their names joined by commas, such as q_proj,v_proj."""

    lora_type: AdapterKind = "lora"
    """lora = the standard form; rslora scales by 1 / sqrt(rank); dora also trains the norm of each row of the
    matrix."""

    @property
    def dropout(self) -> float:
        """Dropout probability of the adapters' inputs; 0 where no setting of the command names one."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(LoraSettings):
    """Low-rank adapters of a policy, trained in place of the model's weights."""

    lora_dropout: float = field(default=0.0, metadata={"minimum": 0.0, "maximum": 0.95})
    """Dropout probability of the adapters' inputs in training (`rft-train sft` only)."""

    load_in_4bit: bool = False
    """Hold the base weights in 4 bits (NF4 of bitsandbytes, on a GPU)."""

    @property
    def dropout(self) -> float:
        """Dropout probability of the adapters' inputs."""
        return self.lora_dropout
