"""A history: what happens to a scheduler between steps, what its steps do, which orders would be unsafe."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ubatch_guard.vllm.scheduler_histories.orders import MakeOrder, new_request_ids
from ubatch_guard.vllm.scheduler_histories.runner import MadeUpRunner, Step
from ubatch_guard.vllm.scheduler_histories.scheduler import (
    MAX_MODEL_LEN,
    Options,
    installed_vllm,
    make_runner_output,
    make_scheduler,
    vllms_order,
)
from ubatch_guard.vllm.scheduler_histories.slots import SlotContents

_MAX_PROMPT = 110
_MAX_REQUESTS = 24


class History:
    """A scheduler, a runner, and the requests that come to them.

    Args:
        name: Begins the ids of its requests.
        options: How the scheduler is set up, and what happens.
        rng: Draws what happens.
        make_orders: The orders to judge.

    Attributes:
        absent: Options that the installed release has not.
        runner: ``v1`` or ``v2``, the model runner that the scheduler works for.
    """

    def __init__(
        self, name: str, options: Options, rng: random.Random, make_orders: Mapping[str, MakeOrder]
    ) -> None:
        self._name, self._options, self._rng = name, options, rng
        self._vllm = installed_vllm()
        self._scheduler, vllm_config, kv_cache_config, self.absent = make_scheduler(options)
        self.runner = "v2" if getattr(vllm_config, "use_v2_model_runner", True) else "v1"
        self._connector = self._scheduler.connector
        if self._connector is not None:
            self._connector.rng, self._connector.share_asynchronous = rng, options.share_asynchronous
        self._runner = MadeUpRunner(
            SlotContents(options.block_size, options.windows),
            rng,
            options.vocabulary,
            options.async_scheduling,
        )
        self._orders = {name: make(vllm_config, kv_cache_config) for name, make in make_orders.items()}
        self._in_flight: list[tuple[Any, Any]] = []
        self._sessions: dict[str, int] = {}
        self._num_requests = 0
        self._recent: list[list[int]] = []
        self._common = [self._tokens(rng.randint(options.block_size, 60)) for _ in range(3)]

    def step(self, count: Counter[str]) -> tuple[Step, dict[str, Any]]:
        """One scheduler output: what its step does, and per order that is unsafe a pair of requests."""
        scheduler, connector = self._scheduler, self._connector
        self._disturb()
        output = scheduler.schedule()
        ids = vllms_order(output, 1 + self._options.num_speculative_tokens, new_request_ids(output))
        orders = {name: list(order(output, list(ids))) for name, order in self._orders.items()}
        loads = connector.started if connector else []
        step = self._runner.execute(output, scheduler.requests, loads, self._options.failing_loads)
        count["steps"] += 1
        count["reads"] += step.reads.num_reads
        count["preempted"] += len(output.preempted_req_ids or ())
        count["drafted"] += len(output.scheduled_spec_decode_tokens)
        count["loads"] += len(loads)
        count["set_back"] += step.num_set_back
        loads.clear()
        self._in_flight.append((output, self._runner_output(output, step, count)))
        self._return_outputs()
        return step, _unsafe_pairs(orders, ids, step)

    def _disturb(self) -> None:
        """What may happen between two steps: requests come, go on, are aborted, the prefix cache is reset."""
        rng, scheduler = self._rng, self._scheduler
        if rng.random() < 0.6:
            base = self._prompt()
            for _ in range(rng.choice([1, 1, 2, 4, 6])):
                if len(scheduler.requests) > _MAX_REQUESTS:
                    break
                self._add(
                    self._prompt() if rng.random() < 0.4 else base + self._tokens(rng.choice([0, 1, 3, 12]))
                )
        for session in list(self._sessions):
            if rng.random() < 0.15:
                self._go_on(session)
        if self._options.aborts and scheduler.requests and rng.random() < 0.05:
            self._abort(rng.choice(list(scheduler.requests)))
        if self._options.resets and rng.random() < 0.01:
            # vLLM refuses this under requests that hold blocks and wait, for a load or for their session.
            nobody_waits = self._connector is None and not self._options.streaming
            scheduler.reset_prefix_cache(reset_running_requests=nobody_waits and rng.random() < 0.5)

    def _add(self, prompt: list[int]) -> None:
        request = f"{self._name}-{self._num_requests}"
        self._num_requests += 1
        streaming = self._options.streaming and self._rng.random() < 0.4
        if streaming:
            self._sessions[request] = self._rng.randint(1, 3)
        self._request(request, prompt[:_MAX_PROMPT], self._rng.choice([1, 2, 5, 20, 40]), streaming)

    def _go_on(self, session: str) -> None:
        """Send the next input of a streaming session, or end it."""
        request = self._scheduler.requests.get(session)
        if request is None:
            del self._sessions[session]
        elif self._sessions[session] == 0 or request.num_tokens + 50 > MAX_MODEL_LEN:
            self._abort(session)
            del self._sessions[session]
        elif not request.streaming_queue:
            self._sessions[session] -= 1
            self._request(
                session, self._tokens(self._rng.choice([1, 3, 11])), self._rng.choice([1, 4, 9]), True
            )

    def _request(self, request: str, prompt: list[int], max_tokens: int, resumable: bool) -> None:
        self._scheduler.add_request(
            self._vllm.Request(
                request,
                prompt,
                self._vllm.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                None,
                priority=self._rng.randint(0, 3),
                arrival_time=float(self._num_requests),
                block_hasher=self._vllm.block_hasher(self._options.block_size),
                resumable=resumable,
            )
        )

    def _abort(self, request: str) -> None:
        self._scheduler.finish_requests(request, self._vllm.aborted)

    def _prompt(self) -> list[int]:
        """One that begins as an earlier one, or as many do, or as none."""
        rng, block_size = self._rng, self._options.block_size
        kind = rng.random()
        beginning: list[int] = []
        if self._recent and kind < 0.35:
            earlier = rng.choice(self._recent)
            beginning = earlier[: rng.randint(1, len(earlier))]
        elif kind < 0.8:
            beginning = rng.choice(self._common)
        if rng.random() < 0.3 and len(beginning) >= block_size:
            beginning = beginning[: len(beginning) // block_size * block_size]
        prompt = (beginning + self._tokens(rng.choice([1, 1, 2, 5, 9, 30])))[:_MAX_PROMPT]
        self._recent = [*self._recent[-11:], prompt]
        return prompt

    def _tokens(self, number: int) -> list[int]:
        return [self._rng.randrange(self._options.vocabulary) for _ in range(number)]

    def _runner_output(self, output: Any, step: Step, count: Counter[str]) -> Any:
        ids = list(output.num_scheduled_tokens)
        loaded = None
        if self._connector is not None:
            received = self._end_loads(self._connector.under_way)
            count["loads"] += len(received)
            loaded = self._vllm.outputs.KVConnectorOutput(
                finished_recving=received, invalid_block_ids=step.lost_blocks
            )
        return make_runner_output(ids, [step.sampled[request] for request in ids], loaded)

    def _end_loads(self, under_way: dict[str, Any]) -> set[str]:
        """Do some of the asynchronous loads; those of requests that are gone have lost their blocks."""
        received = set()
        for request in list(under_way):
            if request not in self._scheduler.requests:
                del under_way[request]
            elif self._rng.random() < 0.5:
                self._runner.load(under_way.pop(request))
                received.add(request)
        return received

    def _return_outputs(self) -> None:
        """Give outputs back to the scheduler; asynchronous scheduling is mostly a step ahead of that."""
        ahead = self._options.async_scheduling
        if ahead and len(self._in_flight) < 2 and self._rng.random() < 0.9:
            return
        while self._in_flight:
            output, runner_output = self._in_flight.pop(0)
            loaded = runner_output.kv_connector_output
            if loaded and loaded.finished_recving:
                loaded.finished_recving = loaded.finished_recving & self._scheduler.requests.keys()
            self._scheduler.update_from_output(output, runner_output)
            if self._options.num_speculative_tokens and not ahead:
                self._draft(runner_output.req_ids)
            if ahead and self._rng.random() < 0.9:
                return

    def _draft(self, ids: list[str]) -> None:
        alive = [request for request in ids if request in self._scheduler.requests]
        most = self._options.num_speculative_tokens
        drafts = [self._runner.draft(request, self._rng.choice([0, most, most])) for request in alive]
        if alive:
            self._scheduler.update_draft_token_ids(self._vllm.outputs.DraftTokenIds(alive, drafts))


def _unsafe_pairs(orders: Mapping[str, list[str]], ids: list[str], step: Step) -> dict[str, Any]:
    unsafe = {}
    for name, order in orders.items():
        if sorted(order) != sorted(ids):
            raise ValueError(f"order {name} makes {order} of {ids}")
        place = {request: number for number, request in enumerate(order)}
        for sharing in step.reads.sharing:
            if place[sharing.reader] < place[sharing.writer]:
                unsafe[name] = {**asdict(sharing), "order": order}
                break
    return unsafe
