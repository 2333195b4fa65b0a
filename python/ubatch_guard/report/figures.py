"""The figures of a report, drawn with plotly, in the colours of Okabe and Ito for the colour-blind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ubatch_guard.report.answer import OLD_RULE, printable, shortened
from ubatch_guard.report.picture import (
    KINDS,
    Bar,
    Batch,
    OpenedStep,
    Read,
    TimeLine,
    TracePicture,
    microbatches,
)
from ubatch_guard.step import CutRange, Policy
from ubatch_guard.trace.audit import TraceAudit
from ubatch_guard.trace.ranks import RANKS, rank_shares

MAX_ARCS = 200
"""Most arcs of a batch that are drawn; the broken ones come first."""

_GREEN, _SKY, _RED, _GREY, _PALE = "#009E73", "#56B4E9", "#D55E00", "#999999", "#E3E3E3"
_ORANGE, _BLUE, _PINK, _VIOLET = "#E69F00", "#0072B2", "#CC79A7", "#5B3A8C"
_COLOUR_OF_KIND = dict(zip(KINDS, (_PALE, _GREEN, _SKY, _GREY), strict=True))
_LABEL_OF_KIND = dict(
    zip(KINDS, ("too small to be cut", "cut", "cut in another order", "run whole"), strict=True)
)
_NAME_WIDTH = 40


def text_of(name: str) -> str:
    """A name out of a trace as plotly takes it, which reads tags: one line, not too long, and no tag."""
    return escape(shortened(printable(name), _NAME_WIDTH), quote=False)


def time_line(picture: TracePicture) -> go.Figure:
    """Tokens a step over the steps: what becomes of them without a guard, and with this one."""
    line = picture.time_line
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.14,
        subplot_titles=("Without a guard (vLLM 0.34)", "With ubatch-guard"),
    )
    small, *cut = (list(column) for column in zip(*line.tokens, strict=True))
    safe = [sum(tokens) - unsafe for *tokens, unsafe in zip(*cut, line.unsafe, strict=True)]
    layers = [
        (1, "too small to be cut", _PALE, small),
        (1, "cut", _GREEN, safe),
        (1, "cut where it is unsafe", _RED, line.unsafe),
        *(
            (2, _LABEL_OF_KIND[kind], _COLOUR_OF_KIND[kind], tokens)
            for kind, tokens in zip(KINDS, (small, *cut), strict=True)
        ),
    ]
    shown: set[str] = set()
    for row, label, colour, tokens in layers:
        figure.add_trace(_time_layer(line, label, colour, tokens, shown), row=row, col=1)
    figure.update_xaxes(tickformat=",d", rangemode="nonnegative")
    figure.update_yaxes(tickformat="~s", rangemode="tozero")
    figure.update_layout(barmode="stack", bargap=0, height=420, hovermode="x unified")
    return _styled(figure)


def _time_layer(line: TimeLine, label: str, colour: str, tokens: Sequence[int], shown: set[str]) -> go.Bar:
    steps = [min(line.width, line.steps - start) for start in range(0, line.steps, line.width)]
    middles = [
        start + (count + 1) / 2 for start, count in zip(range(0, line.steps, line.width), steps, strict=True)
    ]
    first_time = label not in shown
    shown.add(label)
    return go.Bar(
        x=middles,
        y=[round(total / count, 1) for total, count in zip(tokens, steps, strict=True)],
        width=steps,
        name=label,
        legendgroup=label,
        showlegend=first_time,
        marker={"color": colour, "line": {"width": 0}},
        hovertemplate="%{y:,.0f} tokens a step",
    )


def opened_step(step: OpenedStep) -> go.Figure:
    """A step as microbatches: its requests as bars, who reads whom as arcs, before and after reordering."""
    batches = [("As it was scheduled", step.before)]
    if step.after is not None:
        batches.append(("As ubatch-guard orders it", step.after))
    figure = make_subplots(
        rows=len(batches),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.16,
        subplot_titles=[title for title, _ in batches],
    )
    legend = _Legend()
    for row, (_, batch) in enumerate(batches, 1):
        strip = _Strip(step, batch)
        for trace in strip.bars():
            legend.label(trace)
            figure.add_trace(trace, row=row, col=1)
        for trace, path in strip.arcs():
            legend.label(trace)
            figure.add_trace(trace, row=row, col=1)
            figure.add_shape(**path, row=row, col=1)
        for shape in strip.microbatches():
            figure.add_shape(**shape, row=row, col=1)
        # As scheduled alone: in the guard's order no cut is unsafe.
        if batch is step.before:
            for trace in strip.cut_ranges():
                legend.label(trace)
                figure.add_trace(trace, row=row, col=1)
        for annotation in strip.labels():
            figure.add_annotation(**annotation, row=row, col=1)
    figure.update_xaxes(range=[0, step.num_tokens], tickformat=",d")
    figure.update_yaxes(visible=False, range=[-0.35, 2.3], fixedrange=True)
    figure.update_layout(barmode="overlay", height=130 + 210 * len(batches), hovermode="closest")
    return _styled(figure)


class _Legend:
    """Lets each name appear once."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def label(self, trace: go.Bar | go.Scatter) -> None:
        trace.legendgroup = trace.name
        trace.showlegend = trace.name not in self._shown
        self._shown.add(trace.name)


@dataclass(frozen=True, slots=True)
class _Strip:
    """A batch of an opened step."""

    step: OpenedStep
    batch: Batch

    def bars(self) -> Iterator[go.Bar]:
        """A bar for each request that reads or is read, and one for each run of others."""
        roles = self._roles()
        drawn: dict[str, list[tuple[int, int, str]]] = {}
        runs = groupby(enumerate(self.batch.bars), key=lambda item: roles.get(item[0]) or "")
        for role, run in runs:
            bars = [bar for _, bar in run]
            if role:
                for bar in bars:
                    drawn.setdefault(role, []).append((bar.first, bar.num_scheduled_tokens, _described(bar)))
            else:
                tokens = sum(bar.num_scheduled_tokens for bar in bars)
                text = f"{len(bars):,} requests<br>{tokens:,} tokens"
                if len(bars) == 1:
                    text = _described(bars[0])
                drawn.setdefault("other requests", []).append((bars[0].first, tokens, text))
        for role, colour in _COLOUR_OF_ROLE.items():
            if role in drawn:
                firsts, widths, texts = zip(*drawn[role], strict=True)
                yield go.Bar(
                    orientation="h",
                    base=firsts,
                    x=widths,
                    y=[0.5] * len(firsts),
                    width=0.6,
                    name=role,
                    text=None,
                    hovertext=texts,
                    hovertemplate="%{hovertext}<extra></extra>",
                    marker={"color": colour, "line": {"color": "white", "width": self._gaps(widths)}},
                )

    def _gaps(self, widths: Sequence[int]) -> list[float]:
        """A white line around each bar that it would not hide."""
        return [0.5 if 200 * width > self.step.num_tokens else 0 for width in widths]

    def _roles(self) -> dict[int, str]:
        reads = self.batch.reads or ()
        readers = {read.reader for read in reads}
        writers = {read.writer for read in reads}
        return {
            **dict.fromkeys(readers, "reads in this step"),
            **dict.fromkeys(writers, "is read in this step"),
            **dict.fromkeys(readers & writers, "both"),
        }

    def arcs(self) -> Iterator[tuple[go.Scatter, dict[str, object]]]:
        """Arcs from readers to writers, grouped by what cuts do to them: dots that say who, and a path."""
        labels = {2: "broken by the cut", 1: "broken by other cuts", 0: "in order"}
        colours = {2: _RED, 1: _ORANGE, 0: _GREY}
        ranked = sorted(
            ((self._damage(read), read.reader, read.writer) for read in self.batch.reads or ()), reverse=True
        )
        for damage, group in groupby(ranked[:MAX_ARCS], key=lambda item: item[0]):
            pairs = [(self.batch.bars[reader], self.batch.bars[writer]) for _, reader, writer in group]
            arcs = [_Arc.between(*pair, self.step.num_tokens) for pair in pairs]
            names = [[text_of(bar.request_id) for bar in pair] for pair in pairs]
            dots = go.Scatter(
                x=[arc.middle for arc in arcs],
                y=[arc.top for arc in arcs],
                mode="markers",
                name=labels[damage],
                marker={"color": colours[damage], "size": 7},
                hovertext=[f"{reader}<br>reads blocks that {writer} writes" for reader, writer in names],
                hovertemplate="%{hovertext}<extra></extra>",
            )
            yield (
                dots,
                {
                    "type": "path",
                    "path": " ".join(arc.path for arc in arcs),
                    "line": {"color": colours[damage], "width": 2 if damage == 2 else 1},
                    "opacity": 0.8,
                },
            )

    def _damage(self, read: Read) -> int:
        """2: the engine's own cuts part the two the wrong way round; 1: other cuts would; 0: none does."""
        if any(read.unsafe.first <= cut <= read.unsafe.last for cut in self.step.cuts):
            return 2
        return int(read.unsafe.first <= read.unsafe.last)

    def microbatches(self) -> Iterator[dict[str, object]]:
        """The engine's cuts."""
        for cut in self.step.cuts:
            yield {
                "type": "line",
                "x0": cut,
                "x1": cut,
                "y0": 0.05,
                "y1": 2.0,
                "line": {"color": "#222222", "width": 2, "dash": "dash"},
            }

    def labels(self) -> Iterator[dict[str, object]]:
        """The names of the microbatches."""
        for number, (first, end) in enumerate(microbatches(self.step.cuts, self.step.num_tokens), 1):
            yield {
                "x": (first + end) / 2,
                "y": 2.15,
                "text": f"microbatch {number}",
                "showarrow": False,
                "font": {"size": 11, "color": "#555555"},
            }

    def cut_ranges(self) -> Iterator[go.Bar]:
        """Where a cut is unsafe, of all the cuts that padding for other ranks can bring about."""
        yield _ranges("cuts that are safe", _GREEN, [self.step.feasible])
        yield _ranges(
            "cuts that are unsafe", _RED, [CutRange(unsafe.first, unsafe.last) for unsafe in self.step.unsafe]
        )


_COLOUR_OF_ROLE = {
    "other requests": _PALE,
    "is read in this step": _BLUE,
    "reads in this step": _PINK,
    "both": _VIOLET,
}


def _ranges(name: str, colour: str, ranges: Sequence[CutRange]) -> go.Bar:
    return go.Bar(
        orientation="h",
        base=[cuts.first - 0.5 for cuts in ranges],
        x=[cuts.last - cuts.first + 1 for cuts in ranges],
        y=[-0.1] * len(ranges),
        width=0.12,
        name=name,
        marker={"color": colour, "line": {"width": 0}},
        hovertext=[f"{name}: {cuts.first:,} to {cuts.last:,}" for cuts in ranges],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _middle(bar: Bar) -> float:
    return bar.first + bar.num_scheduled_tokens / 2


def _described(bar: Bar) -> str:
    return (
        f"{text_of(bar.request_id)}<br>{bar.num_scheduled_tokens:,} tokens, "
        f"{bar.num_computed_tokens:,} before them<br>place {bar.position} of the batch as scheduled"
    )


@dataclass(frozen=True, slots=True)
class _Arc:
    """A parabola over the bars from one request to another, the higher the longer."""

    start: float
    end: float
    height: float

    @classmethod
    def between(cls, reader: Bar, writer: Bar, num_tokens: int) -> _Arc:
        start, end = _middle(reader), _middle(writer)
        return cls(start, end, round(0.3 + 0.8 * abs(end - start) / num_tokens, 3))

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2

    @property
    def top(self) -> float:
        return 0.8 + self.height

    @property
    def path(self) -> str:
        # The control point of a parabola is twice as high as its top.
        return f"M {self.start},0.8 Q {self.middle},{0.8 + 2 * self.height} {self.end},0.8"


def kept_tokens(audit: TraceAudit, unsafe: int, missed: int, policy: Policy) -> go.Figure:
    """The share of the eligible tokens that keep the overlap, by rule.

    Args:
        audit: All counts.
        unsafe: Tokens of the steps that are unsafe at the engine's own cut.
        missed: Those of them in steps that vLLM's old rule lets through.
        policy: What was audited for.
    """
    rules: list[tuple[str, int, int]] = [
        ("no rule (vLLM 0.34)", audit.eligible_tokens - unsafe, unsafe),
        (OLD_RULE, audit.engine_kept_tokens - missed, missed),
        ("ubatch-guard, veto", audit.safe_tokens, 0),
    ]
    if policy is not Policy.VETO:
        rules.append((f"ubatch-guard, {policy.value}", audit.kept_tokens, 0))
    figure = go.Figure()
    whole = max(1, audit.eligible_tokens)
    names, safe, wrong = zip(*rules, strict=True)
    for name, colour, tokens in (("cut", _GREEN, safe), ("cut where it is unsafe", _RED, wrong)):
        figure.add_bar(
            orientation="h",
            y=names,
            x=[count / whole for count in tokens],
            name=name,
            marker_color=colour,
            hovertemplate="%{x:.2%}",
        )
    figure.update_xaxes(tickformat=".0%", range=[0, 1])
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(barmode="stack", height=250)
    return _styled(figure)


def ranks(audits: Sequence[TraceAudit], policy: Policy) -> go.Figure:
    """The share of the steps that are cut, and that are cut unsafely, for 1 to 256 data-parallel ranks."""
    lines = [
        (f"cut: ubatch-guard, {policy.value}", _SKY, "solid", "kept"),
        ("cut: ubatch-guard, veto", _GREEN, "solid", "veto_kept"),
        (f"cut: {OLD_RULE}", _GREY, "solid", "engine_kept"),
        ("unsafe on some rank: no rule (vLLM 0.34)", _RED, "dash", "unsafe_unguarded"),
        (f"unsafe on some rank: {OLD_RULE}", _ORANGE, "dash", "unsafe_engine"),
    ]
    if policy is Policy.VETO:
        lines = lines[1:]
    shares = [share for number in RANKS if (share := rank_shares(audits, number)) is not None]
    figure = go.Figure()
    for name, colour, dash, field in lines:
        figure.add_scatter(
            x=[str(share.ranks) for share in shares],
            y=[getattr(share, field) for share in shares],
            name=name,
            mode="lines+markers",
            line={"color": colour, "dash": dash},
            hovertemplate="%{y:.1%}",
        )
    figure.update_xaxes(type="category")
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    figure.update_layout(height=380, hovermode="x unified")
    return _styled(figure)


def _styled(figure: go.Figure) -> go.Figure:
    figure.update_layout(
        template="none",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#222222"},
        margin={"l": 10, "r": 10, "t": 40, "b": 10},
        legend={"orientation": "h", "yanchor": "top", "y": -0.12, "x": 0, "traceorder": "normal"},
        dragmode="zoom",
    )
    figure.update_yaxes(automargin=True, gridcolor="#EEEEEE", zerolinecolor="#CCCCCC")
    figure.update_xaxes(automargin=True, gridcolor="#EEEEEE", zerolinecolor="#CCCCCC")
    return figure
