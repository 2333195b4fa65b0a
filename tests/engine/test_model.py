"""The decoder computes what transformers computes from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ubatch_guard.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from ubatch_guard.engine.llm_engine import LLMEngine, load_model
from ubatch_guard.engine.outputs import NewRequestData, SchedulerOutput
from ubatch_guard.engine.request import SamplingParams
from ubatch_guard.engine.runner import Runner
from ubatch_guard.engine.weights import read_config

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # well above the default, so that attention decides
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
MODELS = {
    "llama": (transformers.LlamaConfig, {"rope_theta": 5000.0}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 9}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    ),
    "qwen3-moe-normed": (
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config_class, options = MODELS[request.param]
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**COMMON, **options}))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder


def hidden_states(runner: Runner, token_ids: list[int], chunk: int) -> torch.Tensor:
    """Hidden states of a prompt that the runner takes in chunks; float ``[num_tokens, hidden_size]``."""
    seen = []
    run_model = runner._run_model
    runner._run_model = lambda *args: seen.append(run_model(*args)) or seen[-1]  # type: ignore[method-assign]
    num_blocks = -(-len(token_ids) // 16)
    groups = len(runner.kv_cache_config.kv_cache_groups)
    blocks = tuple(list(range(1 + g * num_blocks, 1 + (g + 1) * num_blocks)) for g in range(groups))
    output = SchedulerOutput(scheduled_new_reqs=[NewRequestData("a", token_ids, SamplingParams(), blocks, 0)])
    for start in range(0, len(token_ids), chunk):
        length = min(chunk, len(token_ids) - start)
        if start:
            output = SchedulerOutput()
            cached = output.scheduled_cached_reqs
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens = ["a"], [None], [start]
        output.num_scheduled_tokens = {"a": length}
        output.total_num_scheduled_tokens = length
        runner.execute_model(output)
    return torch.cat(seen)


@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_logits_equal_transformers(checkpoint: Path, chunk: int) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).float().eval()
    config = EngineConfig(model_config=read_config(checkpoint), dtype="float32")
    runner = Runner(config, load_model(config, checkpoint))
    token_ids = np.random.default_rng(3).integers(0, 96, 40).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
        got = runner.model.compute_logits(hidden_states(runner, token_ids, chunk))
    assert expected.std() > 0.5  # logits that say nothing would agree with any others
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_generated_tokens_equal_transformers(checkpoint: Path) -> None:
    reference = (
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation="eager")
        .double()
        .eval()
    )
    config = EngineConfig(model_config=read_config(checkpoint), cache_config=CacheConfig(block_size=4))
    engine = LLMEngine(config, Runner(config, load_model(config, checkpoint)))
    rng = np.random.default_rng(5)
    prompts = {f"r{i}": rng.integers(0, 96, length).tolist() for i, length in enumerate((5, 18, 33))}
    for req_id, token_ids in prompts.items():
        engine.add_request(req_id, token_ids, SamplingParams(max_tokens=12))
    outputs = engine.run()
    for req_id, token_ids in prompts.items():
        with torch.inference_mode():
            generated = reference.generate(torch.tensor([token_ids]), max_new_tokens=12, do_sample=False)
        assert outputs[req_id] == generated[0, len(token_ids) :].tolist()


def test_a_wrong_rotation_is_noticed(checkpoint: Path) -> None:
    """Negative control: the comparison above sees a model that differs in one detail."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).float().eval()
    right = read_config(checkpoint)
    wrong = ModelConfig(
        **{name: getattr(right, name) for name in right.__slots__} | {"rope_theta": right.rope_theta * 1.1}
    )
    config = EngineConfig(model_config=wrong, dtype="float32")
    runner = Runner(config, load_model(config, checkpoint))
    token_ids = np.random.default_rng(3).integers(0, 96, 40).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
        got = runner.model.compute_logits(hidden_states(runner, token_ids, 64))
    assert (got - expected).abs().max() > 1e-2


def test_what_the_model_lacks_is_refused() -> None:
    base = {"model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1, "hidden_size": 32}
    base |= {"vocab_size": 8, "intermediate_size": 8, "rms_norm_eps": 1e-6}
    assert ModelConfig.from_hugging_face(base).head_dim == 8
    for extra in (
        {"model_type": "gpt2"},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
    ):
        with pytest.raises(ValueError, match=r"supported|none of"):
            ModelConfig.from_hugging_face(base | extra)


def test_a_checkpoint_that_does_not_fit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = read_config(checkpoint)
    values = {name: getattr(config, name) for name in config.__slots__}
    more = EngineConfig(model_config=ModelConfig(**values | {"num_hidden_layers": 4}))
    with pytest.raises(ValueError, match="missing"):
        load_model(more, checkpoint)
    wider = EngineConfig(model_config=ModelConfig(**values | {"vocab_size": 97}))
    with pytest.raises(ValueError, match="does not fit"):
        load_model(wider, checkpoint)
    assert ParallelConfig().use_ubatching is False
