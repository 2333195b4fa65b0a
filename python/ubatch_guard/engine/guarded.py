"""The runner under other rules than none: vLLM's own, and the guard's.

`GuardedRunner` is how the mixin drops into a runner: it goes before it in the bases, and that is all.
`MovingRunner` is for a runner that chooses its own cut: it asks the guard for one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ubatch_guard.guard import Guard
from ubatch_guard.kv_cache_groups import read_groups
from ubatch_guard.reference import vllm_allows
from ubatch_guard.runner_mixin import UBatchGuardMixin
from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy, Step, feasible_cuts

from .config import RULES, EngineConfig
from .model import DecoderModel
from .parallel import Ranks
from .runner import Runner
from .ubatch import multiples


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


class MovingRunner(Runner):
    """Cuts a step at the safe cuts nearest to the runner's own; where there are none, votes to run it whole.

    Raises:
        ValueError: There are several ranks.
    """

    def __init__(self, config: EngineConfig, model: DecoderModel, ranks: Ranks | None = None) -> None:
        super().__init__(config, model, ranks)
        if self.ranks.size > 1:
            raise ValueError(
                f"{self.ranks.size} ranks: a cut can be moved on one alone, several settle theirs in the vote"
            )
        self._guard = Guard(read_groups(self.kv_cache_config).groups)

    def _allow_microbatching(self, num_reqs: int, num_scheduled_tokens_np: npt.NDArray[np.int32]) -> bool:
        num_ubatches = self.parallel_config.num_ubatches
        step = step_of(self, num_scheduled_tokens_np[:num_reqs])
        if num_ubatches < 2 or step.num_tokens < num_ubatches:
            return False  # it is not cut in any case
        self._split_point = self._guard.nearest_safe_cuts(step, multiples(step.num_tokens, num_ubatches))
        return self._split_point is not None


def make_runner(rule: str, config: EngineConfig, model: DecoderModel, ranks: Ranks | None = None) -> Runner:
    """A runner under one of the `config.RULES`.

    Raises:
        ValueError: The rule is none of them, or not for several ranks.
    """
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is none of {', '.join(RULES)}")
    if rule == "unguarded":
        return Runner(config, model, ranks)
    if rule == "vllm":
        return VLLMRuleRunner(config, model, ranks)
    if rule == "move":
        return MovingRunner(config, model, ranks)
    runner = GuardedRunner(config, model, ranks)
    runner.ubatch_guard_settings = Settings(policy=Policy(rule))
    return runner
