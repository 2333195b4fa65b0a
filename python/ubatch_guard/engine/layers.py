"""Layers of the decoder: RMSNorm, rotary embedding, attention over a paged cache, dense and expert MLPs.

Weights carry Hugging Face's shapes, ``[out, in]``. Activations are ``[num_tokens, hidden_size]``: the tokens
of all requests of a microbatch, one after the other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .forward_context import ForwardContext
from .parallel import ExpertRoute, Ranks


class Linear(nn.Module):
    """A projection without bias. Unlike torch's own it draws no weights that would be overwritten."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return F.linear(hidden, self.weight)


class Embedding(nn.Module):
    """A row of weights per token id."""

    def __init__(self, num_embeddings: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, size))

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 ``[num_tokens]`` to ``[num_tokens, size]``."""
        return F.embedding(input_ids, self.weight)


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape ``[..., size]``."""
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(variance + self.eps))


def rotary_embedding(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine for int64 positions ``[num_tokens]``: shape ``[num_tokens, 1, head_dim / 2]`` each.

    The angles are computed in float64 whatever the dtype of the model: positions reach into the thousands.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = torch.outer(positions.double(), theta**-exponents).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head against each other: ``[num_tokens, num_heads, head_dim]``."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention: all KV of the microbatch is written before any is read."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, heads, kv_heads, dim = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.layer, self.head_dim, self.queries_per_kv = layer, dim, heads // kv_heads
        self.q_proj = Linear(hidden, heads * dim)
        self.k_proj = Linear(hidden, kv_heads * dim)
        self.v_proj = Linear(hidden, kv_heads * dim)
        self.o_proj = Linear(heads * dim, hidden)
        norm = config.use_qk_norm
        self.q_norm: nn.Module = RMSNorm(dim, config.rms_norm_eps) if norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(dim, config.rms_norm_eps) if norm else nn.Identity()

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        """Padding comes out as the projection of zeros."""
        queries = rotate(self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))), *rotary)
        keys = rotate(self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))), *rotary)
        values = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))

        metadata = context.attention[self.layer]
        cache = context.kv_caches[self.layer]
        actual = context.num_actual_tokens
        cache.write(metadata.slot_mapping, keys[:actual], values[:actual], context.sanitizer)
        output = torch.zeros_like(queries)
        for span in metadata.spans:
            seen_keys, seen_values = cache.read(span, context.sanitizer)
            attended = F.scaled_dot_product_attention(
                queries[span.start : span.stop].transpose(0, 1).unsqueeze(0),
                seen_keys.repeat_interleave(self.queries_per_kv, dim=1).transpose(0, 1).unsqueeze(0),
                seen_values.repeat_interleave(self.queries_per_kv, dim=1).transpose(0, 1).unsqueeze(0),
                attn_mask=span.mask,
            )
            output[span.start : span.stop] = attended.squeeze(0).transpose(0, 1)
        projected: Tensor = self.o_proj(output.flatten(1))
        return projected


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """``[num_tokens, hidden_size]`` to the same shape; the context is not looked at."""
        return self.apply_to(hidden)

    def apply_to(self, hidden: Tensor) -> Tensor:
        """The MLP on any rows."""
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return projected


class MoE(nn.Module):
    """A token goes to ``num_experts_per_tok`` experts, which may live on other ranks.

    The two exchanges, there and back, are where a microbatch hands over to the next.
    """

    def __init__(self, config: ModelConfig, ranks: Ranks) -> None:
        super().__init__()
        if config.num_experts % ranks.size:
            raise ValueError(f"{config.num_experts} experts cannot be dealt out to {ranks.size} ranks")
        self.ranks = ranks
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.num_experts)
        num_local = config.num_experts // ranks.size
        self.first_expert = ranks.rank * num_local
        self.experts = nn.ModuleList(
            MLP(config.hidden_size, config.intermediate_size) for _ in range(num_local)
        )

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """``[num_tokens, hidden_size]`` to the same shape; padding stays at home and comes out as zeros."""
        actual = hidden[: context.num_actual_tokens]
        weights, experts = F.softmax(self.gate(actual), dim=-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)

        route = ExpertRoute(self.ranks, experts, self.num_experts)
        received = context.overlap(lambda: route.dispatch(actual))
        computed = self._run_experts(received, route)
        returned = context.overlap(lambda: route.combine(computed))
        output = torch.zeros_like(hidden)
        output[: len(actual)] = (route.restore(returned, self.top_k) * weights.unsqueeze(-1)).sum(1)
        return output

    def _run_experts(self, received: Tensor, route: ExpertRoute) -> Tensor:
        computed = torch.empty_like(received)
        for expert, rows in zip(self.experts, route.rows_of_experts(), strict=True):
            if not rows:
                continue
            assert isinstance(expert, MLP)
            outputs = expert.apply_to(torch.cat([received[part] for part in rows]))
            lengths = [part.stop - part.start for part in rows]
            for part, output in zip(rows, outputs.split_with_sizes(lengths), strict=True):
                computed[part] = output
        return computed
