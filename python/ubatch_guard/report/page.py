"""The report of an audit: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, TextIO

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from ubatch_guard import __version__
from ubatch_guard.report import figures
from ubatch_guard.report.answer import answer, printable, shortened, total
from ubatch_guard.report.picture import OpenedStep, TracePicture
from ubatch_guard.step import Policy
from ubatch_guard.trace.audit import TraceAudit

MAX_CULPRITS_SHOWN = 20
_NAME_WIDTH = 60


@dataclass(frozen=True, slots=True)
class TraceReport:
    """What a report shows of one trace."""

    audit: TraceAudit
    picture: TracePicture


def write_report(file: TextIO, reports: Sequence[TraceReport], policy: Policy) -> None:
    """Write the page.

    Args:
        file: Open for text in UTF-8.
        reports: The traces, at least one.
        policy: What they were audited for.

    Raises:
        OSError: It cannot be written.
    """
    audits = [report.audit for report in reports]
    everything = total(audits)
    unsafe = sum(report.picture.unsafe_tokens for report in reports)
    missed = sum(report.picture.missed_tokens for report in reports)
    data: dict[str, Any] = {
        "kept": _plain(figures.kept_tokens(everything, unsafe, missed, policy)),
        "ranks": _plain(figures.ranks(audits, policy)),
        "traces": [
            {
                "timeLine": _time_line(report.picture),
                "opened": [
                    {
                        "number": step.number,
                        "title": _title(step),
                        "note": _note(step),
                        "figure": _plain(figures.opened_step(step)),
                    }
                    for step in report.picture.opened
                ],
            }
            for report in reports
        ],
    }
    if not everything.eligible:
        del data["kept"], data["ranks"]
    template = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=escape(", ".join(_name(audit.trace) for audit in audits[:3]) + (", ..." if audits[3:] else "")),
        answer=escape(answer(everything, policy)),
        sections="\n".join(_section(number, report) for number, report in enumerate(reports)),
        version=escape(__version__),
        plotly=get_plotlyjs(),
        # Nothing in it may end the element that it is in.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )
    file.write(page)


def _time_line(picture: TracePicture) -> dict[str, Any] | None:
    return _plain(figures.time_line(picture)) if picture.time_line.steps else None


def _section(number: int, report: TraceReport) -> str:
    picture = report.picture
    parts = [
        f'<section data-trace="{number}">',
        f"<h2>{escape(_name(report.audit.trace))}</h2>",
        f"<p>{report.audit.steps:,} steps, {report.audit.eligible:,} large enough to be cut.</p>",
    ]
    if picture.time_line.steps:
        parts.append('<h3>Tokens of each step</h3>\n<div class="figure" data-figure="timeLine"></div>')
    if picture.opened:
        parts += [
            "<h3>Inside the unsafe steps</h3>",
            "<p>A bar is a request, as long as its tokens in the step. An arc joins a request to one whose "
            "blocks it reads. It is red where the cut puts the reader into an earlier microbatch than what "
            "it reads: the reader would get whatever the blocks held before.</p>",
            '<p class="choice"><button type="button" data-move="-1">&larr;<span> previous</span></button>',
            f"<label>Step <select>{''.join(_options(picture.opened))}</select></label>",
            '<button type="button" data-move="1"><span>next </span>&rarr;</button></p>',
            '<p class="note" aria-live="polite"></p>',
            '<div class="figure" data-figure="opened"></div>',
            "<h3>Which requests</h3>",
            '<div class="tables">',
            *_culprits("Reads what is not written yet", picture.readers.most_common(MAX_CULPRITS_SHOWN)),
            *_culprits("Writes what is read too early", picture.writers.most_common(MAX_CULPRITS_SHOWN)),
            "</div>",
        ]
    else:
        parts.append("<p>No step of it is unsafe, wherever it is cut.</p>")
    return "\n".join([*parts, "</section>"])


def _options(opened: Iterable[OpenedStep]) -> Iterator[str]:
    for index, step in enumerate(opened):
        yield f'<option value="{index}">{escape(_title(step))}</option>'


def _title(step: OpenedStep) -> str:
    fate = "run whole" if step.after is None else "reordered"
    return f"{step.number:,} (line {step.line:,}, {fate})"


def _note(step: OpenedStep) -> str:
    note = f"{step.num_tokens:,} tokens of {len(step.before.bars):,} requests; "
    at_cut = any(unsafe.first <= cut <= unsafe.last for cut in step.cuts for unsafe in step.unsafe)
    cuts = ", ".join(f"{cut:,}" for cut in step.cuts)
    safety = "unsafe" if at_cut else "safe, but padding for other ranks can move the cut to where it is not"
    note += f"the engine cuts it at {cuts}, which is {safety}. "
    if step.after is None:
        note += f"ubatch-guard runs it whole: {step.reason.value.replace('_', ' ')}."
    else:
        moved = sum(bar.position != place for place, bar in enumerate(step.after.bars))
        note += f"ubatch-guard moves {moved:,} requests, and every cut is safe."
    if step.before.reads is None:
        note += " Who reads whom is not shown: its block tables are too large."
    elif len(step.before.reads) > figures.MAX_ARCS:
        note += f" Of {len(step.before.reads):,} pairs {figures.MAX_ARCS} are drawn."
    return note


def _culprits(heading: str, counts: Sequence[tuple[str, int]]) -> Iterator[str]:
    yield f'<table><thead><tr><th>{heading}</th><th class="number">unsafe steps</th></tr></thead><tbody>'
    for request_id, count in counts:
        name = escape(shortened(printable(request_id), _NAME_WIDTH))
        yield f'<tr><td>{name}</td><td class="number">{count:,}</td></tr>'
    yield "</tbody></table>"


def _name(trace: str) -> str:
    return shortened(printable(trace), _NAME_WIDTH)


def _plain(figure: go.Figure) -> dict[str, Any]:
    plain: dict[str, Any] = figure.to_plotly_json()
    # Its arrays are numpy's, or plotly's own of base64.
    result: dict[str, Any] = json.loads(go.Figure(plain).to_json())
    return result
