"""Which blocks are fresh in a step, and which requests have a marked token: no vLLM, no tensors."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ubatch_guard.settings import Settings
from ubatch_guard.step import Policy
from ubatch_guard.vllm import plugin, poison
from ubatch_guard.vllm.poison import fresh_blocks, requests_with
from ubatch_guard.vllm.v2 import V2


def _new(req_id: str, computed: int, *rows: list[int]) -> SimpleNamespace:
    return SimpleNamespace(req_id=req_id, num_computed_tokens=computed, block_ids=rows)


def _step(
    new: list[SimpleNamespace],
    running: dict[str, tuple[int, tuple[list[int], ...] | None]] | None = None,
    resumed: set[str] | None = None,
) -> Any:
    running = running or {}
    cached = SimpleNamespace(
        req_ids=list(running),
        num_computed_tokens=[computed for computed, _ in running.values()],
        new_block_ids=[rows for _, rows in running.values()],
    )
    if resumed is not None:
        cached.resumed_req_ids = resumed
    return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)


@pytest.mark.parametrize(
    ("computed", "fresh"),
    [(0, [5, 6, 7]), (16, [6, 7]), (17, [7]), (31, [7]), (32, [7]), (47, []), (48, [])],
)
def test_a_new_request_has_computed_tokens_in_its_first_columns(computed: int, fresh: list[int]) -> None:
    """A block that holds some of them, a copy of a part of another block, is not fresh."""
    assert fresh_blocks(_step([_new("a", computed, [5, 6, 7])]), [16]) == [fresh]


def test_a_block_is_its_writers_wherever_a_reader_lists_it() -> None:
    """The reader comes first or last, and the block is fresh once."""
    writer, reader = _new("w", 0, [1, 2]), _new("r", 32, [1, 2, 3])
    assert fresh_blocks(_step([writer, reader]), [16]) == [[1, 2, 3]]
    assert fresh_blocks(_step([reader, writer]), [16]) == [[3, 1, 2]]
    # Without the writer, nothing of it is.
    assert fresh_blocks(_step([reader]), [16]) == [[3]]


def test_all_that_a_running_request_gets_is_fresh() -> None:
    step = _step([], {"a": (40, ([9],)), "b": (16, None), "c": (16, ([],))})
    assert fresh_blocks(step, [16]) == [[9]]


def test_a_resumed_request_lists_all_its_blocks() -> None:
    running = {"a": (32, ([1, 2, 3],)), "b": (32, ([4],))}
    assert fresh_blocks(_step([], running, resumed={"a"}), [16]) == [[3, 4]]
    # Only the release says who is resumed.
    assert fresh_blocks(_step([], running, resumed=set()), [16]) == [[1, 2, 3, 4]]


def test_groups_have_columns_of_their_own() -> None:
    """Blocks out of a window are the null block; a group that is left out has an endless column."""
    step = _step([_new("a", 64, [0, 0, 0, 4, 5], [11, 12, 13], [21])], {"b": (64, ([0, 6], [14], [22]))})
    assert fresh_blocks(step, [16, 32, 1 << 62]) == [[5, 6], [13, 14], [22]]


def test_requests_with_marked_tokens() -> None:
    rows = np.zeros(12, dtype=np.bool_)
    rows[[3, 8, 11]] = True
    # The last mark is in the padding.
    assert requests_with(rows, ["a", "b", "c", "d"], [3, 2, 3, 2]) == ["b", "d"]
    assert requests_with(rows, [], []) == []


class _Pool:
    def get_new_blocks(self, num_blocks: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(block_id=block) for block in range(1, num_blocks + 1)]


class _Scheduler:
    def __init__(self) -> None:
        self.kv_cache_manager = SimpleNamespace(block_pool=_Pool())

    def schedule(self) -> SimpleNamespace:
        self.kv_cache_manager.block_pool.get_new_blocks(3)
        return SimpleNamespace()


class _Runner:
    def execute_model(self, scheduler_output: Any) -> None: ...

    def prepare_attn(self, input_batch: Any) -> None: ...


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type, type, type]]:
    """A pool, a scheduler and a runner, as the modules of vLLM have them, without hooks."""
    named = {
        poison.BLOCK_POOL: ("BlockPool", type("BlockPool", (_Pool,), dict(vars(_Pool)))),
        poison.SCHEDULER: ("Scheduler", type("Scheduler", (_Scheduler,), dict(vars(_Scheduler)))),
        V2.module: (V2.cls, type(V2.cls, (_Runner,), dict(vars(_Runner)))),
    }
    for name, (cls_name, cls) in named.items():
        module = ModuleType(name)
        # Its guard finds no sources, and leaves it alone.
        module.__file__ = None
        setattr(module, cls_name, cls)
        monkeypatch.setitem(sys.modules, name, module)
    yield tuple(cls for _, cls in named.values())
    plugin.uninstall()


def _hooked(*classes: type) -> list[str]:
    return [name for cls in classes for name, method in vars(cls).items() if hasattr(method, "__wrapped__")]


@pytest.mark.parametrize("policy", [None, Policy.REORDER])
def test_nothing_is_hooked_unless_it_is_asked_for(
    classes: tuple[type, type, type], policy: Policy | None, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.install(Settings(policy=policy))
    assert _hooked(*classes) == []
    plugin.install(Settings(policy=policy, poison=True))
    assert _hooked(*classes) == ["get_new_blocks", "schedule", "execute_model", "prepare_attn"]
    assert caplog.text.count("POISON IS ON") == 1


def test_an_output_says_what_the_pool_handed_out(classes: tuple[type, type, type]) -> None:
    """Whatever became of the requests; and each block in one output, pickled or not."""
    plugin.install(Settings(policy=None, poison=True))
    scheduler = classes[1]()
    scheduler.kv_cache_manager.block_pool = classes[0]()
    for _ in range(2):
        output = pickle.loads(pickle.dumps(scheduler.schedule()))
        assert list(vars(output).values()) == [[1, 2, 3]]
