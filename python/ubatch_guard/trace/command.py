"""The command ``ubatch-guard audit``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from ubatch_guard.step import Policy, Verdict
from ubatch_guard.trace.answer import print_audits, printable
from ubatch_guard.trace.audit import (
    DBO_DECODE_TOKEN_THRESHOLD,
    DBO_PREFILL_TOKEN_THRESHOLD,
    AuditedStep,
    AuditOptions,
    audit_trace,
)
from ubatch_guard.trace.format import TraceError
from ubatch_guard.trace.reader import TraceReader

_IF_KNOWN = ("cut", "cut_unsafe")
"""Counts that only traces of version 2 have; left out where they are not known."""
_PROGRESS_STEPS = 16
EXAMPLE = os.path.join(os.path.dirname(__file__), "data", "example.jsonl.gz")
"""The first 59 steps of tests/traces/grpo-t128-b64.jsonl.gz."""
MAX_RANKS = 1 << 16


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
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each trace")
    parser.add_argument(
        "--policy",
        choices=[Policy.VETO.value, Policy.REORDER.value],
        default=Policy.REORDER.value,
        help="what becomes of a step with an unsafe cut: run whole, or reordered with decodes in front "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--dbo-prefill-token-threshold",
        type=_token_count,
        default=DBO_PREFILL_TOKEN_THRESHOLD,
        metavar="N",
        help="fewest tokens of a step that is split (default: %(default)s)",
    )
    parser.add_argument(
        "--dbo-decode-token-threshold",
        type=_token_count,
        default=DBO_DECODE_TOKEN_THRESHOLD,
        metavar="N",
        help="the same where every query is one token (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks",
        type=_rank_count,
        default=1,
        metavar="N",
        help="also show what becomes of the overlap with up to N data-parallel ranks, 1 to 65,536",
    )
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
    options = AuditOptions(
        policy=Policy(args.policy),
        prefill_token_threshold=args.dbo_prefill_token_threshold,
        decode_token_threshold=args.dbo_decode_token_threshold,
        reference=args.engine == "reference",
        partial=args.partial,
    )
    audits = []
    status = 0
    for path in [*([EXAMPLE] if args.example else []), *args.traces]:
        unsafe: list[dict[str, Any]] = []
        on_audited = _explain(path, unsafe, as_json=args.json) if args.explain else None
        try:
            with _progress(path, shown=args.json or not args.explain) as on_step:
                audit = audit_trace(path, options, on_audited=on_audited, on_step=on_step)
        except TraceError as error:
            # What is left to say it to may be closed.
            with contextlib.suppress(OSError):
                print(printable(str(error)), file=sys.stderr)
            status = 2
            continue
        audits.append(audit)
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


def _token_count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return count


def _rank_count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text} is not among 1 to {MAX_RANKS}")
    return count


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


@contextlib.contextmanager
def _progress(path: str, *, shown: bool) -> Iterator[Callable[[TraceReader], None] | None]:
    """A progress bar over the bytes of a trace, where standard error is a terminal and rich is there."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        yield None
        return
    size = os.path.getsize(path) if os.path.isfile(path) else None
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(os.path.basename(path)), total=size)
        steps = 0

        def on_step(reader: TraceReader) -> None:
            nonlocal steps
            steps += 1
            if steps % _PROGRESS_STEPS == 0:
                progress.update(task, completed=reader.tell())

        yield on_step
