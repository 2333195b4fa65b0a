"""NaN in the slots that nobody has written: who reads one, against whose answers are wrong.

On the newest release with Model Runner V2, on those that have it with V1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import runners

runners.use(runners.present()[0])
os.environ["UBATCH_GUARD_POISON"] = "1"

import workloads
from cases import group_values, preemptions
from cpu_engine import BLOCK_SIZE, Engine, Run
from outcomes import PoisonOutcome, Recorder
from tiny_models import save_tiny_model
from workloads import Workload

from ubatch_guard.step import Policy
from ubatch_guard.vllm.poison import poison_of

SLIDING_WINDOW = 128
NGRAMS = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1, "num_speculative_tokens": 3}
FULL, WINDOWS, SMALL = "full attention", "sliding window, n-gram drafts", "7 blocks"
CHUNK = 2 * BLOCK_SIZE
CASES: dict[str, list[Callable[[], Workload]]] = {
    FULL: [
        lambda: workloads.few_shot("1"),
        lambda: workloads.few_shot("20-60"),
        lambda: workloads.grpo(groups=3, size=4),
        lambda: workloads.rag(requests=12),
    ],
    SMALL: [lambda: workloads.preemption(requests=5, max_tokens=12).called(SMALL)],
    WINDOWS: [lambda: workloads.few_shot("20-60", requests=5).called(WINDOWS)],
}


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """Given by the tests."""
    return request.param


@pytest.fixture(scope="module")
def engine(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("models") / "model"
    if kind == WINDOWS:
        model = save_tiny_model(folder, sliding_window=SLIDING_WINDOW)
        engine = Engine(model, min_tokens=8, max_num_batched_tokens=1024, speculative_config=NGRAMS)
    elif kind == SMALL:
        engine = Engine(
            save_tiny_model(folder),
            min_tokens=2,
            max_model_len=7 * BLOCK_SIZE,
            max_num_batched_tokens=2 * CHUNK,
            long_prefill_token_threshold=CHUNK,
            # One is the null block.
            num_gpu_blocks_override=8,
            max_num_seqs=8,
            scheduling_policy="priority",
        )
    else:
        engine = Engine(save_tiny_model(folder))
    yield engine
    engine.close()


def _wrong(run: Run, whole: Run) -> set[int]:
    """Places of the requests that were answered otherwise than in the whole run."""
    pairs = enumerate(zip(run.answers, whole.answers, strict=True))
    return {place for place, (mine, theirs) in pairs if mine.differs(theirs)}


def _reported(engine: Engine, workload: Workload, **how) -> tuple[set[int], Run]:
    """Run with poison; places of the requests that read NaN."""
    engine.set(**how, poison=True)
    poison = poison_of(engine.runner)
    assert poison is not None
    before, slots = set(poison.reported), poison.slots
    run = engine.run(workload)
    assert poison_of(engine.runner) is poison, "it gave up"
    assert poison.slots > slots
    return {int(name.split("-")[1]) for name in poison.reported.keys() - before}, run


# On 0.32 no engine can be made after one with n-gram drafts (``triton_utils/dispatcher.py``, numba).
@pytest.mark.parametrize("kind", [FULL, SMALL, WINDOWS], indirect=True)
def test_poison(engine: Engine, kind: str, record_outcome: Recorder) -> None:
    assert kind != WINDOWS or group_values(engine, "sliding_window") == {None, SLIDING_WINDOW}
    outcomes = [_measure(engine, case(), kind) for case in CASES[kind]]
    for outcome in outcomes:
        record_outcome.poisoned(outcome)
        # All that is wrong is reported, and nothing else.
        assert outcome.reported == outcome.wrong == outcome.both
        assert outcome.guarded_reported == outcome.uncut_reported == 0
    assert any(outcome.wrong for outcome in outcomes) or kind == SMALL


def _measure(engine: Engine, workload: Workload, kind: str) -> PoisonOutcome:
    cut = {"dbo": True, "threshold": None if engine.v2 else 128}
    engine.set(**cut | {"dbo": False})
    whole = engine.run(workload)
    engine.set(**cut, vllm_guard=False)
    wrong = _wrong(engine.run(workload), whole)
    reported, _ = _reported(engine, workload, **cut, vllm_guard=False)
    with preemptions(engine) as preempted:
        guarded, right = _reported(engine, workload, **cut, policy=Policy.REORDER)
    assert right.steps.split == right.steps.eligible > 0
    assert engine.guard.counters.poison_reads == len(guarded)
    uncut, plain = _reported(engine, workload, **cut | {"dbo": False})
    # NaN that nobody reads changes no answer.
    assert _wrong(right, whole) == _wrong(plain, whole) == set()
    assert bool(preempted) is (kind == SMALL)
    return PoisonOutcome(
        release=engine.release,
        runner="V2" if engine.v2 else "V1",
        case=workload.name,
        requests=len(workload.prompts),
        wrong=len(wrong),
        reported=len(reported),
        both=len(wrong & reported),
        guarded_reported=len(guarded),
        uncut_reported=len(uncut),
    )


@pytest.mark.parametrize("kind", [SMALL], indirect=True)
def test_priority_preemption_shows(engine: Engine, kind: str, record_outcome: Recorder) -> None:
    """A request preempted in the step that scheduled it resumes on a block that nobody wrote; no step is cut.

    The steps are those of contrib/vllm-0.34/priority_preemption.py.
    """
    text = workloads.Text(13)
    alone = Workload("alone")
    alone.add(text.tokens(6 * BLOCK_SIZE + BLOCK_SIZE * 3 // 4), max_tokens=1)
    engine.set(dbo=False)
    whole = engine.run(alone)

    urgent = text.tokens(BLOCK_SIZE)

    def interrupted() -> Run:
        """The same request, and from the second step on an urgent one."""
        both = Workload("interrupted")
        both.add(alone.prompts[0], max_tokens=1)
        both.add(urgent, max_tokens=2, arrival=1)
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler

        def before_step(step: int) -> None:
            # Releases differ in how much of a lone prompt they take at once.
            scheduler.max_num_scheduled_tokens = CHUNK if step == 0 else 2 * CHUNK

        with preemptions(engine) as preempted:
            run = engine.run(both, before_step, priorities=[1, 0])
        assert len(preempted) == 1
        return Run(run.answers[:1], run.steps)

    wrong = interrupted().num_wrong(whole)
    engine.set(dbo=False, poison=True)
    poison = poison_of(engine.runner)
    assert poison is not None
    before = set(poison.reported)
    interrupted()
    reported = [name.split("-")[1] for name in poison.reported.keys() - before]
    record_outcome.poisoned(
        PoisonOutcome(
            release=engine.release,
            runner="V2" if engine.v2 else "V1",
            case="priority preemption, no step cut",
            requests=2,
            wrong=wrong,
            reported=len(reported),
            both=min(wrong, len(reported)),
            guarded_reported=None,
            uncut_reported=len(reported),
        )
    )
    assert wrong == 1
    assert reported == ["0"]
