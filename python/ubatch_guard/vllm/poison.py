"""For tests and debugging, never for a live server: a read of a slot that nobody wrote shows as NaN.

With ``UBATCH_GUARD_POISON=1`` the keys of slots are NaN from the time when their block is handed out, or a
step is about to write them, until they are written. A token that attends to one has NaN for its hidden state,
and its request is reported. No rule about who may read is asked, and no guard is needed.

Slots are written by the layers' own ``do_kv_cache_update``, whatever the layout of the cache, with keys of
NaN and values of zero. Kernels compute whole tiles; a score they mask before the softmax, where NaN goes
away, but a value only by a weight of zero, and 0 * NaN is NaN.

A request that has read NaN writes NaN from there on: into its own blocks, and so into those that others hit.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ubatch_guard.kv_cache_groups import read_groups
from ubatch_guard.log import described, say
from ubatch_guard.settings import Settings
from ubatch_guard.vllm.attach import SETTINGS
from ubatch_guard.vllm.generations import GENERATIONS, runner_guard

_KEY = "_ubatch_guard_poison"
_HANDED_OUT = "_ubatch_guard_handed_out"
_WRITER = ("layer", "key", "value", "kv_cache", "slot_mapping")
_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")
_SLOTS_AT_ONCE = 4096

SCHEDULER = "vllm.v1.core.sched.scheduler"
BLOCK_POOL = "vllm.v1.core.block_pool"
MODULES = (SCHEDULER, BLOCK_POOL, *(generation.module for generation in GENERATIONS))
"""Where `hook_module` has something to hook."""


def fresh_blocks(scheduler_output: Any, tokens_per_column: Sequence[int]) -> list[list[int]]:
    """Blocks that come into use in a step and that hold nothing for the request that got them.

    Of new and resumed requests, the blocks in columns that no computed token reaches; of running ones, all
    that are new. A block that one request lists as computed and another as its own is the other's. The null
    block is left out.

    Args:
        scheduler_output: vLLM's ``SchedulerOutput``.
        tokens_per_column: Tokens that a column of the block table spans, per KV cache group.

    Returns:
        Block ids per KV cache group, each once, in order.
    """
    fresh: list[dict[int, None]] = [{} for _ in tokens_per_column]

    def take(block_ids: Sequence[Sequence[int]] | None, num_computed_tokens: int) -> None:
        for ids, row, span in zip(fresh, block_ids or (), tokens_per_column, strict=False):
            ids.update(dict.fromkeys(block for block in row[-(-num_computed_tokens // span) :] if block))

    for new in scheduler_output.scheduled_new_reqs:
        take(new.block_ids, new.num_computed_tokens)
    cached = scheduler_output.scheduled_cached_reqs
    # Before vLLM 0.34 a resumed request is among these, with all its blocks.
    resumed = getattr(cached, "resumed_req_ids", ())
    for req_id, block_ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        take(block_ids, computed if req_id in resumed else 0)
    return [list(ids) for ids in fresh]


def requests_with(rows: Any, req_ids: Sequence[str], counts: Iterable[int]) -> list[str]:
    """Requests of which at least one token is marked.

    Args:
        rows: Per token of the batch whether it is marked, bool, shape ``[>= num_tokens]``.
        req_ids: In batch order.
        counts: Tokens of each.
    """
    lengths = np.fromiter(counts, np.int64, len(req_ids))
    ends = np.cumsum(lengths)
    spans = zip(req_ids, ends - lengths, ends, strict=True)
    return [req_id for req_id, start, end in spans if rows[start:end].any()]


class Poison:
    """Poisons the KV cache of one runner, and reports who read it. Never raises.

    Args:
        runner: A model runner of vLLM's own, with its KV cache.

    Attributes:
        reported: Request id -> steps in which it had NaN, in the order in which they were reported.
        slots: Slots poisoned, over all layers' groups.
    """

    def __init__(self, runner: Any) -> None:
        self.reported: dict[str, int] = {}
        self.slots = 0
        self.step_running = False
        self._runner = runner
        self._kv_cache_config = runner.kv_cache_config
        config = runner.parallel_config
        groups = read_groups(self._kv_cache_config, getattr(config, "decode_context_parallel_size", 1))
        self._refused: set[str] = set()
        every = self._kv_cache_config.kv_cache_groups
        self._spans = [1 << 62] * len(every)
        self._layers: dict[int, list[Any]] = {}
        for index, group in zip(groups.indices, groups.groups, strict=True):
            self._spans[index] = group.tokens_per_column
            self._layers[index] = self._supported(every[index].layer_names)
        # Slots of a block on this rank.
        self._block_sizes = [group.kv_cache_spec.block_size for group in every]
        self._zeroed = bool(getattr(self._kv_cache_config, "needs_kv_cache_zeroing", False))
        if self._zeroed:
            self._say("vLLM zeroes new blocks of this model: only the slots of a step are poisoned")
        layers = sum(map(len, self._layers.values()))
        say(f"ubatch-guard: poison: keys of {layers} layers are NaN until they are written")

    def _supported(self, layer_names: Iterable[str]) -> list[Any]:
        """Those of the layers whose slots can be poisoned; the others are said, once for each kind."""
        context = self._runner.vllm_config.compilation_config.static_forward_context
        layers = []
        for layer in map(context.__getitem__, layer_names):
            if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
                # Another layer's cache.
                continue
            write = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
            dtype = str(getattr(layer.kv_cache, "dtype", None))
            if write is None or tuple(inspect.signature(write).parameters) != _WRITER:
                self._say(f"layers of kind {type(layer).__name__} are not poisoned: they write otherwise")
            elif dtype not in _DTYPES:
                self._say(f"a KV cache of {dtype} is not poisoned: it may hold no NaN")
            else:
                layers.append(layer)
        return layers

    def _say(self, message: str) -> None:
        if message not in self._refused:
            self._refused.add(message)
            say(f"ubatch-guard: poison: {message}", logging.ERROR)

    def is_of(self, runner: Any) -> bool:
        """Whether this was made for the KV cache that the runner has now."""
        return self._kv_cache_config is runner.kv_cache_config

    def blocks(self, scheduler_output: Any) -> None:
        """Poison the blocks that come into use in a step, before anything of it is run."""
        if self._zeroed:
            return
        handed_out = getattr(scheduler_output, _HANDED_OUT, None)
        if handed_out is not None and scheduler_output.kv_connector_metadata is None:
            # What the pool handed out, whatever became of it: a request that was preempted in the pass that
            # scheduled it is in no list. A connector may have begun to load into some of these.
            fresh = [[block for block in handed_out if block]] * len(self._spans)
        else:
            fresh = fresh_blocks(scheduler_output, self._spans)
        for index in self._layers:
            if fresh[index]:
                size = self._block_sizes[index]
                ids = np.asarray(fresh[index], dtype=np.int64)
                self._poison(index, (ids[:, None] * size + np.arange(size)).ravel())

    def slots_of_step(self, slot_mappings: Iterable[tuple[int, Any]]) -> None:
        """Poison the slots that a step writes.

        Args:
            slot_mappings: Per KV cache group: its place; the slot of each token, a tensor of shape
                ``[>= num_tokens]``, negative for none.
        """
        for index, mapping in slot_mappings:
            if index in self._layers:
                slots = mapping.cpu().numpy()
                self._poison(index, slots[slots >= 0])

    def _poison(self, index: int, slots: Any) -> None:
        import torch

        self.slots += len(slots)
        for layer in self._layers[index]:
            cache = layer.kv_cache
            for start in range(0, len(slots), _SLOTS_AT_ONCE):
                some = torch.as_tensor(slots[start : start + _SLOTS_AT_ONCE], dtype=torch.int64)
                shape = (len(some), layer.num_kv_heads, layer.head_size)
                value_shape = (*shape[:2], getattr(layer, "head_size_v", None) or layer.head_size)
                key = torch.full(shape, torch.nan, dtype=cache.dtype, device=cache.device)
                value = torch.zeros(value_shape, dtype=cache.dtype, device=cache.device)
                layer.impl.do_kv_cache_update(layer, key, value, cache, some.to(cache.device))

    def look(self, scheduler_output: Any) -> None:
        """Report the requests of the step that was run whose hidden states have NaN."""
        state = self._runner.execute_model_state
        hidden_states = getattr(state, "hidden_states", None)
        if hidden_states is None:
            return
        input_batch = getattr(state, "input_batch", None)
        if input_batch is not None:
            req_ids = list(input_batch.req_ids)
            counts = np.diff(input_batch.query_start_loc_np[: len(req_ids) + 1])
        else:
            req_ids = list(self._runner.input_batch.req_ids)
            counts = [scheduler_output.num_scheduled_tokens[req_id] for req_id in req_ids]
        rows = hidden_states.isnan().any(dim=-1).cpu().numpy()
        for req_id in requests_with(rows, req_ids, counts):
            if req_id not in self.reported:
                say(f"ubatch-guard: poison: {req_id!r} read a slot that nobody wrote (NaN)", logging.ERROR)
                if (guard := runner_guard(self._runner)) is not None:
                    guard.counters.poison_reads += 1
            self.reported[req_id] = self.reported.get(req_id, 0) + 1


def poison_of(runner: Any) -> Poison | None:
    """What poisons the KV cache of ``runner``, made at the first call; None: nothing does."""
    settings = getattr(runner, SETTINGS, None)
    if settings is None or not settings.poison:
        return None
    poison: Poison | None = runner.__dict__.get(_KEY)
    if _KEY not in runner.__dict__ or (poison is not None and not poison.is_of(runner)):
        try:
            poison = Poison(runner)
        except Exception as error:
            _give_up(runner, error)
            return None
        runner.__dict__[_KEY] = poison
    return poison


def _give_up(runner: Any, error: Exception) -> None:
    runner.__dict__[_KEY] = None
    say(f"ubatch-guard: nothing is poisoned any more ({described(error)})", logging.ERROR)


def hook_module(module: ModuleType, settings: Settings) -> None:
    """Go around what a module of `MODULES` has to be hooked in; a second call changes the settings only."""
    if module.__name__ == BLOCK_POOL:
        _go_around(getattr(module, "BlockPool", None), "get_new_blocks", _get_new_blocks)
    elif module.__name__ == SCHEDULER:
        _go_around(getattr(module, "Scheduler", None), "schedule", _schedule)
    for generation in GENERATIONS:
        if module.__name__ == generation.module:
            cls = getattr(module, generation.cls, None)
            if cls is None:
                continue
            setattr(cls, SETTINGS, settings)
            _go_around(cls, "execute_model", _execute_model)
            _go_around(cls, "prepare_attn", _prepare_attn)
            _go_around(cls, "_get_slot_mappings", _get_slot_mappings)
            say(
                f"ubatch-guard: POISON IS ON for {cls.__module__}.{cls.__name__}: for tests and debugging, "
                "NOT for a live server",
                logging.ERROR,
            )


def _go_around(cls: type | None, name: str, around: Callable[..., Any]) -> None:
    method = getattr(cls, name, None)
    if cls is None or method is None or hasattr(method, _KEY):
        return

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, method.__get__(self), *args, **kwargs)

    setattr(wrapper, _KEY, True)
    setattr(cls, name, wrapper)


# What goes around vLLM's methods: each takes the object and the method.


def _get_new_blocks(pool: Any, upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    blocks = upstream(*args, **kwargs)
    pool.__dict__.setdefault(_HANDED_OUT, []).extend(block.block_id for block in blocks)
    return blocks


def _schedule(scheduler: Any, upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    scheduler_output = upstream(*args, **kwargs)
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    if pool is not None and hasattr(scheduler_output, "__dict__"):
        # Pickled with it on its way to the workers.
        scheduler_output.__dict__[_HANDED_OUT] = pool.__dict__.pop(_HANDED_OUT, [])
    return scheduler_output


def _execute_model(
    runner: Any, upstream: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    poison = None if kwargs.get("dummy_run") else poison_of(runner)
    if poison is None:
        return upstream(scheduler_output, *args, **kwargs)
    _safely(runner, poison.blocks, scheduler_output)
    poison.step_running = scheduler_output.total_num_scheduled_tokens > 0
    try:
        output = upstream(scheduler_output, *args, **kwargs)
    finally:
        poison.step_running = False
    _safely(runner, poison.look, scheduler_output)
    return output


def _prepare_attn(runner: Any, upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """V2: the slots of a step; dummy runs have others."""
    prepared = upstream(*args, **kwargs)
    if (poison := poison_of(runner)) is not None and poison.step_running:
        _safely(runner, poison.slots_of_step, enumerate(prepared[1]))
    return prepared


def _get_slot_mappings(runner: Any, upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """V1: the same, and dummy runs come here too."""
    mappings = upstream(*args, **kwargs)
    if (poison := poison_of(runner)) is not None and poison.step_running and mappings[0] is not None:
        _safely(runner, poison.slots_of_step, mappings[0].items())
    return mappings


def _safely(runner: Any, do: Callable[..., None], *args: Any) -> None:
    try:
        do(*args)
    except Exception as error:
        _give_up(runner, error)
