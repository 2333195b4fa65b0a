"""The pictures of an audit: what is gathered for them, the page in a headless browser, the Perfetto trace."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import oracle
import pytest
from hypothesis import given
from strategies import steps

from ubatch_guard import reference
from ubatch_guard.commands.audit import EXAMPLE
from ubatch_guard.report.figures import opened_step, text_of
from ubatch_guard.report.picture import MAX_BINS, MAX_OPENED, TimeLine, TracePicture
from ubatch_guard.step import Step
from ubatch_guard.trace.audit import AuditedStep, AuditOptions, TraceAudit, audit_trace

TRACES = Path(__file__).parent / "traces"
MICRO = TRACES / "micro"
HOSTILE = "</script><script>document.title='owned'</script><b onmouseover=\"x\">&amp;\u2028\n{0}$title%{x}"


def _run(*arguments: object, prelude: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{prelude}\nimport sys\nfrom ubatch_guard.cli import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _picture(path: str | Path, **options: Any) -> tuple[TracePicture, TraceAudit]:
    picture = TracePicture(**options)
    return picture, audit_trace(path, AuditOptions(), on_audited=picture.add)


def _hostile_trace(tmp_path: Path) -> Path:
    """Two steps of requests with hostile names: one is reordered, for the other no order helps."""
    header = {
        "format": "ubatch-guard-steps",
        "version": 1,
        "block_sizes": [4],
        "sliding_windows": [None],
        "num_blocks": 10,
        "decode_threshold": None,
        "num_ubatches": 2,
    }
    reader, writer = f"r{HOSTILE}", f"w{HOSTILE}"
    empty: dict[str, Any] = {"finished": [], "preempted": [], "resumed": [], "appended": []}
    lines = [
        header,
        {
            **empty,
            "new": [[reader, 4, [[1, 2]]], [writer, 0, [[1]]]],
            "batch": [[reader, 4, 4], [writer, 0, 4]],
            "vllm_allows": True,
        },
        {
            **empty,
            "finished": [reader, writer],
            "new": [["a", 4, [[1, 2]]], ["b", 4, [[2, 1]]]],
            "batch": [["a", 4, 4], ["b", 4, 4]],
            "vllm_allows": True,
        },
    ]
    path = tmp_path / f"{HOSTILE.replace('/', '|')}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# What is gathered.


@given(steps())
def test_last_writes_are_the_oracles(step: Step) -> None:
    written = oracle.writes(step)
    last: dict[tuple[int, int], int] = {}
    for read in oracle.reads(step):
        for write in written.get(read.slot, ()):
            if write.request != read.request:
                pair = read.request, write.request
                last[pair] = max(last.get(pair, 0), write.offset)
    assert reference.last_writes(step) == last


@pytest.mark.parametrize("steps", [0, 1, MAX_BINS, MAX_BINS + 1, 5 * MAX_BINS + 3])
def test_a_time_line_keeps_every_token_in_few_bins(steps: int) -> None:
    line = TimeLine()
    totals, unsafe = [0, 0, 0, 0], 0
    for number in range(steps):
        kind = number % 4
        line.add(kind, number, unsafe=number % 8 == 1)
        totals[kind] += number
        unsafe += number * (number % 8 == 1)
    assert line.steps == steps
    assert [sum(column) for column in zip(*line.tokens, strict=True)] == totals * bool(steps)
    assert sum(line.unsafe) == unsafe
    assert len(line.tokens) == len(line.unsafe) == -(-steps // line.width) <= MAX_BINS
    # A bin is the steps that it stands for.
    assert [sum(row) for row in line.tokens] == [
        sum(range(start, min(start + line.width, steps))) for start in range(0, steps, line.width)
    ]


@pytest.mark.parametrize("trace", ["grpo-t1", "grpo-ngram-t4", "grpo-t128-b64"])
def test_a_picture_has_what_the_audit_counts(trace: str) -> None:
    path = TRACES / f"{trace}.jsonl.gz"
    unsafe: list[AuditedStep] = []
    audit_trace(
        path,
        AuditOptions(),
        on_audited=lambda step: unsafe.append(step) if step.verdict and step.verdict.unsafe else None,
    )
    picture, audit = _picture(path)
    assert picture.time_line.steps == audit.steps
    small, split, reordered, whole = (sum(column) for column in zip(*picture.time_line.tokens, strict=True))
    assert split + reordered == audit.kept_tokens
    assert split + reordered + whole == audit.eligible_tokens
    assert small > 0
    assert sum(picture.time_line.unsafe) == picture.unsafe_tokens
    readers: Counter[str] = Counter()
    for step in unsafe:
        assert step.verdict is not None
        readers.update({step.record.request_ids[cuts.reader] for cuts in step.verdict.unsafe})
    assert picture.readers == readers
    opened = picture.opened
    assert 0 < len(opened) <= 2 * MAX_OPENED
    assert [step.number for step in opened] == sorted({step.number for step in opened})
    # Spread over the whole trace, not its beginning.
    lines = [step.line for step in unsafe]
    assert {step.line for step in opened} <= set(lines)
    assert opened[0].line == lines[0]
    assert opened[-1].line >= lines[len(lines) * 3 // 4]


def test_an_opened_step_shows_who_is_broken_and_how_the_order_heals_it() -> None:
    picture, _ = _picture(TRACES / "grpo-t1.jsonl.gz")
    reordered = [step for step in picture.opened if step.after is not None]
    assert reordered
    for step in reordered:
        assert step.after is not None
        for batch in (step.before, step.after):
            assert batch.reads is not None
            ends = [bar.first + bar.num_scheduled_tokens for bar in batch.bars]
            assert [bar.first for bar in batch.bars] == [0, *ends[:-1]]
            assert ends[-1] == step.num_tokens
        # Every unsafe cut is in some pair's range, and none is left in the new order.
        assert step.before.reads is not None
        assert step.after.reads is not None
        for unsafe in step.unsafe:
            for cut in (unsafe.first, unsafe.last):
                assert any(read.unsafe.first <= cut <= read.unsafe.last for read in step.before.reads)
        assert not any(len(read.unsafe) for read in step.after.reads)
        names = [bar.request_id for bar in step.before.bars]
        assert sorted(names) == sorted(bar.request_id for bar in step.after.bars)
        assert [names[bar.position] for bar in step.after.bars] == [bar.request_id for bar in step.after.bars]
        drawn = {trace.name for trace in opened_step(step).data}
        at_cut = any(unsafe.first <= cut <= unsafe.last for cut in step.cuts for unsafe in step.unsafe)
        assert ("broken by the cut" in drawn) == at_cut


def test_rows_too_long_to_draw_leave_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ubatch_guard.trace.replay.MAX_TABLE_ENTRIES", 1)
    picture, _ = _picture(TRACES / "grpo-ngram-t4.jsonl.gz")
    opened = picture.opened
    assert opened
    assert all(step.before.bars and step.before.reads is None for step in opened)
    assert all(opened_step(step).data for step in opened)


def test_culprits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ubatch_guard.report.picture.MAX_CULPRITS", 4)
    picture, _ = _picture(TRACES / "grpo-t1.jsonl.gz")
    assert 0 < len(picture.readers) <= 4
    assert 0 < len(picture.writers) <= 4


def test_few_opened_steps_where_few_are_wanted() -> None:
    picture, _ = _picture(TRACES / "grpo-t1.jsonl.gz", most_opened=2)
    assert 2 <= len(picture.opened) <= 4


def test_a_name_is_a_name() -> None:
    assert text_of("<b>a</b>\n&amp;") == "&lt;b&gt;a&lt;/b&gt;\\n&amp;amp;"


# The page.


def _report(path: Path, *arguments: object, traces: list[object] | None = None) -> str:
    result = _run("audit", *(traces or ["--example"]), "--report", path, *arguments)
    assert result.returncode == 0, result.stderr
    return path.read_text(encoding="utf-8")


def _data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    page = _report(tmp_path / "report.html")
    # plotly's own library names addresses, but only loads tiles of maps, which no figure here has.
    ours = page.replace(re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[0], "")
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://", ours)
    data = _data(page)
    kinds = {trace["type"] for key in ("kept", "ranks") for trace in data[key]["data"]}
    kinds |= {trace["type"] for step in data["traces"][0]["opened"] for trace in step["figure"]["data"]}
    assert kinds == {"bar", "scatter"}


def test_the_page_says_what_the_command_says(tmp_path: Path) -> None:
    page = _report(tmp_path / "report.html")
    said = re.search(r'<p class="answer">(.*?)</p>', page)
    assert said is not None
    spoken = " ".join(_run("audit", "--example").stdout.split())
    assert " ".join(unescape(said[1]).split()) in spoken


def test_hostile_names_are_text(tmp_path: Path) -> None:
    page = _report(
        tmp_path / "report.html", "--dbo-prefill-token-threshold", 0, traces=[_hostile_trace(tmp_path)]
    )
    assert page.count("<script") == page.count("</script>") == 3
    assert "<b " not in page
    data = _data(page)
    assert len(data["traces"][0]["opened"]) == 2
    drawn = json.dumps(data)
    assert "&lt;/script&gt;" in drawn
    assert "<b " not in drawn


@pytest.fixture(scope="module")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.skip("no Chromium on this machine: the page is not opened")


# Runs after the page's own script and leaves what it has seen in an element.
PROBE = """<script>
const seen = {};
const plots = () => [...document.querySelectorAll(".js-plotly-plot")].map(e => e.dataset.figure);
const select = document.querySelector("select");
const section = select?.closest("section");
const note = () => section.querySelector(".note").textContent;
const button = (move) => section.querySelector(`[data-move='${move}']`);
seen.ready = document.documentElement.dataset.ready;
seen.title = document.title;
seen.scripts = document.scripts.length;
seen.plots = plots();
seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
if (select) {
  seen.steps = select.options.length;
  seen.notes = [note()];
  seen.ends = [[button(-1).disabled, button(1).disabled]];
  for (let i = 1; i < seen.steps; i++) { button(1).click(); seen.notes.push(note()); }
  seen.ends.push([button(-1).disabled, button(1).disabled]);
  select.selectedIndex = 0;
  select.dispatchEvent(new Event("change"));
  seen.back = note();
  const opened = section.querySelector("[data-figure=opened]");
  seen.bars = opened.querySelectorAll(".bars .point path").length;
  seen.arcs = opened.querySelectorAll(".shapelayer path").length;
  seen.texts = [...opened.querySelectorAll("text")].map(e => e.textContent);
  const line = section.querySelector("[data-figure=timeLine]");
  line.emit("plotly_click", {points: [{x: 1e9}]});
  seen.clicked = select.selectedIndex;
  seen.marks = line.layout.shapes.length;
}
const element = document.createElement("pre");
element.id = "seen";
element.textContent = JSON.stringify(seen);
document.body.append(element);
</script></body>"""


def _opened(browser: str, page: str, tmp_path: Path, width: int) -> dict[str, Any]:
    """What the probe sees of a page in a window of a width."""
    probed = tmp_path / "probed.html"
    probed.write_text(page.replace("</body>", PROBE), encoding="utf-8")
    result = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},900",
            "--virtual-time-budget=20000",
            "--dump-dom",
            probed.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'<pre id="seen">(.*?)</pre>', result.stdout, re.DOTALL)
    assert found is not None, result.stderr[-2000:]
    seen: dict[str, Any] = json.loads(unescape(found[1]))
    return seen


@pytest.mark.parametrize("width", [500, 1400])
def test_the_page_in_a_browser(width: int, browser: str, tmp_path: Path) -> None:
    page = _report(tmp_path / "report.html")
    opened = _data(page)["traces"][0]["opened"]
    seen = _opened(browser, page, tmp_path, width)
    assert seen["ready"] == "yes"
    assert seen["plots"] == ["kept", "ranks", "timeLine", "opened"]
    assert seen["overflow"] <= 0, "the page is wider than its window"
    assert seen["steps"] == len(opened) > 1
    assert seen["notes"] == [step["note"] for step in opened]
    assert seen["ends"] == [[True, False], [False, True]]
    assert seen["back"] == opened[0]["note"]
    assert seen["bars"] > 4
    assert seen["arcs"] >= 2
    assert {"microbatch 1", "microbatch 2", "As it was scheduled"} <= set(seen["texts"])
    assert seen["clicked"] == len(opened) - 1
    assert seen["marks"] == 1


def test_hostile_names_do_nothing_in_a_browser(browser: str, tmp_path: Path) -> None:
    path = _hostile_trace(tmp_path)
    page = _report(tmp_path / "report.html", "--dbo-prefill-token-threshold", 0, traces=[path])
    seen = _opened(browser, page, tmp_path, 1400)
    assert seen["ready"] == "yes"
    assert seen["title"].startswith("ubatch-guard: <|script><script>document.tit")
    assert seen["scripts"] == 4  # plotly, the data, the page's and the probe
    assert seen["steps"] == 2


def test_a_trace_without_eligible_steps_and_one_without_steps(browser: str, tmp_path: Path) -> None:
    with gzip.open(EXAMPLE, "rt") as file:
        header = next(file)
    empty = tmp_path / "empty.jsonl"
    empty.write_text(header)
    page = _report(tmp_path / "a.html", traces=[empty])
    seen = _opened(browser, page, tmp_path, 1400)
    assert (seen["ready"], seen["plots"]) == ("yes", [])
    page = _report(
        tmp_path / "b.html", "--dbo-prefill-token-threshold", 10**9, "--dbo-decode-token-threshold", 10**9
    )
    seen = _opened(browser, page, tmp_path, 1400)
    assert (seen["ready"], seen["plots"]) == ("yes", ["timeLine"])


def test_several_traces_are_several_sections(browser: str, tmp_path: Path) -> None:
    traces: list[object] = [TRACES / "rag-t1.jsonl.gz", TRACES / "grpo-t1.jsonl.gz", EXAMPLE]
    seen = _opened(browser, _report(tmp_path / "report.html", traces=traces), tmp_path, 1400)
    assert seen["ready"] == "yes"
    assert seen["plots"] == ["kept", "ranks", "timeLine", *["timeLine", "opened"] * 2]


# The trace for Perfetto.


def _perfetto(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    trace = json.loads(text)
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def _tracks(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    yield from tracks.values()


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_perfetto_trace_is_well_formed(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    trace = TRACES / "grpo-t1.jsonl.gz"
    result = _run("audit", "--example", trace, "--perfetto", path)
    assert result.returncode == 0, result.stderr
    events = _perfetto(path)
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        1: "example.jsonl.gz: without a guard",
        2: "example.jsonl.gz: with ubatch-guard",
        3: "grpo-t1.jsonl.gz: without a guard",
        4: "grpo-t1.jsonl.gz: with ubatch-guard",
    }
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert set(threads.values()) == {"steps", "microbatch 1", "microbatch 2"}
    assert set(threads) == {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    # Slices of a track follow on each other or lie in each other: nothing else can be drawn.
    for track in _tracks(events):
        open_until: list[int] = []
        for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
            assert event["dur"] > 0
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_flows_of_the_perfetto_trace_are_the_culprits(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TRACES / "grpo-t1.jsonl.gz"
    assert _run("audit", trace, "--perfetto", path).returncode == 0
    events = _perfetto(path)
    audited: list[AuditedStep] = []
    audit = audit_trace(trace, AuditOptions(), on_audited=audited.append)
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    without = [event for event in steps if event["pid"] == 1]
    assert len(without) == audit.steps
    assert sum(event["name"] == "split, unsafe" for event in without) == audit.hazardous > 0
    assert sum(event["dur"] for event in without) == sum(step.record.num_tokens for step in audited)
    with_guard = Counter(event["name"] for event in steps if event["pid"] == 2)
    assert with_guard["split"] + with_guard["reordered"] == audit.kept
    assert with_guard["reordered"] == audit.reordered
    assert "split, unsafe" not in with_guard

    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends)
    assert starts
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        # Both ends are where a slice of a request begins. Without a guard the reader comes first;
        # with it, the writer comes first.
        for event in (start, end):
            assert any(
                one["ph"] == "X"
                and (one["pid"], one["tid"], one["ts"]) == (event["pid"], event["tid"], event["ts"])
                for one in events
                if "num_computed_tokens" in one.get("args", {})
            )
        assert start["ts"] < end["ts"]
        assert start["name"] == ("reads before it is written" if start["pid"] == 1 else "is read after it")
    expected = sum(
        any(cuts.first <= cut <= cuts.last for cut in step.cuts)
        for step in audited
        if step.verdict is not None
        for cuts in step.verdict.unsafe
    )
    assert sum(start["pid"] == 1 for start in starts.values()) == expected


def test_hostile_names_in_the_perfetto_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = _hostile_trace(tmp_path)
    result = _run("audit", trace, "--dbo-prefill-token-threshold", 0, "--perfetto", path)
    assert result.returncode == 0, result.stderr
    names = {event["name"] for event in _perfetto(path)}
    assert any(name.startswith("r</script>") for name in names)
    assert not any("\n" in name for name in names)


# Where they are written.


@pytest.mark.parametrize("option", ["--report", "--perfetto"])
def test_a_trace_is_not_overwritten(option: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    shutil.copy(EXAMPLE, trace)
    (tmp_path / "link").symlink_to(trace)
    before = trace.read_bytes()
    result = _run("audit", trace, option, tmp_path / "link")
    assert result.returncode == 2
    assert f"{option} would overwrite" in result.stderr
    assert trace.read_bytes() == before
    log = tmp_path / "log.jsonl"
    log.write_text('{"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [1]}\n')
    result = _run("simulate", log, option, log)
    assert result.returncode == 2
    assert f"{option} would overwrite" in result.stderr


def test_two_outputs_are_two_files(tmp_path: Path) -> None:
    result = _run("audit", "--example", "--report", tmp_path / "x", "--perfetto", tmp_path / "x")
    assert result.returncode == 2
    assert "--perfetto would overwrite the file of --report" in result.stderr


@pytest.mark.parametrize("option", ["--report", "--perfetto"])
@pytest.mark.parametrize("path", ["missing/file", ".", "/dev/full"])
def test_a_file_that_cannot_be_written_is_one_line(option: str, path: str, tmp_path: Path) -> None:
    target = tmp_path / path
    result = _run("audit", "--example", option, target)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(str(target))


def test_a_report_without_plotly_names_the_extra(tmp_path: Path) -> None:
    block = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'plotly':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    target = tmp_path / "report.html"
    result = _run("audit", "--example", "--report", target, prelude=block)
    assert result.returncode == 2
    assert "ubatch-guard[report]" in result.stderr
    assert not target.exists()
    perfetto = tmp_path / "trace.json"
    assert _run("audit", "--example", "--perfetto", perfetto, prelude=block).returncode == 0
    assert _perfetto(perfetto)


def test_the_report_of_a_simulation(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    entry = {"timestamp": 0, "input_length": 2048, "output_length": 4, "hash_ids": [1, 2, 3, 4]}
    log.write_text((json.dumps(entry) + "\n") * 8)
    page, perfetto = tmp_path / "report.html", tmp_path / "trace.json"
    result = _run("simulate", log, "--report", page, "--perfetto", perfetto)
    assert result.returncode == 0, result.stderr
    trace = _data(page.read_text(encoding="utf-8"))["traces"][0]
    assert trace["opened"], "eight prompts alike, and no step reads what it computes"
    assert any(event["ph"] == "s" for event in _perfetto(perfetto))


def test_what_is_audited_has_the_cuts_of_the_engine() -> None:
    audited: list[AuditedStep] = []
    audit_trace(MICRO / "v-reader-first.jsonl.gz", AuditOptions(), on_audited=audited.append)
    step = audited[0]
    tokens = step.record.num_tokens
    assert list(step.cuts) == [tokens // 2]
    assert list(replace(step, header=replace(step.header, num_ubatches=3)).cuts) == [
        tokens // 3,
        tokens // 3 * 2,
    ]
