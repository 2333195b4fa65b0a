"""Tiny random models, big enough that attention decides their tokens."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

HIDDEN_SIZE = 128
_COMMON = {
    "vocab_size": 512,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def save_tiny_model(folder: Path, *, sliding_window: int | None = None, seed: int = 0) -> Path:
    """A Llama, or with ``sliding_window`` a Gemma 3 whose layers have a window in turn."""
    torch.manual_seed(seed)
    common = {**_COMMON, "num_hidden_layers": 3, "head_dim": 32}
    if sliding_window is None:
        return _save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**common)), folder)
    config = transformers.Gemma3TextConfig(
        **common,
        sliding_window=sliding_window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=32,
    )
    return _save(transformers.Gemma3ForCausalLM(config), folder)


def save_eagle_head(folder: Path, seed: int = 1) -> Path:
    """An EAGLE head for the tiny Llama, as a checkpoint: one decoder layer and ``fc``, which takes it in.

    It guesses at random, so nearly all its drafts are refused.
    """
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **_COMMON, num_hidden_layers=1, head_dim=32, architectures=["LlamaForCausalLM"]
    )
    layer = transformers.LlamaForCausalLM(config).model.layers[0]
    _draw_weights(layer)
    weights = {
        f"layers.0.{name}": parameter.detach()
        for name, parameter in layer.named_parameters()
        # vLLM's EAGLE layer has none; the embedding is the target model's.
        if not name.startswith("input_layernorm")
    }
    fc = torch.nn.Linear(2 * HIDDEN_SIZE, HIDDEN_SIZE, bias=False)
    _draw_weights(fc)
    weights["fc.weight"] = fc.weight.detach()
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config.save_pretrained(folder)
    return folder


def save_llama4(folder: Path, attention_chunk_size: int, *, full_attention: bool, seed: int = 0) -> Path:
    """A Llama 4 without experts; its layers attend within chunks, but with ``full_attention`` the second."""
    torch.manual_seed(seed)
    config = transformers.Llama4TextConfig(
        **_COMMON,
        num_hidden_layers=3,
        head_dim=32,
        intermediate_size_mlp=256,
        attention_chunk_size=attention_chunk_size,
        # Layers without rotary embeddings attend to everything.
        no_rope_layers=[1, int(not full_attention), 1],
        interleave_moe_layer_step=0,
        num_local_experts=1,
        moe_layers=[],
    )
    return _save(transformers.Llama4ForCausalLM(config), folder)


def save_lfm2(folder: Path, seed: int = 0) -> Path:
    """An LFM2: layers with a state (a short convolution, to vLLM a Mamba layer) and attention in turn."""
    torch.manual_seed(seed)
    config = transformers.Lfm2Config(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        # What vLLM reads and this release of transformers no longer sets.
        conv_dim=HIDDEN_SIZE,
        block_dim=HIDDEN_SIZE,
        block_ff_dim=256,
        block_ffn_dim_multiplier=1.0,
        block_multiple_of=32,
    )
    return _save(transformers.Lfm2ForCausalLM(config), folder)


def _save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    _draw_weights(model)
    model.to(torch.float32).save_pretrained(folder)
    return folder


def _draw_weights(module: torch.nn.Module) -> None:
    """Draw weights large enough that attention decides the tokens: under vLLM's dummy weights a hazard would
    change no logit.

    The logits are small: that changes no token, and their rounding stays far below the tolerance of the
    log-probabilities.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 2 and "embed" in name:
                parameter.normal_(0.0, 1.0)
            elif parameter.ndim == 2:
                parameter.normal_(0.0, (0.1 if "lm_head" in name else 3.0) / parameter.shape[1] ** 0.5)
