"""The command ``ubatch-guard simulate``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import islice
from typing import Any

from ubatch_guard.commands.arguments import add_audit_arguments, audit_options, whole_number
from ubatch_guard.commands.errors import say_error
from ubatch_guard.commands.pictures import NotWrittenError, Pictures, pictures, refuse_overwriting
from ubatch_guard.commands.progress import progress
from ubatch_guard.report.answer import print_audits, printable
from ubatch_guard.simulate.requests import LogOptions, RequestLog
from ubatch_guard.simulate.steps import EngineOptions, Simulation, TooLargeError
from ubatch_guard.step import Policy
from ubatch_guard.trace.audit import Auditor, TraceAudit
from ubatch_guard.trace.format import TraceError
from ubatch_guard.trace.writer import TraceWriter

_DEFAULTS = {field.name: field.default for field in fields(EngineOptions)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Schedule the requests of a log as an engine with prefix caching would, without a model, and count "
        "the steps that microbatching would make wrong, as audit does with a recorded trace."
    )
    parser.epilog = (
        "Exit status: 0, or 2 where a log could not be read (the others are simulated all the same)."
    )
    parser.add_argument(
        "requests",
        nargs="+",
        metavar="REQUESTS",
        help="JSON lines (plain, gzip or zstd): Mooncake's or Bailian's format, or prompts as text, messages "
        "or token ids",
    )
    add_audit_arguments(parser)
    engine = parser.add_argument_group("the engine (names and defaults of vLLM, where it has them)")
    engine.add_argument("--max-num-seqs", **_number("max_num_seqs", 1), help="most requests of a step")
    engine.add_argument(
        "--max-num-batched-tokens", **_number("max_num_batched_tokens", 1), help="most tokens of a step"
    )
    engine.add_argument("--block-size", **_number("block_size", 1), help="tokens of a KV block")
    engine.add_argument(
        "--num-gpu-blocks", **_number("num_gpu_blocks", 2, 1 << 24), help="blocks of the pool"
    )
    engine.add_argument(
        "--no-enable-prefix-caching", action="store_true", help="requests share no blocks: nothing is unsafe"
    )
    engine.add_argument(
        "--sliding-window",
        type=whole_number(1),
        metavar="N",
        help="a second KV cache group, whose layers see N tokens",
    )
    engine.add_argument("--ubatch-size", **_number("num_ubatches", 2, 1 << 10), help="microbatches of a step")
    engine.add_argument(
        "--batch-order",
        choices=["v2", "scheduled"],
        default="v2",
        help="by length, as Model Runner V2 sorts a batch; or as the scheduler has it (default: %(default)s)",
    )
    clock = parser.add_argument_group("the clock")
    clock.add_argument("--step-ms", **_time("step_ms"), help="milliseconds of a step, whatever is in it")
    clock.add_argument(
        "--ms-per-1k-tokens", **_time("ms_per_1k_tokens"), help="milliseconds of a thousand tokens of a step"
    )
    clock.add_argument(
        "--speed-up", **_time("speed_up", least=1e-6), help="requests arrive X times as fast as the log says"
    )
    log = parser.add_argument_group("the log")
    log.add_argument(
        "--hash-block-size",
        type=whole_number(1),
        metavar="N",
        help="tokens that one of hash_ids stands for (default: 512 or 16, whichever fits the first request)",
    )
    log.add_argument(
        "--timestamps",
        choices=["ms", "s"],
        help="unit of timestamp (default: ms where the first is an integer, as Mooncake's; s otherwise)",
    )
    log.add_argument(
        "--output-length",
        type=whole_number(1, 1 << 24),
        default=LogOptions().output_length,
        metavar="N",
        help="tokens generated for a request that does not say (default: %(default)s)",
    )
    log.add_argument("--limit", type=whole_number(1), metavar="N", help="take the first N requests")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="keep the steps as a trace (.gz and .zst are compressed); one log alone",
    )
    parser.set_defaults(usage=parser.error)


def run(args: argparse.Namespace) -> int:
    """Simulate and audit each log; the exit status."""
    if args.trace and len(args.requests) > 1:
        args.usage("--trace keeps the steps of one log")
    refuse_overwriting(args, args.requests)
    try:
        with pictures(args, len(args.requests)) as drawn:
            return _simulate_all(args, drawn)
    except NotWrittenError as error:
        say_error(error)
        return 2


def _simulate_all(args: argparse.Namespace, drawn: Pictures | None) -> int:
    audits = []
    status = 0
    for path in args.requests:
        try:
            audit, figures = _simulate(path, args, drawn)
        except TraceError as error:
            say_error(error)
            status = 2
            continue
        audits.append(audit)
        if drawn is not None:
            drawn.audited(audit)
        if args.json:
            line = {key: value for key, value in asdict(audit).items() if value is not None}
            print(json.dumps({**line, **figures}), flush=True)
        else:
            print(_summary(audit, figures))
    if audits and not args.json:
        print()
        print_audits(audits, Policy(args.policy), args.ranks)
    return status


def _simulate(
    path: str, args: argparse.Namespace, drawn: Pictures | None
) -> tuple[TraceAudit, dict[str, float]]:
    """The audit of a log's steps, and what else is known of them."""
    options = EngineOptions(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        num_gpu_blocks=args.num_gpu_blocks,
        enable_prefix_caching=not args.no_enable_prefix_caching,
        sliding_window=args.sliding_window,
        num_ubatches=args.ubatch_size,
        sort_batch=args.batch_order == "v2",
        step_ms=args.step_ms,
        ms_per_1k_tokens=args.ms_per_1k_tokens,
        speed_up=args.speed_up,
    )
    log_options = LogOptions(
        block_size=args.block_size,
        hash_block_size=args.hash_block_size,
        timestamp_unit_ms={"ms": 1.0, "s": 1000.0, None: None}[args.timestamps],
        output_length=args.output_length,
    )
    name = os.path.basename(path)
    if drawn is not None:
        drawn.begin(name)
    began = time.perf_counter()
    with (
        RequestLog(path, log_options) as log,
        progress(path) as on_step,
        _writer(args.trace, options, name) as keep,
    ):
        simulation = Simulation(islice(log, args.limit), options)
        auditor = Auditor(
            name,
            options.header(name),
            audit_options(args),
            on_audited=None if drawn is None else drawn.add,
        )
        try:
            for number, record in enumerate(simulation, 2):  # as the lines of the trace are counted
                auditor.step(record, number)
                if keep is not None:
                    keep.write(record)
                if on_step is not None:
                    on_step(log.tell)
        except TooLargeError as error:
            raise TraceError(log.path, log.line, str(error)) from error
        if not simulation.stats.requests:
            raise TraceError(log.path, log.line, "no requests")
    figures = asdict(simulation.stats)
    figures["wall_s"] = round(time.perf_counter() - began, 3)
    return auditor.result(), figures


@contextlib.contextmanager
def _writer(path: str | None, options: EngineOptions, name: str) -> Iterator[TraceWriter | None]:
    if path is None:
        yield None
        return
    try:
        with TraceWriter(path, options.header(name)) as writer:
            yield writer
    except OSError as error:
        raise TraceError(path, 0, error.strerror or str(error)) from error


def _summary(audit: TraceAudit, figures: dict[str, float]) -> str:
    hits = figures["cached_tokens"] / max(1, figures["prompt_tokens"])
    preempted = f", {figures['preemptions']:,} preemptions" if figures["preemptions"] else ""
    rate = audit.steps / max(figures["wall_s"], 1e-3) * 60
    return (
        f"{printable(audit.trace)}: {figures['requests']:,} requests in {audit.steps:,} steps, "
        f"{hits:.0%} of the prompt tokens cached{preempted};\n"
        f"{figures['simulated_s']:,.0f} s of serving in {figures['wall_s']:,.1f} s "
        f"({rate:,.0f} steps a minute)"
    )


def _number(name: str, least: int, most: int = 1 << 31) -> dict[str, Any]:
    return {"type": whole_number(least, most), "default": _DEFAULTS[name], "metavar": "N"}


def _time(name: str, least: float = 0.0) -> dict[str, Any]:
    def number(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and value >= least):
            raise argparse.ArgumentTypeError(f"{text} is not a number from {least:g} on")
        return value

    return {"type": number, "default": _DEFAULTS[name], "metavar": "X"}
