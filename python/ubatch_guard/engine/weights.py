"""Weights of the decoder: from a Hugging Face checkpoint, or random."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import torch
from safetensors import safe_open
from torch import Tensor

from .config import ModelConfig
from .model import DecoderModel
from .parallel import Ranks

# Mixtral's names for what everyone else calls gate, down and up.
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.")


def read_config(checkpoint: Path) -> ModelConfig:
    """The model of a checkpoint folder."""
    return ModelConfig.from_hugging_face(json.loads((checkpoint / "config.json").read_text()))


def load_checkpoint(
    checkpoint: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks
) -> DecoderModel:
    """A model with the weights of a folder of ``*.safetensors`` files; a rank loads its own experts only.

    Raises:
        ValueError: A weight is missing, left over or of another shape than the configuration says.
    """
    model = _build(config, dtype, device, ranks)
    wanted = model.state_dict()
    loaded = set()
    for name, weight in _read(checkpoint, ranks, config):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name not in wanted or wanted[name].shape != weight.shape:
            raise ValueError(
                f"{checkpoint}: weight {name} of shape {tuple(weight.shape)} does not fit the model"
            )
        wanted[name].copy_(weight)
        loaded.add(name)
    if missing := wanted.keys() - loaded:
        raise ValueError(f"{checkpoint}: weights are missing: {', '.join(sorted(missing))}")
    return model


def random_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks, seed: int
) -> DecoderModel:
    """A model with random weights, the same for every dtype, device and number of ranks.

    They are drawn well above the scale training starts from, queries and keys most of all: attention has to
    pick out tokens, or a prompt read wrongly would not change a single answer.
    """
    model = _build(config, dtype, device, ranks)
    first_expert = ranks.rank * (config.num_experts // ranks.size)
    for name, weight in model.state_dict().items():
        _draw(_shift_expert(name, first_expert), weight, seed)
    return model


def _build(config: ModelConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> DecoderModel:
    with device:
        model = DecoderModel(config, ranks)
    return model.to(dtype).eval().requires_grad_(False)


def _draw(name: str, weight: Tensor, seed: int) -> None:
    """Fill a weight from a generator of its own, named after it."""
    if weight.dim() == 1:
        weight.fill_(1.0)
        return
    generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
    scale = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
    if "q_proj" in name or "k_proj" in name:
        scale *= 2.0
    weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * scale)


def _shift_expert(name: str, offset: int) -> str:
    """The weight's name with the number of the expert in it, if there is one, moved by ``offset``."""
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + offset}.", name)


def _read(checkpoint: Path, ranks: Ranks, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The weights this rank needs, under the names of the model."""
    num_local = config.num_experts // ranks.size
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (no mapping)
                name = stored.removeprefix("model.").replace(".block_sparse_moe.", ".mlp.")
                for old, new in _MIXTRAL.items():
                    name = name.replace(f".{old}.", f".{new}.")
                expert = _EXPERT.match(name)
                if expert and int(expert[2]) // num_local != ranks.rank:
                    continue
                yield _shift_expert(name, -ranks.rank * num_local), tensors.get_tensor(stored)
