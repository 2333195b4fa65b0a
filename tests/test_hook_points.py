"""Hook points read from source text, and the doctor where there is no vLLM."""

from __future__ import annotations

import importlib.util
import json

import pytest
from ubatch_guard.vllm.hook_points import probe

from ubatch_guard.cli import main
from ubatch_guard.vllm.doctor import Exit

V1 = """
class GPUModelRunner(Mixin):
    def _update_states(self, scheduler_output): ...
    def _may_reorder_batch(self, scheduler_output): ...
    def _determine_batch_execution_and_padding(
        self, num_tokens, num_reqs, num_scheduled_tokens_np, *, allow_microbatching=True
    ): ...
"""
VOTE = "    def _allow_microbatching(self, num_reqs, num_scheduled_tokens_np): ...\n"
V2 = """
class GPUModelRunner:
    def finish_requests(self, scheduler_output): ...
    def gather_batch_req_state(self, scheduler_output, dummy_run): ...
    def execute_model(self, scheduler_output, dummy_run=False):
        dispatch(num_reqs, allow_ubatching=(self.ubatch_runner is not None and not dummy_run))
"""


def test_v1_votes_by_a_method_or_before_that_by_a_keyword() -> None:
    assert probe("v1", V1 + VOTE).vote == "_allow_microbatching"
    assert probe("v1", V1 + VOTE).complete
    assert probe("v1", V1).vote == "_determine_batch_execution_and_padding(allow_microbatching=)"
    assert probe("v1", V1).complete


def test_v1_without_any_vote() -> None:
    points = probe("v1", V1.replace("allow_microbatching=True", "allow=True"))
    assert points.missing == (
        "_determine_batch_execution_and_padding(num_reqs, num_scheduled_tokens_np, allow_microbatching)",
    )


@pytest.mark.parametrize("renamed", ["_update_states", "_may_reorder_batch", "num_reqs"])
def test_v1_renamed(renamed: str) -> None:
    assert not probe("v1", (V1 + VOTE).replace(renamed, "something_else")).complete


def test_v2() -> None:
    assert probe("v2", V2).vote == "ubatch_runner"
    assert probe("v2", V2).complete
    # Before it microbatched there was nothing to guard.
    before = probe("v2", V2.replace("allow_ubatching", "num_tokens"))
    assert before.vote is None
    assert before.complete
    # A vote by other means cannot be answered for.
    assert not probe("v2", V2.replace("self.ubatch_runner is not None", "self.ubatching")).complete
    assert not probe("v2", V2.replace("gather_batch_req_state", "gather")).complete


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="there is a vLLM here")
def test_doctor_without_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == Exit.NO_VLLM == 2
    assert json.loads(capsys.readouterr().out)["status"] == "no_vllm"
