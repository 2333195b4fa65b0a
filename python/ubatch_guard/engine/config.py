"""Settings of the engine. Plain frozen data; the names are vLLM's and Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ubatch_guard.step import Policy

ARCHITECTURES = ("llama", "mistral", "mixtral", "qwen3_moe")
"""``model_type`` of the Hugging Face checkpoints that the model can load."""

RULES = ("unguarded", "vllm", *(policy.value for policy in Policy), "move")
"""What decides about a step with an unsafe cut: nobody; vLLM's rule; the guard under one of its policies; or
the guard moves the cut to the nearest safe one. The last is for one rank alone: of several, none knows where
its step is cut before all have voted."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Names of the torch dtypes that weights and KV cache can have."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-style decoder, dense or with experts in every layer.

    Attributes:
        num_experts: Experts per layer; 0: a dense MLP.
        num_experts_per_tok: Experts a token goes to.
        norm_topk_prob: The chosen experts' weights are scaled to sum to 1.
        use_qk_norm: Queries and keys go through an RMSNorm of their own (Qwen3).
        sliding_window: Window of the ``sliding_window_layers`` in tokens; None: there are none.
        sliding_window_layers: Layers with a window; they form a KV cache group of their own.
    """

    model_type: str = "mixtral"
    vocab_size: int = 512
    hidden_size: int = 64
    intermediate_size: int = 96
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    num_experts: int = 4
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    use_qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    sliding_window_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.model_type not in ARCHITECTURES:
            raise ValueError(f"model_type {self.model_type!r} is none of {', '.join(ARCHITECTURES)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads is not a multiple of num_key_value_heads")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError("num_experts_per_tok is not in 1 .. num_experts")
        if bool(self.sliding_window_layers) != (self.sliding_window is not None):
            raise ValueError("sliding_window and sliding_window_layers go together")

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the content of a checkpoint's ``config.json``.

        Raises:
            ValueError: The checkpoint needs something this model does not have.
        """
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            raise ValueError(f"model_type {kind!r} is none of {', '.join(ARCHITECTURES)}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"rope_type {rope.get('rope_type')!r} is not supported")
        if (
            config.get("hidden_act", "silu") != "silu"
            or config.get("attention_bias")
            or config.get("mlp_bias")
        ):
            raise ValueError("only silu, without biases in attention and MLP, is supported")
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError("dense layers between expert layers are not supported")
        heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        moe = kind in ("mixtral", "qwen3_moe")
        return cls(
            model_type=kind,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"],
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            num_experts=(config.get("num_local_experts") or config.get("num_experts") or 0) if moe else 0,
            num_experts_per_tok=config["num_experts_per_tok"] if moe else 0,
            norm_topk_prob=config.get("norm_topk_prob", False) if kind == "qwen3_moe" else True,
            use_qk_norm=kind == "qwen3_moe",
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            sliding_window=window,
            sliding_window_layers=tuple(range(layers)) if window else (),
        )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache: ``num_blocks`` blocks of ``block_size`` tokens, the null block 0 among them."""

    block_size: int = 16
    num_blocks: int = 1024
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; a block holds a token at least")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, in requests and in tokens, and of one request, in tokens of prompt and output."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 4096

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len) < 1:
            raise ValueError(f"a limit below 1 lets nothing run: {self}")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Microbatches and ranks.

    Attributes:
        num_ubatches: Microbatches a step is cut into; 1: never cut (dual-batch overlap is off).
        dbo_prefill_token_threshold: Fewest tokens of a step that is cut, where some query has more than one.
        dbo_decode_token_threshold: The same, where every query is one token.
        data_parallel_size: Ranks, each with its own requests and its own share of the experts.
        data_parallel_rank: This rank.
    """

    num_ubatches: int = 1
    dbo_prefill_token_threshold: int = 512
    dbo_decode_token_threshold: int = 32
    data_parallel_size: int = 1
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        if self.num_ubatches < 1:
            raise ValueError(f"num_ubatches is {self.num_ubatches}; a step is one microbatch at least")
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise ValueError(f"there is no rank {self.data_parallel_rank} of {self.data_parallel_size}")

    @property
    def use_ubatching(self) -> bool:
        """Whether steps may be cut at all."""
        return self.num_ubatches > 1


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings.

    Attributes:
        reorder_batch_threshold: Longest query that the attention backend takes as a decode; the batch is
            ordered decodes, extends, prefills. None: the batch keeps the order of arrival.
        dtype: One of `DTYPES`. In float64 the noise that batch shapes make (1e-15) never
            decides an argmax, so equal tokens mean equal attention.
        device: ``cpu`` or ``cuda`` (which is HIP in a ROCm build of torch).
        seed: Seed of random weights.
        sanitize: Watch for attention reads of slots not yet written.
    """

    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    reorder_batch_threshold: int | None = 1
    dtype: str = "float64"
    device: str = "cpu"
    seed: int = 0
    sanitize: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
