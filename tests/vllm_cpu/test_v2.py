"""Model Runner V2 in Triton's interpreter: vLLM has no guard here, and sorts readers before writers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import runners

runners.use("v2")

import workloads
from cases import check_late_start, measure
from cpu_engine import Engine
from outcomes import Recorder
from tiny_models import save_tiny_model

from ubatch_guard.step import Policy


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(save_tiny_model(tmp_path_factory.mktemp("llama")))
    assert engine.v2
    yield engine
    engine.close()


@pytest.mark.parametrize("suffix", workloads.SUFFIXES)
def test_few_shot_burst(engine: Engine, suffix: str, record_outcome: Recorder) -> None:
    outcome, counters = measure(engine, workloads.few_shot(suffix), record_outcome)
    assert outcome.reorder_split == outcome.eligible > 0
    assert counters.reordered > 0
    # vLLM alone is wrong, and so the suite sees it.
    assert outcome.unguarded_wrong >= 6
    assert outcome.veto_split < outcome.eligible


@pytest.mark.parametrize(
    "workload",
    [lambda: workloads.grpo(groups=4, size=6), lambda: workloads.rag(requests=18), workloads.multi_turn],
    ids=["grpo", "rag", "multi_turn"],
)
def test_traffic(engine: Engine, workload, record_outcome: Recorder) -> None:
    outcome, _ = measure(engine, workload(), record_outcome)
    assert outcome.reorder_split == outcome.eligible > 0
    assert outcome.unguarded_wrong > 0


def test_decodes_still_lead(engine: Engine) -> None:
    """In a step with decodes, a burst's readers and its writer, the decodes stay in front of all others."""
    text = workloads.Text(11)
    workload = workloads.Workload("decodes and a burst")
    for _ in range(4):
        workload.add(text.tokens(40), max_tokens=8)
    shared = text.tokens(320)
    for _ in range(5):
        # Readers of one token each, as short as a decode.
        workload.add(shared + text.tokens(1), arrival=2)
    engine.set(dbo=False)
    whole = engine.run(workload)
    engine.set(dbo=True, policy=Policy.REORDER)
    guarded = engine.run(workload)
    assert guarded.num_wrong(whole) == 0
    assert engine.guard.counters.reordered == 1
    mixed = next(order for order in guarded.steps.orders if len(order) == 9)
    decodes = [int(name.split("-")[1]) < 4 for name in mixed]
    assert decodes == [True] * 4 + [False] * 5


def test_the_vote_reaches_dispatch(engine: Engine) -> None:
    """A vetoed step is one that ``dispatch_cg_and_sync_dp`` is told not to cut."""
    votes = []
    note_step = engine.note_step
    engine.note_step = lambda *step: votes.append((len(step[0]), engine.allowed)) or note_step(*step)
    for policy in (Policy.VETO, Policy.REORDER):
        engine.set(dbo=True, policy=policy)
        engine.run(workloads.few_shot("20-60"))
    engine.note_step = note_step
    # The burst is the first step of each run; the decodes after it are safe.
    bursts = [votes[0], votes[len(votes) // 2]]
    assert bursts == [(8, False), (8, True)]
    assert {allowed for place, (_, allowed) in enumerate(votes) if place not in (0, len(votes) // 2)} == {
        True
    }


def test_a_guard_switched_on_while_requests_run(engine: Engine) -> None:
    check_late_start(engine)


def test_the_check_at_the_cut_finds_what_goes_wrong(engine: Engine) -> None:
    """Where the guard only observes, the one unsafe step is cut, and found by what it really reads."""
    workload = workloads.few_shot("20-60")
    engine.set(dbo=False)
    whole = engine.run(workload)
    engine.set(dbo=True, policy=Policy.OBSERVE, verify_every=1, min_tokens=2)
    observed = engine.run(workload)
    counters = engine.guard.counters
    assert observed.num_wrong(whole) >= 6
    assert observed.steps.split == observed.steps.eligible == counters.verified > 1
    assert counters.verify_findings == counters.unsafe.total() == 1
