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
from cpu_engine import Answer, Engine, Run
from outcomes import PoisonOutcome, Recorder
from tiny_models import save_tiny_model
from workloads import Workload

from ubatch_guard.step import Policy
from ubatch_guard.vllm.poison import poison_of

SLIDING_WINDOW = 128
NGRAMS = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1, "num_speculative_tokens": 3}
FULL, WINDOWS, SMALL = "full attention", "sliding window, n-gram drafts", "small pool"
CASES: dict[str, Callable[[], Workload]] = {
    "few_shot 1": lambda: workloads.few_shot("1"),
    "few_shot 20-60": lambda: workloads.few_shot("20-60"),
    "grpo": lambda: workloads.grpo(groups=3, size=4),
    "rag": lambda: workloads.rag(requests=12),
    "preemption": lambda: workloads.preemption(requests=7, max_tokens=36),
    "repetitive": lambda: workloads.repetitive(requests=5),
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
            min_tokens=4,
            max_model_len=512,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=24,
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


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (FULL, "few_shot 1"),
        (FULL, "few_shot 20-60"),
        (FULL, "grpo"),
        (FULL, "rag"),
        (SMALL, "preemption"),
        (WINDOWS, "few_shot 20-60"),
        (WINDOWS, "repetitive"),
    ],
    indirect=["kind"],
)
def test_poison(engine: Engine, kind: str, case: str, record_outcome: Recorder) -> None:
    workload = CASES[case]()
    if kind != FULL:
        workload.called(kind)
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
    record_outcome.poisoned(
        PoisonOutcome(
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
    )
    assert guarded == uncut == set()
    # NaN that nobody reads changes no answer.
    assert _wrong(right, whole) == _wrong(plain, whole) == set()
    assert bool(preempted) is (case == "preemption")
    assert kind != WINDOWS or group_values(engine, "sliding_window") == {None, SLIDING_WINDOW}
    print("DIFF", case, kind, sorted(wrong), sorted(reported))
