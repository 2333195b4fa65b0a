"""The command ``ubatch-guard audit``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from ubatch_guard import trace
from ubatch_guard.commands.arguments import add_audit_arguments, audit_options
from ubatch_guard.commands.errors import say_error
from ubatch_guard.commands.pictures import NotWrittenError, Pictures, pictures, refuse_overwriting
from ubatch_guard.commands.progress import progress
from ubatch_guard.report.answer import print_audits, printable
from ubatch_guard.step import Verdict
from ubatch_guard.trace.audit import (
    AuditedStep,
    audit_trace,
)
from ubatch_guard.trace.format import TraceError
from ubatch_guard.trace.reader import TraceReader

_IF_KNOWN = ("cut", "cut_unsafe")
"""Counts that only traces of version 2 have; left out where they are not known."""
EXAMPLE = os.path.join(os.path.dirname(trace.__file__), "data", "example.jsonl.gz")
"""The first 59 steps of tests/traces/grpo-t128-b64.jsonl.gz."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    # One of two is needed, which argparse cannot say.
    parser.set_defaults(usage=parser.error)
    parser.description = (
        "Count the steps of a trace that microbatching would make wrong, what vLLM would do about them "
        "(0.34: nothing; 0.28 to 0.33: its old rule), and what this guard does."
    )
    parser.epilog = (
        "Exit status: 0, or 2 where a trace could not be read (the others are audited all the same)."
    )
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="a step trace: plain text, gzip or zstd")
    parser.add_argument("--example", action="store_true", help="audit the trace that comes with the package")
    add_audit_arguments(parser)
    parser.add_argument(
        "--explain", action="store_true", help="name reader, writer and block of every unsafe step"
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="count the whole lines of a trace that breaks off, as that of a killed process does",
    )
    parser.add_argument(
        "--engine",
        choices=["core", "reference"],
        default="core",
        help="decide with the Rust core or with the slow Python reference (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Audit the traces; the exit status."""
    if not args.traces and not args.example:
        args.usage("a TRACE is needed, or --example")
    paths = [*([EXAMPLE] if args.example else []), *args.traces]
    refuse_overwriting(args, paths)
    try:
        with pictures(args, len(paths)) as drawn:
            return _audit(paths, args, drawn)
    except NotWrittenError as error:
        say_error(error)
        return 2


def _audit(paths: Sequence[str], args: argparse.Namespace, drawn: Pictures | None) -> int:
    options = replace(audit_options(args), reference=args.engine == "reference", partial=args.partial)
    audits = []
    status = 0
    for path in paths:
        unsafe: list[dict[str, Any]] = []
        observers = [_explain(path, unsafe, as_json=args.json)] if args.explain else []
        if drawn is not None:
            drawn.begin(os.path.basename(path))
            observers.append(drawn.add)
        try:
            with progress(path, shown=args.json or not args.explain) as show:
                on_step = None if show is None else _teller(show)
                audit = audit_trace(path, options, on_audited=_all(observers), on_step=on_step)
        except TraceError as error:
            say_error(error)
            status = 2
            continue
        audits.append(audit)
        if drawn is not None:
            drawn.audited(audit)
        if args.json:
            line: dict[str, Any] = {
                key: value
                for key, value in asdict(audit).items()
                if value is not None or key not in _IF_KNOWN
            }
            if args.explain:
                line["unsafe_steps"] = unsafe
            print(json.dumps(line), flush=True)
    if audits and not args.json:
        print_audits(audits, options.policy, args.ranks)
    return status


def _all(observers: Sequence[Callable[[AuditedStep], None]]) -> Callable[[AuditedStep], None] | None:
    if len(observers) < 2:
        return observers[0] if observers else None

    def observe(step: AuditedStep) -> None:
        for observer in observers:
            observer(step)

    return observe


def _teller(show: Callable[[Callable[[], int]], None]) -> Callable[[TraceReader], None]:
    return lambda reader: show(reader.tell)


def _explain(path: str, unsafe: list[dict[str, Any]], *, as_json: bool) -> Callable[[AuditedStep], None]:
    """What ``--explain`` does with an unsafe step: print it, or keep it for the trace's JSON object."""

    def explain(step: AuditedStep) -> None:
        if step.verdict is None or not step.verdict.unsafe:
            return
        if as_json:
            unsafe.append(_unsafe_step_json(step, step.verdict))
        else:
            print(*_explanation(path, step, step.verdict), sep="\n")

    return explain


def _explanation(path: str, step: AuditedStep, verdict: Verdict) -> Iterator[str]:
    """The culprits of an unsafe step, and what becomes of it, a line each."""
    where = f"{printable(path)}:{step.line}:"
    ids = step.record.request_ids
    for cuts in verdict.unsafe:
        yield (
            f"{where} cuts {cuts.first}..{cuts.last} of {step.feasible.first}..{step.feasible.last} unsafe: "
            f"{ids[cuts.reader]!r} (position {cuts.reader}) reads block {cuts.block} of group {cuts.group}, "
            f"which {ids[cuts.writer]!r} (position {cuts.writer}) writes"
        )
    if verdict.order is None:
        yield f"{where} vetoed"
    else:
        moved = sum(i != position for i, position in enumerate(verdict.order.permutation))
        yield f"{where} reordered, {moved} of {len(ids)} requests moved"


def _unsafe_step_json(step: AuditedStep, verdict: Verdict) -> dict[str, Any]:
    ids = step.record.request_ids
    order = verdict.order
    return {
        "line": step.line,
        "feasible_cuts": [step.feasible.first, step.feasible.last],
        "unsafe_cuts": [
            {
                "first": cuts.first,
                "last": cuts.last,
                "reader": ids[cuts.reader],
                "writer": ids[cuts.writer],
                "group": cuts.group,
                "block": cuts.block,
            }
            for cuts in verdict.unsafe
        ],
        "order": None if order is None else [ids[position] for position in order.permutation],
    }
