"""Steps with a hazard: where it lies, and the batch order that removes it."""

from __future__ import annotations

from ubatch_guard import reference
from ubatch_guard._core import Checker
from ubatch_guard.bench import Subjects
from ubatch_guard.cases import burst


class Burst:
    """Groups of identical prompts that arrive at once, readers before their writer."""

    params = (1, 8, 64)
    param_names = ("prompts",)
    version = "1"

    def setup(self, prompts: int) -> None:
        self.step = burst(prompts)
        self.counts = self.step.num_computed_tokens, self.step.num_scheduled_tokens
        self.subjects = Subjects(self.step)
        self.subjects.check()
        self.checker = Checker(self.step.groups)
        order = self.subjects.order()
        assert order is not None
        assert not reference.unsafe_cuts(self.step.permuted(order[0]))

    def time_mirror_is_safe(self, prompts: int) -> None:
        self.subjects.mirrored()

    def time_mirror_unsafe_cuts(self, prompts: int) -> None:
        self.subjects.unsafe_cuts()

    def time_mirror_order(self, prompts: int) -> None:
        self.subjects.order()

    def time_stateless_order(self, prompts: int) -> None:
        self.checker.order(self.step.block_tables, *self.counts)
