"""The runner under other rules than none: vLLM's own, and the guard's.

`GuardedRunner` is how the mixin drops into a runner: it goes before it in the bases, and that is all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ubatch_guard.kv_cache_groups import read_groups
from ubatch_guard.reference import vllm_allows
from ubatch_guard.runner_mixin import UBatchGuardMixin
from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy, Step, feasible_cuts

from .config import EngineConfig
from .model import DecoderModel
from .parallel import Ranks
from .runner import Runner


def step_of(runner: Runner, num_scheduled_tokens: npt.NDArray[np.int32]) -> Step:
    """The step that the runner's batch stands for, its arrays copied."""
    batch = runner.input_batch
    num_reqs = len(num_scheduled_tokens)
    return Step(
        num_computed_tokens=batch.num_computed_tokens_cpu[:num_reqs].copy(),
        num_scheduled_tokens=num_scheduled_tokens.copy(),
        block_tables=tuple(
            table.get_numpy_array()[:num_reqs].copy() for table in batch.block_table.block_tables
        ),
        groups=read_groups(runner.kv_cache_config).groups,
    )


class VLLMRuleRunner(Runner):
    """Votes as vLLM's own guard does."""

    def _allow_microbatching(self, num_reqs: int, num_scheduled_tokens_np: npt.NDArray[np.int32]) -> bool:
        return vllm_allows(step_of(self, num_scheduled_tokens_np[:num_reqs]), self.reorder_batch_threshold)


class GuardedRunner(UBatchGuardMixin, Runner):
    """Votes as the exact guard does, and orders the batch if the policy says so."""

    # It cuts at multiples of padded // num_ubatches, as vLLM does.
    ubatch_guard_cuts = staticmethod(feasible_cuts)


RULES = ("unguarded", "vllm", *(policy.value for policy in Policy))
"""Names of the rules that `make_runner` knows."""


def make_runner(rule: str, config: EngineConfig, model: DecoderModel, ranks: Ranks | None = None) -> Runner:
    """A runner under one of the `RULES`.

    Raises:
        ValueError: The rule is none of them.
    """
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is none of {', '.join(RULES)}")
    if rule == "unguarded":
        return Runner(config, model, ranks)
    if rule == "vllm":
        return VLLMRuleRunner(config, model, ranks)
    runner = GuardedRunner(config, model, ranks)
    runner.ubatch_guard_settings = Settings(policy=Policy(rule))
    return runner
