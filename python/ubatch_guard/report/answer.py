"""What an audit says to people: an answer in a sentence or two, then tables that fit 80 columns."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields

from ubatch_guard.step import Policy
from ubatch_guard.trace.audit import TraceAudit
from ubatch_guard.trace.ranks import RANKS, rank_shares

OLD_RULE = "vLLM's rule of 0.28 to 0.33"
Row = Sequence[str]

_WIDTH = 80
_SHORTEST_NAME = 12
_COLUMNS = {
    "steps": ("", "steps"),
    "eligible": ("", "eligible"),
    "hazardous": ("unsafe", "at cut"),
    "hazardous_any_cut": ("unsafe", "any cut"),
    "kept": ("run", "split"),
    "reordered": ("re-", "ordered"),
    "vetoed": ("run", "whole"),
}
_LEGEND = (
    "eligible: large enough to be cut. unsafe: at the engine's own cut, or at any",
    "that padding for other ranks can move it to. run: with this guard.",
)


def total(audits: Sequence[TraceAudit]) -> TraceAudit:
    """The sum of all counts; the times are the slowest trace's."""
    result = TraceAudit("all")
    for field in fields(TraceAudit)[1:]:
        known = [value for audit in audits if (value := getattr(audit, field.name)) is not None]
        if known:
            setattr(result, field.name, max(known) if field.name.startswith("check_us") else sum(known))
    return result


def answer(audit: TraceAudit, policy: Policy) -> str:
    """The counts in words."""
    if not audit.eligible:
        return (
            f"None of the {audit.steps:,} steps is large enough to be cut: see "
            "--dbo-prefill-token-threshold and --dbo-decode-token-threshold."
        )
    needless = f"refuses {_steps(audit.engine_needless)} needlessly" if audit.engine_needless else ""
    if audit.hazardous:
        verb = "is" if audit.hazardous == 1 else "are"
        first = (
            f"{audit.hazardous:,} of the {_steps(audit.eligible)} that microbatching would cut {verb} unsafe "
            f"at the cut. vLLM 0.34, which has no rule, lets {_all(audit.hazardous)} through unguarded; "
            f"{OLD_RULE} lets {audit.engine_missed or 'none'} through{needless and ' and ' + needless}."
        )
    else:
        first = (
            f"None of the {_steps(audit.eligible)} that microbatching would cut is unsafe at the cut"
            + (f"; {audit.hazardous_any_cut:,} can become so by padding" if audit.hazardous_any_cut else "")
            + f". The rule of vLLM 0.28 to 0.33 {needless or 'refuses none needlessly'}."
        )
    under_rule = _percent(audit.engine_kept_tokens, audit.eligible_tokens)
    unsafe = ", the unsafe ones among them" if audit.engine_missed else ""
    return (
        f"{first} With ubatch-guard ({policy.value}) {audit.kept:,} run split and none of them is unsafe: "
        f"{_percent(audit.kept_tokens, audit.eligible_tokens)} of their tokens keep the overlap "
        f"({under_rule} under that rule{unsafe})."
    )


def print_audits(audits: Sequence[TraceAudit], policy: Policy, ranks: int = 1) -> None:
    """Print the tables of some traces and, last, the answer.

    Args:
        audits: Counts of the traces, at least one.
        policy: What they were audited for.
        ranks: Most data-parallel ranks of the table about ranks; 1: no such table.
    """
    everything = total(audits)
    rows = [_trace_row(audit) for audit in audits]
    if len(audits) > 1:
        rows.append(_trace_row(everything))
    headings = [("", "trace"), *_COLUMNS.values()]
    _print_table(headings, rows, total_row=len(audits) > 1)
    print(*_LEGEND, sep="\n")
    print()
    if everything.eligible:
        _print_table(
            [
                ("", "rule"),
                ("run", "split"),
                ("of them", "unsafe"),
                ("run", "whole"),
                ("overlapped", "tokens"),
            ],
            list(_rule_rows(everything, policy)),
        )
        if everything.check_us_p50 is not None:
            print(
                f"The guard's answer took {everything.check_us_p50:.0f} us (median) and "
                f"{everything.check_us_p99:.0f} us (99th percentile) a step."
            )
        print()
        if ranks > 1:
            _print_ranks(audits, policy, ranks)
    if everything.cut is not None:
        print(
            f"The engine that was recorded really cut {_steps(everything.cut)}, "
            f"{everything.cut_unsafe or 'none'} of them where it is unsafe."
        )
    _print_wrapped(answer(everything, policy))


def printable(text: str) -> str:
    """A text in one line: a file may be named with line feeds and escapes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def shortened(name: str, width: int) -> str:
    """A name without its middle, if it is too long: names of traces differ at their ends."""
    if len(name) <= width:
        return name
    tail = (width - 3) // 2
    return f"{name[: width - 3 - tail]}...{name[len(name) - tail :]}"


def _rule_rows(audit: TraceAudit, policy: Policy) -> Iterator[Row]:
    """A row for each way to treat the eligible steps."""

    def row(name: str, split: int, unsafe: int, tokens: int) -> Row:
        share = _percent(tokens, audit.eligible_tokens)
        return [name, f"{split:,}", f"{unsafe:,}", f"{audit.eligible - split:,}", f"{tokens:,} ({share})"]

    yield row("none (vLLM 0.34)", audit.eligible, audit.hazardous, audit.eligible_tokens)
    yield row(OLD_RULE, audit.eligible - audit.engine_vetoed, audit.engine_missed, audit.engine_kept_tokens)
    yield row("ubatch-guard, veto", audit.eligible - audit.hazardous_any_cut, 0, audit.safe_tokens)
    if policy is not Policy.VETO:
        yield row(f"ubatch-guard, {policy.value}", audit.kept, 0, audit.kept_tokens)


def _print_ranks(audits: Sequence[TraceAudit], policy: Policy, most: int) -> None:
    rows = []
    for number in sorted({*(count for count in RANKS if count < most), most}):
        shares = rank_shares(audits, number)
        assert shares is not None
        figures = [
            shares.engine_kept,
            shares.veto_kept,
            shares.kept,
            shares.unsafe_unguarded,
            shares.unsafe_engine,
        ]
        rows.append([f"{number:,}", *(f"{100 * figure:.1f} %" for figure in figures)])
    print("Data-parallel ranks: a step is cut on all or on none. Share of the steps that")
    print("are cut, and of those cut with an unsafe cut on some rank:")
    _print_table(
        [
            ("", "ranks"),
            ("cut by", "0.28-0.33"),
            ("cut with", "veto"),
            ("cut with", policy.value),
            ("unsafe with", "0.34"),
            ("unsafe with", "0.28-0.33"),
        ],
        rows,
    )
    print()


def _trace_row(audit: TraceAudit) -> Row:
    name = audit.trace.removesuffix(".gz").removesuffix(".zst").removesuffix(".jsonl")
    return [printable(name), *(f"{getattr(audit, key):,}" for key in _COLUMNS)]


def _print_table(
    headings: Sequence[tuple[str, str]], rows: Sequence[Row], *, total_row: bool = False
) -> None:
    """A table of two heading lines: the first column to the left, numbers to the right."""
    table = [*zip(*headings, strict=True), *rows]
    first, *widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    numbers = sum(widths)
    gap = "  " if first + numbers + 2 * len(widths) <= _WIDTH else " "
    numbers += len(gap) * len(widths)
    first = min(first, max(_SHORTEST_NAME, _WIDTH - numbers))
    rule = "-" * (first + numbers)
    for number, row in enumerate(table):
        if number == 2 or (total_row and number == len(table) - 1):
            print(rule)
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths, strict=True)]
        print(gap.join([shortened(row[0], first).ljust(first), *cells]).rstrip())


def _print_wrapped(text: str) -> None:
    import shutil
    import textwrap

    width = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80
    print("\n".join(textwrap.wrap(text, max(40, min(width, 100)), break_on_hyphens=False)))


def _steps(count: int) -> str:
    return f"{count:,} step" if count == 1 else f"{count:,} steps"


def _all(count: int) -> str:
    return "it" if count == 1 else f"all {count:,}"


def _percent(part: int, whole: int) -> str:
    """A share that says 100 only where nothing is missing, and 0 only where nothing is there."""
    if part == whole:
        return "100 %"
    percent = 100 * part / whole
    return f"{min(percent, 99.9) if percent > 50 else max(percent, 0.1):.1f} %" if part else "0 %"
