"""The command ``ubatch-guard audit``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

from ubatch_guard.step import Policy, Verdict
from ubatch_guard.trace.audit import (
    DBO_DECODE_TOKEN_THRESHOLD,
    DBO_PREFILL_TOKEN_THRESHOLD,
    AuditedStep,
    AuditOptions,
    TraceAudit,
    audit_trace,
)
from ubatch_guard.trace.format import TraceError
from ubatch_guard.trace.reader import TraceReader

# Two lines each, so that the table fits beside others.
_HEADINGS = {
    "trace": ("", "trace"),
    "steps": ("", "steps"),
    "eligible": ("", "eligible"),
    "hazardous": ("unsafe", "at cut"),
    "hazardous_any_cut": ("unsafe", "any cut"),
    "engine_vetoed": ("vLLM", "vetoed"),
    "engine_missed": ("vLLM", "missed"),
    "engine_needless": ("vLLM", "needless"),
    "kept": ("run", "split"),
    "vetoed": ("run", "whole"),
    "reordered": ("re-", "ordered"),
    "cut": ("really", "cut"),
    "cut_unsafe": ("cut", "unsafe"),
    "check_us_p50": ("us", "p50"),
    "check_us_p99": ("us", "p99"),
}
_LEGEND = (
    "eligible: large enough to be split. unsafe: at vLLM's own cut, or at any that padding can move it to.",
    "vLLM: refused by its own guard, unsafe at the cut but let through, refused though safe at any cut.",
    "run: what this guard makes of the eligible steps, some of them reordered. us: time of its answer.",
)
_IF_KNOWN = ("cut", "cut_unsafe")
"""Counts that only traces of version 2 have; left out where they are not known."""
_PROGRESS_STEPS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Count, in traces of engine steps, the steps that microbatching would make wrong, what vLLM's own "
        "guard made of them, and what this guard does."
    )
    parser.epilog = (
        "Exit status: 0, or 2 where a trace could not be read (the others are audited all the same)."
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a step trace: plain text, gzip or zstd")
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
    options = AuditOptions(
        policy=Policy(args.policy),
        prefill_token_threshold=args.dbo_prefill_token_threshold,
        decode_token_threshold=args.dbo_decode_token_threshold,
        reference=args.engine == "reference",
        partial=args.partial,
    )
    audits = []
    status = 0
    for path in args.traces:
        unsafe: list[dict[str, Any]] = []
        on_audited = _explain(path, unsafe, as_json=args.json) if args.explain else None
        try:
            with _progress(path, shown=args.json or not args.explain) as on_step:
                audit = audit_trace(path, options, on_audited=on_audited, on_step=on_step)
        except TraceError as error:
            # What is left to say it to may be closed.
            with contextlib.suppress(OSError):
                print(_printable(str(error)), file=sys.stderr)
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
        _print_table(audits, options.policy)
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


def _explanation(path: str, step: AuditedStep, verdict: Verdict) -> Iterator[str]:
    """The culprits of an unsafe step, and what becomes of it, a line each."""
    where = f"{_printable(path)}:{step.line}:"
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
        task = progress.add_task(_printable(os.path.basename(path)), total=size)
        steps = 0

        def on_step(reader: TraceReader) -> None:
            nonlocal steps
            steps += 1
            if steps % _PROGRESS_STEPS == 0:
                progress.update(task, completed=reader.tell())

        yield on_step


def _print_table(audits: Sequence[TraceAudit], policy: Policy) -> None:
    keys = [
        key
        for key in _HEADINGS
        if key not in _IF_KNOWN or any(getattr(audit, key) is not None for audit in audits)
    ]
    rows = [[_cell(key, getattr(audit, key)) for key in keys] for audit in audits]
    if len(audits) > 1:
        sums = {"trace": "all"}
        for key in keys:
            counts = [count for audit in audits if isinstance(count := getattr(audit, key), int)]
            if counts:
                sums[key] = str(sum(counts))
        rows.append([sums.get(key, "") for key in keys])
    title = f"Steps that microbatching would split, policy {policy.value}"
    try:
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        _print_plain(title, keys, rows)
        return
    table = Table(
        title=title, box=SIMPLE, padding=(0, 1, 0, 0), caption="\n".join(_LEGEND), caption_justify="left"
    )
    for key in keys:
        justify: Literal["left", "right"] = "left" if key == "trace" else "right"
        table.add_column("\n".join(_HEADINGS[key]), justify=justify, no_wrap=True)
    for row in rows:
        if row is rows[-1] and len(audits) > 1:
            table.add_section()
        table.add_row(*row)
    # As wide as it is: a terminal that is narrower breaks its lines, which folded columns would not survive.
    # A file name may look like rich's own markup.
    console = Console(width=1000, markup=False, emoji=False)
    console.width = console.measure(table).maximum
    console.print(table)


def _print_plain(title: str, keys: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The table without rich: columns parted by two spaces, numbers to the right."""
    headings = list(zip(*(_HEADINGS[key] for key in keys), strict=True))
    widths = [max(map(len, column)) for column in zip(*headings, *rows, strict=True)]
    print(title)
    for row in (*headings, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]))
    print(*_LEGEND, sep="\n")


def _cell(key: str, value: object) -> str:
    if key == "trace":
        return _printable(str(value).removesuffix(".gz").removesuffix(".zst").removesuffix(".jsonl"))
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _printable(text: str) -> str:
    """A text in one line: a file may be named with line feeds and escapes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
