"""A Llama-style decoder, dense or with experts; module names are those of Hugging Face's Llama."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .forward_context import ForwardContext
from .layers import MLP, Attention, Embedding, Linear, MoE, RMSNorm, rotary_embedding
from .parallel import Ranks


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before and added to what came in."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (
            MoE(config, ranks) if config.num_experts else MLP(config.hidden_size, config.intermediate_size)
        )

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        """``[num_tokens, hidden_size]`` to the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, context)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden), context)
        return output


class DecoderModel(nn.Module):
    """Token ids to hidden states, hidden states to logits."""

    def __init__(self, config: ModelConfig, ranks: Ranks | None = None) -> None:
        super().__init__()
        ranks = ranks or Ranks()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, ranks) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states ``[num_tokens, hidden_size]`` for int64 token ids and positions ``[num_tokens]``."""
        hidden: Tensor = self.embed_tokens(input_ids)
        rotary = rotary_embedding(positions, self.config.head_dim, self.config.rope_theta, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotary, context)
        normed: Tensor = self.norm(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[rows, vocab_size]`` of hidden states ``[rows, hidden_size]``."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return F.linear(hidden, head.weight)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device
