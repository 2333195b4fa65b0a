"""Faults around the rule, each in a running guarded engine: the steps go on, and votes are right after it.

What goes wrong in the metrics, the trace, the log or what the guard reads costs no step and no answer. Each
step is judged by the slot-by-slot oracle, from the scheduler's own books.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import prometheus_client
import prometheus_client.values
import pytest
from shapes import GuardedV1, Ran, Scheduler, SlidingWindowSpec, guarded

from ubatch_guard import counters
from ubatch_guard.hook_cases import FullAttentionSpec, SchedulerOutput
from ubatch_guard.runner import report
from ubatch_guard.runner.guard import RunnerGuard
from ubatch_guard.settings import Settings, SettingsError
from ubatch_guard.step import KVCacheGroup, Policy
from ubatch_guard.trace import TraceReader

GROUPS = (KVCacheGroup(16, 256),)
BOTH = ("v1", "v2")
ALL = (Policy.REORDER, Policy.VETO, Policy.OBSERVE)
DECIDING = (Policy.REORDER, Policy.VETO)


class Drill:
    """A guarded runner and its scheduler, with two requests that decode all the time.

    Attributes:
        name_of: From a text to the request id that is used for it.
        tamper: What the runner is given instead of a scheduler output.
    """

    def __init__(self, shape: str, settings: Settings) -> None:
        self.shape = shape
        self.settings = settings
        self.scheduler = Scheduler(GROUPS, 512, resumed_are_new=shape == "v2")
        self.runner = guarded(shape, settings, GROUPS)
        self.name_of: Callable[[str], Any] = lambda text: text
        self.tamper: Callable[[SchedulerOutput], Any] = lambda output: output
        self._guests: list[Any] = []
        self._serial = 0

    @property
    def policy(self) -> Policy | None:
        return self.settings.policy

    @property
    def guard(self) -> RunnerGuard:
        guard = self.runner.ubatch_guard
        assert guard is not None
        return guard

    def open(self) -> None:
        for number in range(2):
            self.scheduler.arrive(self.name_of(f"decode-{number}"), 20)
        self.run()

    def run(self) -> Ran:
        return self.runner.run(self.tamper(self.scheduler.step()))

    def hazard(self) -> Ran:
        """Two new requests; the runner would put the one that reads in front of the one that writes."""
        writer, reader = self._change_guests("writer", "reader")
        self.scheduler.arrive(writer, 72)
        self.scheduler.arrive(reader, 65, donor=writer, most=64)
        ran = self.run()
        assert self.unsafe_cuts(ran.own_order), "there is no hazard in it"
        return ran

    def safe(self) -> Ran:
        """Two new requests that share nothing."""
        for name, tokens in zip(self._change_guests("long", "short"), (72, 8), strict=True):
            self.scheduler.arrive(name, tokens)
        ran = self.run()
        assert not self.unsafe_cuts(ran.own_order)
        return ran

    def quiet(self) -> Ran:
        """Nobody is new."""
        return self.run()

    def unsafe_cuts(self, order: list[Any]) -> set[int]:
        return oracle.unsafe_cuts(self.scheduler.as_step(order))

    def judge(self, ran: Ran) -> Ran:
        """Whatever goes wrong: no cut of the step is wrong, and who only observes changes nothing."""
        if self.policy is Policy.OBSERVE:
            assert ran == Ran(ran.own_order, ran.own_order, True)
        else:
            assert not ran.allowed or not self.unsafe_cuts(ran.order), "an unsafe step was voted yes"
        return ran

    def votes_right(self) -> None:
        """A step with a hazard, a safe one and a quiet one are voted on as they should be."""
        before = self.guard.counters.unsafe.total()
        ran = self.judge(self.hazard())
        assert ran.allowed is (self.policy is not Policy.VETO)
        assert (ran.order != ran.own_order) is (self.policy is Policy.REORDER)
        assert self.guard.counters.unsafe.total() == before + 1
        assert self.judge(self.safe()).allowed
        assert self.judge(self.quiet()).allowed

    def runs_whole(self) -> None:
        """Every step that admits a request does, and no other."""
        observing = self.policy is Policy.OBSERVE
        for step, allowed in ((self.hazard, observing), (self.safe, observing), (self.quiet, True)):
            assert self.judge(step()).allowed is allowed

    def _change_guests(self, *names: str) -> list[Any]:
        for guest in self._guests:
            self.scheduler.finish(guest)
        self._serial += 1
        self._guests = [self.name_of(f"{name}-{self._serial}") for name in names]
        return self._guests


@dataclass(frozen=True)
class Scene:
    """What a fault may use."""

    drill: Drill
    tmp_path: Path
    monkeypatch: pytest.MonkeyPatch


Happens = Callable[[Scene], Iterator[None]]
"""Runs up to its ``yield`` when the fault sets in, and from there when it is over."""


@dataclass(frozen=True)
class Fault:
    """One way in which something goes wrong.

    Attributes:
        name: In words.
        happens: Brings it about.
        settings: Of the guard; ``trace`` is a name in the test's folder.
        shapes: The runners it can happen to.
        policies: And under which policies.
        at_start: Before the first step; otherwise to a running engine.
        says: A piece of the one line in the log; None: nothing is said.
        counts: A reason that steps are counted under as vetoed; None: none is.
        lasting: Steps that admit a request run whole from then on.
    """

    name: str
    happens: Happens
    settings: dict[str, Any]
    shapes: tuple[str, ...] = BOTH
    policies: tuple[Policy, ...] = ALL
    at_start: bool = False
    says: str | None = None
    counts: str | None = None
    lasting: bool = False


FAULTS: list[Fault] = []


def fault(name: str, *, settings: dict[str, Any] | None = None, **more: Any) -> Callable[[Happens], Happens]:
    def add(happens: Happens) -> Happens:
        FAULTS.append(Fault(name, happens, settings or {}, **more))
        return happens

    return add


# The metrics.


@contextmanager
def own_metrics(scene: Scene) -> Iterator[prometheus_client.CollectorRegistry]:
    """A registry as of a new process, to which every step exports."""
    registry = prometheus_client.CollectorRegistry()
    export = functools.cache(counters.default_export.__wrapped__)
    with scene.monkeypatch.context() as patch:
        patch.setattr(prometheus_client, "REGISTRY", registry)
        patch.setattr(report, "GuardExport", lambda: counters.GuardExport(make=export))
        patch.setattr(report, "_EXPORT_NS", 0)
        yield registry


@fault("the names of the metrics are taken", at_start=True, says="no metrics are exported")
def names_taken(scene: Scene) -> Iterator[None]:
    with own_metrics(scene) as registry:
        prometheus_client.Counter("ubatch_guard_steps", "somebody else's", registry=registry)
        yield


@fault("PROMETHEUS_MULTIPROC_DIR is not there", at_start=True, says="no metrics are exported")
def no_multiprocess_folder(scene: Scene) -> Iterator[None]:
    with own_metrics(scene), scene.monkeypatch.context() as patch:
        patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(scene.tmp_path / "nowhere"))
        patch.setattr(prometheus_client.values, "ValueClass", prometheus_client.values.MultiProcessValue())
        yield


@fault("the metrics break later on", at_start=True, says="no metrics are exported any more")
def metrics_break(scene: Scene) -> Iterator[None]:
    with own_metrics(scene) as registry:
        made = counters.CounterExport(registry)
        del made._metrics["unsafe_steps"]
        # Undone before `own_metrics` undoes its own of the same name.
        with scene.monkeypatch.context() as patch:
            patch.setattr(report, "GuardExport", lambda: counters.GuardExport(make=lambda: made))
            yield
        assert registry.get_sample_value("ubatch_guard_steps_total") > 0, "it never exported"


# The trace.


def ends(scene: Scene) -> None:
    """Run until the trace has ended, and see that this is final: the engine's own rule is asked no more."""
    drill = scene.drill
    for _ in range(3000):
        if not drill.guard.trace.on:
            break
        drill.judge(drill.quiet())
        time.sleep(0.001)
    assert not drill.guard.trace.on
    assert drill.guard.counters.trace_ended == 1
    if isinstance(drill.runner, GuardedV1) and drill.policy is not Policy.OBSERVE:
        asked = drill.runner.asked
        drill.quiet()
        assert drill.runner.asked == asked


@fault("the trace reaches its size", settings={"trace": "t.jsonl", "trace_max_bytes": 2000}, says="ends:")
def trace_is_full(scene: Scene) -> Iterator[None]:
    yield
    ends(scene)
    assert scene.drill.guard.recorder.path.stat().st_size <= 2000


@fault("the disk is full", settings={"trace": "t.jsonl"}, says="File too large")
def disk_is_full(scene: Scene) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        yield
        ends(scene)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def readable(drill: Drill) -> int:
    """Steps in the trace of a guard that goes on recording."""
    recorder = drill.guard.recorder
    assert drill.guard.trace.on
    recorder.close()
    assert (recorder.dropped, recorder.ended) == (0, "closed")
    with TraceReader(recorder.path) as trace:
        return len(list(trace))


@fault("two runners have one trace pattern", settings={"trace": "t.jsonl"})
def two_runners(scene: Scene) -> Iterator[None]:
    other = Drill(scene.drill.shape, scene.drill.settings)
    other.open()
    yield
    other.votes_right()
    assert other.guard.recorder.path != scene.drill.guard.recorder.path
    assert readable(other) == 4
    assert scene.drill.guard.trace.on


def taken(scene: Scene) -> Path:
    """The file that the trace would go to."""
    return scene.tmp_path / f"t.{os.getpid()}.jsonl"


@fault("the trace's name is a FIFO", settings={"trace": "t.jsonl"}, at_start=True)
def trace_is_a_fifo(scene: Scene) -> Iterator[None]:
    os.mkfifo(taken(scene))
    yield
    assert taken(scene).is_fifo()
    assert readable(scene.drill) == 4
    scene.drill.guard.trace.on = False


@fault("the trace's name is a link", settings={"trace": "t.jsonl"}, at_start=True)
def trace_is_a_link(scene: Scene) -> Iterator[None]:
    precious = scene.tmp_path / "precious"
    precious.write_text("precious")
    taken(scene).symlink_to(precious)
    yield
    assert precious.read_text() == "precious"
    assert readable(scene.drill) == 4
    scene.drill.guard.trace.on = False


@fault("the trace's folder is missing", settings={"trace": "no/t.jsonl"}, at_start=True, says="no trace is")
def no_folder(scene: Scene) -> Iterator[None]:
    yield
    ends(scene)


@fault("the trace's name is too long", settings={"trace": "t" * 300}, at_start=True, says="no trace is")
def long_name(scene: Scene) -> Iterator[None]:
    yield
    ends(scene)


@fault("request ids are integers", settings={"trace": "t.jsonl"}, at_start=True)
def ids_are_integers(scene: Scene) -> Iterator[None]:
    scene.drill.name_of = hash
    yield
    assert readable(scene.drill) == 4
    scene.drill.guard.trace.on = False


@fault("request ids are lone surrogates", settings={"trace": "t.jsonl"}, at_start=True)
def ids_are_surrogates(scene: Scene) -> Iterator[None]:
    scene.drill.name_of = lambda text: f"\ud800\n\x1b[31m{text}"
    yield
    assert readable(scene.drill) == 4
    scene.drill.guard.trace.on = False


@fault("settings are exchanged while requests run", settings={"trace": "t.jsonl"}, says="ends:")
def settings_exchanged(scene: Scene) -> Iterator[None]:
    """The new guard's trace has no rows of those that run, and ends; the old one's is whole and closed."""
    drill = scene.drill
    old = drill.guard
    recorder = old.recorder
    assert recorder is not None
    drill.settings = drill.runner.ubatch_guard_settings = replace(drill.settings)
    yield
    ends(scene)
    assert drill.guard is not old
    assert not recorder.open
    recorder.close()  # waits for the writer
    with TraceReader(recorder.path) as trace:
        assert sum(bool(step.request_ids) for step in trace) == old.counters.steps > 0


# What the guard reads of the engine.


def _group_fault(name: str, spec: Any, num_blocks: object = 256) -> None:
    @fault(
        f"the core refuses the groups: {name}",
        at_start=True,
        says="not understood",
        counts="unknown_group",
        lasting=True,
    )
    def refused_groups(scene: Scene) -> Iterator[None]:
        config = scene.drill.runner.kv_cache_config
        config.kv_cache_groups[0].kv_cache_spec, config.num_blocks = spec, num_blocks
        yield


for block_size in (0, -16, 16.0, None, "16"):
    _group_fault(f"block size {block_size!r}", FullAttentionSpec(block_size))  # type: ignore[arg-type]
for window in (0, -1, 8.5):
    _group_fault(f"window {window!r}", SlidingWindowSpec(16, window))  # type: ignore[arg-type]
for count in (0, None, 2**31, -1):
    _group_fault(f"{count!r} blocks", FullAttentionSpec(16), count)
_group_fault("a spec that has nothing", SimpleNamespace())


class Odd:
    """An object of which some attribute cannot be read by the guard, the first time."""

    def __init__(self, real: Any, name: str, error: BaseException) -> None:
        self._real = real
        self._name = name
        self._error: BaseException | None = error

    def __getattr__(self, name: str) -> Any:
        if name == self._name and self._error is not None and asked_by_the_guard():
            error, self._error = self._error, None
            raise error
        return getattr(self._real, name)


def asked_by_the_guard() -> bool:
    """Whether the one who asked the caller is the guard, and not the runner."""
    return str(sys._getframe(2).f_globals["__name__"]).startswith("ubatch_guard.")


def _output_fault(attribute: str, **more: Any) -> None:
    @fault(f"{attribute} of a scheduler output cannot be read", **more)
    def unreadable_output(scene: Scene) -> Iterator[None]:
        scene.drill.tamper = lambda output: Odd(output, attribute, RuntimeError("unreadable"))
        yield
        scene.drill.tamper = lambda output: output


for attribute in ("scheduled_cached_reqs", "scheduled_new_reqs", "finished_req_ids", "preempted_req_ids"):
    _output_fault(attribute, says="could not be followed", counts="runtime")


class Mute(RuntimeError):
    """Cannot say what went wrong."""

    def __str__(self) -> str:
        raise ValueError("no words")


@fault("an exception cannot say its own message", says="Mute", counts="mute")
def mute_exception(scene: Scene) -> Iterator[None]:
    scene.drill.tamper = lambda output: Odd(output, "scheduled_cached_reqs", Mute())
    yield
    scene.drill.tamper = lambda output: output


@fault("a handler of the log raises", counts="runtime")
def log_handler_raises(scene: Scene) -> Iterator[None]:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the log is gone")

    handler, logger = Broken(), logging.getLogger("vllm.ubatch_guard")
    logger.addHandler(handler)
    scene.drill.tamper = lambda output: Odd(output, "scheduled_cached_reqs", RuntimeError("unreadable"))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        scene.drill.tamper = lambda output: output


@fault("the new rows of a step hold a block id out of range", says="(BlockIdError:", counts="block_id")
def bad_block_in_a_new_row(scene: Scene) -> Iterator[None]:
    def tampered(output: SchedulerOutput) -> SchedulerOutput:
        for request in output.scheduled_new_reqs:
            request.block_ids[0][-1] = GROUPS[0].num_blocks
        return output

    scene.drill.tamper = tampered
    yield
    scene.drill.tamper = lambda output: output


def _append_fault(shapes: tuple[str, ...], policies: tuple[Policy, ...]) -> None:
    @fault(
        f"blocks are appended half, {'/'.join(shapes)}",
        shapes=shapes,
        policies=policies,
        says="(BlockIdError:",
        counts="block_id",
    )
    def half_an_append(scene: Scene) -> Iterator[None]:
        """Of two requests that grow in the same step, one grows by a block that there is not."""
        drill = scene.drill
        late = ["late-0", "late-1"]
        for name in late:
            drill.scheduler.arrive(name, 16)
        drill.quiet()

        def tampered(output: SchedulerOutput) -> SchedulerOutput:
            cached = output.scheduled_cached_reqs
            grown = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
            if grown["late-0"] and grown["late-1"]:
                grown["late-1"][0][:] = [GROUPS[0].num_blocks]
            return output

        drill.tamper = tampered
        yield
        drill.tamper = lambda output: output
        for name in late:
            drill.scheduler.finish(name)


# Under REORDER V2's guard keeps no rows of requests that decode.
_append_fault(("v1",), ALL)
_append_fault(("v2",), (Policy.VETO, Policy.OBSERVE))


def _rows_fault(shapes: tuple[str, ...], policies: tuple[Policy, ...]) -> None:
    @fault(
        f"the engine's own rows cannot be read when they are needed, {'/'.join(shapes)}",
        shapes=shapes,
        policies=policies,
        says="(AttributeError: ",
        counts="attribute",
    )
    def no_rows(scene: Scene) -> Iterator[None]:
        class Requests(dict[Any, Any]):
            def items(self) -> Any:
                raise AttributeError("no rows")

        drill = scene.drill
        name, none = ("requests", Requests()) if drill.shape == "v1" else ("block_tables", SimpleNamespace())
        real = getattr(drill.runner, name)
        if drill.shape == "v1":
            none.update(real)
        setattr(drill.runner, name, none)
        drill.guard.rows.doubt()
        yield
        setattr(drill.runner, name, dict(none) if drill.shape == "v1" else real)


_rows_fault(("v1",), ALL)
_rows_fault(("v2",), (Policy.VETO, Policy.OBSERVE))


@fault("num_ubatches is no number", says="(TypeError:", counts="type")
def no_number_of_ubatches(scene: Scene) -> Iterator[None]:
    scene.drill.runner.parallel_config.num_ubatches = None
    yield
    scene.drill.runner.parallel_config.num_ubatches = 2


@fault("V2 lacks an attribute", shapes=("v2",), says="could not be read", counts="attribute")
def no_decode_query_len(scene: Scene) -> Iterator[None]:
    with scene.monkeypatch.context() as patch:
        patch.delattr("shapes.ShapeV2.decode_query_len")
        yield


@fault(
    "an attention backend cannot be asked for its builder",
    policies=(Policy.REORDER,),
    says="no order could be planned",
    counts="not_implemented",
)
def odd_backend(scene: Scene) -> Iterator[None]:
    class Backend:
        @staticmethod
        def get_builder_cls() -> type:
            raise NotImplementedError

    scene.drill.runner.attn_groups = [[SimpleNamespace(backend=Backend)]]
    yield
    scene.drill.runner.attn_groups = []


@fault("the KV caches are made anew")
def new_kv_caches(scene: Scene) -> Iterator[None]:
    old = scene.drill.guard
    runner = scene.drill.runner
    runner.kv_cache_config = SimpleNamespace(**vars(runner.kv_cache_config))
    yield
    assert scene.drill.guard is not old


# Checks.


@fault(
    "the block table cannot be compared",
    shapes=("v1",),
    policies=DECIDING,
    settings={"verify_every": 1},
    says="could not be read",
    counts="attribute",
)
def no_block_table(scene: Scene) -> Iterator[None]:
    tables = scene.drill.runner.input_batch.block_table.block_tables
    real, tables[0] = tables[0], SimpleNamespace()
    yield
    tables[0] = real


@fault("the cut cannot be checked", shapes=("v2",), settings={"verify_every": 1}, says="could not be checked")
def no_cut_check(scene: Scene) -> Iterator[None]:
    sizes = scene.drill.runner.block_tables.__dict__.pop("block_sizes")
    yield
    scene.drill.runner.block_tables.block_sizes = sizes


@fault(
    "the engine's own vote raises, and is asked for the trace",
    shapes=("v1",),
    policies=DECIDING,
    settings={"trace": "t.jsonl"},
    says="the engine's own verdict: ",
)
def engines_vote_raises(scene: Scene) -> Iterator[None]:
    def verdict() -> bool:
        raise LookupError("the engine's own")

    scene.drill.runner.verdict = verdict
    yield
    ends(scene)
    scene.drill.runner.verdict = lambda: True


NAMES = [case.name for case in FAULTS]


def run_fault(case: Fault, drill: Drill, scene: Scene) -> None:
    """The fault, steps during it, and steps after it."""
    if not case.at_start:
        drill.open()
        drill.votes_right()
    with contextmanager(case.happens)(scene):
        if case.at_start:
            drill.open()
        for step in (drill.hazard, drill.safe, drill.quiet):
            drill.judge(step())
    (drill.runs_whole if case.lasting else drill.votes_right)()


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.value)
@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("case", FAULTS, ids=NAMES)
def test_steps_go_on_and_votes_are_right_after_it(
    case: Fault,
    shape: str,
    policy: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if shape not in case.shapes or policy not in case.policies:
        return
    more = dict(case.settings)
    if "trace" in more:
        more["trace"] = str(tmp_path / more["trace"])
    drill = Drill(shape, Settings(policy=policy, log_interval=0.0, **more))
    run_fault(case, drill, Scene(drill, tmp_path, monkeypatch))
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if case.says is not None and case.says in line]) == len(said[:1]), said
    assert bool(said) is (case.says is not None), said
    if case.counts is not None:
        assert drill.guard.counters.vetoed[case.counts] > 0
    assert drill.guard.counters.vetoed.keys() <= {case.counts, "unsafe"}
    if policy is Policy.REORDER:
        assert drill.guard.counters.vetoed["unsafe"] == 0
    assert drill.guard.counters.unasked == 0


# What does raise: interrupts, and what the engine itself raises.


class Interrupting(list[Any]):
    """A list; the guard is interrupted when it goes through it for the n-th time."""

    left = 0

    def __iter__(self) -> Iterator[Any]:
        if self.left and asked_by_the_guard():
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return super().__iter__()


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.value)
@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("time", [1, 2])
def test_an_interrupt_while_changes_are_taken_in(shape: str, policy: Policy, time: int) -> None:
    """The engine tries the step again, or goes on with the next one: no vote rests on what was missed."""
    drill = Drill(shape, Settings(policy=policy, log_interval=0.0))
    drill.open()
    drill.votes_right()
    given: list[SchedulerOutput] = []

    def tampered(output: SchedulerOutput) -> SchedulerOutput:
        output.scheduled_new_reqs = Interrupting(output.scheduled_new_reqs)
        output.scheduled_new_reqs.left = time
        given.append(output)
        return output

    drill.tamper = tampered
    with pytest.raises(KeyboardInterrupt):
        drill.hazard()
    drill.tamper = lambda output: output
    (output,) = given
    if output.scheduled_new_reqs[0].req_id not in drill.runner.requests:
        ran = drill.judge(drill.runner.run(output))
        assert drill.unsafe_cuts(ran.own_order)
    drill.votes_right()


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.value)
@pytest.mark.parametrize("trace", [False, True])
def test_an_exception_of_the_engines_own_vote(policy: Policy, trace: bool, tmp_path: Path) -> None:
    """Observing, it goes its way as without the guard; deciding, it is not even asked but for a trace."""
    pattern = str(tmp_path / "t.jsonl") if trace else None
    drill = Drill("v1", Settings(policy=policy, log_interval=0.0, trace=pattern))
    drill.open()

    def verdict() -> bool:
        raise LookupError("the engine's own")

    drill.runner.verdict = verdict
    for step in (drill.hazard, drill.safe, drill.quiet):
        if policy is Policy.OBSERVE:
            with pytest.raises(LookupError, match="the engine's own"):
                step()
        else:
            drill.judge(step())
    drill.runner.verdict = lambda: True
    drill.votes_right()


@pytest.mark.parametrize("verdict", [True, False])
def test_observing_the_engines_own_verdict_stands(verdict: bool) -> None:
    drill = Drill("v1", Settings(policy=Policy.OBSERVE, log_interval=0.0))
    drill.runner.verdict = lambda: verdict
    drill.open()
    for step in (drill.hazard, drill.safe, drill.quiet):
        assert step().allowed is verdict


@pytest.mark.parametrize("seconds", [1e300, -1.0, float("nan"), float("inf")])
def test_a_log_interval_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(SettingsError, match="log_interval"):
        Settings(log_interval=seconds)
    with pytest.raises(SettingsError, match="UBATCH_GUARD_LOG_INTERVAL"):
        Settings.from_environment({"UBATCH_GUARD_LOG_INTERVAL": str(seconds)})


# Controls.


@pytest.mark.parametrize("shape", BOTH)
def test_without_a_guard_the_hazard_is_voted_yes(shape: str) -> None:
    drill = Drill(shape, Settings(policy=None))
    drill.open()
    ran = drill.hazard()
    assert ran.allowed
    assert ran.order == ran.own_order
    with pytest.raises(AssertionError, match="an unsafe step was voted yes"):
        drill.judge(ran)


@pytest.mark.parametrize("shape", BOTH)
def test_a_guard_that_makes_light_of_what_it_missed_is_seen(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunnerGuard, "fail", lambda self, why, message: None)
    case = FAULTS[NAMES.index("scheduled_cached_reqs of a scheduler output cannot be read")]
    drill = Drill(shape, Settings(policy=Policy.VETO, log_interval=0.0))
    with pytest.raises(AssertionError, match="an unsafe step was voted yes"):
        run_fault(case, drill, Scene(drill, tmp_path, monkeypatch))
