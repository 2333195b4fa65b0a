"""Model Runner V1 with KV cache groups of several kinds: windows, chunks, and layers that keep a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import runners

runners.use("v1")

import workloads
from cases import group_values, measure, scheduler_outputs
from cpu_engine import Engine
from outcomes import Recorder
from tiny_models import save_lfm2, save_llama4, save_tiny_model
from workloads import Workload

from ubatch_guard.step import Policy

SLIDING_WINDOW = 128
CHUNK_SIZE = 256
WINDOWS, SOME_CHUNKS, ALL_CHUNKS, STATES = (
    "sliding window",
    "some layers chunked",
    "all layers chunked",
    "states",
)


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """Given by the tests."""
    return request.param


@pytest.fixture(scope="module")
def engine(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("models") / "model"
    if kind == WINDOWS:
        save_tiny_model(folder, sliding_window=SLIDING_WINDOW)
    elif kind == STATES:
        save_lfm2(folder)
    else:
        save_llama4(folder, CHUNK_SIZE, full_attention=kind == SOME_CHUNKS)
    engine = Engine(folder, max_num_batched_tokens=1024)
    yield engine
    engine.close()


@pytest.mark.parametrize("kind", [WINDOWS], indirect=True)
@pytest.mark.parametrize("threshold", [1, 128])
@pytest.mark.parametrize("case", [workloads.few_shot, workloads.few_shot_writer_last])
def test_few_shot(engine: Engine, kind: str, case, threshold: int, record_outcome: Recorder) -> None:
    outcome, counters = measure(engine, case("20-60").called(kind), record_outcome, threshold=threshold)
    assert group_values(engine, "sliding_window") == {None, SLIDING_WINDOW}
    assert outcome.reorder_split == outcome.eligible > 0
    assert outcome.unguarded_wrong > 0
    assert counters.reordered > 0


@pytest.mark.parametrize("kind", [WINDOWS], indirect=True)
def test_rag(engine: Engine, kind: str, record_outcome: Recorder) -> None:
    outcome, _ = measure(engine, workloads.rag().called(kind), record_outcome, threshold=128)
    assert outcome.reorder_split == outcome.eligible > 0
    assert outcome.unguarded_wrong > 0


@pytest.mark.parametrize("kind", [SOME_CHUNKS, ALL_CHUNKS], indirect=True)
@pytest.mark.parametrize("threshold", [1, 128])
@pytest.mark.parametrize(
    "case", [lambda: workloads.few_shot("20-60"), workloads.rag], ids=["few_shot", "rag"]
)
def test_chunks(
    engine: Engine,
    kind: str,
    case: Callable[[], Workload],
    threshold: int,
    record_outcome: Recorder,
) -> None:
    outcome, counters = measure(engine, case().called(kind), record_outcome, threshold=threshold)
    assert group_values(engine, "attention_chunk_size") == (
        {None, CHUNK_SIZE} if kind == SOME_CHUNKS else {CHUNK_SIZE}
    )
    assert outcome.reorder_split == outcome.eligible > 0
    # Where all layers attend within chunks, vLLM computes a prompt from its last chunk on, so writers have
    # computed tokens as well, and are not sorted behind readers that are as long.
    if threshold == 128 or kind == SOME_CHUNKS:
        assert outcome.unguarded_wrong > 0
        assert counters.reordered > 0


@pytest.mark.parametrize("kind", [STATES], indirect=True)
@pytest.mark.parametrize("case", [lambda: workloads.few_shot("20-60"), workloads.rag])
def test_states_are_never_taken_in_the_step_that_makes_them(
    engine: Engine, kind: str, case: Callable[[], Workload]
) -> None:
    """vLLM cannot cut a step of such a model: the guard votes on every step, and none is cut."""
    workload = case()
    engine.set(dbo=False, threshold=128)
    whole = engine.run(workload)
    # Under this threshold the other models have unsafe steps in all of these workloads.
    engine.set(dbo=True, threshold=128, min_tokens=1_000_000, policy=Policy.REORDER, verify_every=1)
    with scheduler_outputs(engine) as scheduled:
        run = engine.run(workload)
    guard = engine.guard
    assert run.num_wrong(whole) == 0
    assert guard.counters.mirror_differences == 0
    assert guard.counters.steps == run.steps.steps
    # Prefixes are found in the cache, but those that another request of the step computes are waited for.
    hits = [
        request
        for step in scheduled
        for request in step.scheduled_new_reqs
        if request.num_computed_tokens > 0
    ]
    assert len(hits) >= len(workload.prompts) // 2
    assert not guard.counters.unsafe
    assert not guard.counters.vetoed
