"""The command line as a user has it: in a process of its own."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ubatch_guard.commands.audit import EXAMPLE
from ubatch_guard.report.answer import print_audits
from ubatch_guard.step import Policy
from ubatch_guard.trace.audit import TraceAudit

TRACES = Path(__file__).parent / "traces"
MICRO = TRACES / "micro"
KEYS = [
    "trace",
    "steps",
    "eligible",
    "hazardous",
    "hazardous_any_cut",
    "engine_vetoed",
    "engine_missed",
    "engine_needless",
    "prefill_eligible",
    "prefill_engine_vetoed",
    "kept",
    "vetoed",
    "reordered",
    "eligible_tokens",
    "kept_tokens",
    "safe_tokens",
    "engine_kept_tokens",
    "check_us_p50",
    "check_us_p99",
]


def _run(*arguments: object, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command; ``prelude`` is Python that goes before it."""
    code = f"{prelude}\nimport sys\nfrom ubatch_guard.cli import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "250"},
    )


def _without(*modules: str) -> str:
    """Python that makes modules impossible to import, as if their packages were not installed."""
    return textwrap.dedent(
        f"""
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {modules!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Missing())
        """
    )


def _json(result: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_has_a_line_a_trace_in_the_order_given() -> None:
    names = ["rag-t512-b64.jsonl.gz", "fork-t1.jsonl.gz", "fewshot-burst-t512.jsonl.gz"]
    result = _run("audit", "--json", *(TRACES / name for name in names))
    assert (result.returncode, result.stderr) == (0, "")
    lines = _json(result)
    assert [line["trace"] for line in lines] == names
    assert all(list(line) == KEYS for line in lines)
    expected = {
        counts["trace"]: counts
        for counts in map(json.loads, (TRACES / "expected.jsonl").read_text().splitlines())
    }
    for line in lines:
        shared = line.keys() & expected[line["trace"]].keys()
        assert len(shared) == 10
        assert all(line[key] == expected[line["trace"]][key] for key in shared)


def test_thresholds_and_policy() -> None:
    path = MICRO / "v-mla-threshold.jsonl.gz"
    zero = ("--dbo-prefill-token-threshold", "0", "--dbo-decode-token-threshold=0")
    (default,) = _json(_run("audit", path, "--json"))
    (reorder,) = _json(_run("audit", path, "--json", *zero))
    (veto,) = _json(_run("audit", "--json", "--policy", "veto", *zero, path))
    assert (default["eligible"], default["check_us_p50"]) == (0, None)
    assert (reorder["kept"], reorder["vetoed"], reorder["reordered"]) == (1, 0, 1)
    assert (veto["kept"], veto["vetoed"], veto["reordered"]) == (0, 1, 0)


def test_reference_gives_the_same_counts() -> None:
    path = TRACES / "grpo-ngram-t4.jsonl.gz"
    answers = [_json(_run("audit", "--json", "--engine", name, path))[0] for name in ("core", "reference")]
    assert all(answers[0][key] == answers[1][key] for key in KEYS[:-2])


def _words(text: str) -> str:
    return " ".join(text.split())


def test_an_answer_and_tables_for_people() -> None:
    result = _run("audit", TRACES / "grpo-t1.jsonl.gz", TRACES / "mooncake-conversation-t512.jsonl.gz")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in lines if line and line[0] in "agm"}
    assert rows["grpo-t1"] == ["290", "164", "12", "12", "164", "12", "0"]
    assert rows["all"] == ["857", "693", "12", "12", "693", "12", "0"]
    assert re.search(r"^none \(vLLM 0.34\) +693 +12 +0 +[\d,]+ \(100 %\)$", result.stdout, re.MULTILINE)
    assert _words(result.stdout).endswith(
        "12 of the 693 steps that microbatching would cut are unsafe at the cut. vLLM 0.34, which has no "
        "rule, lets all 12 through unguarded; vLLM's rule of 0.28 to 0.33 lets none through and refuses 1 "
        "step needlessly. With ubatch-guard (reorder) 693 run split and none of them is unsafe: 100 % of "
        "their tokens keep the overlap (98.4 % under that rule)."
    )


def test_an_answer_where_nothing_is_unsafe_or_nothing_would_be_cut() -> None:
    path = TRACES / "fork-t1.jsonl.gz"
    safe = _words(_run("audit", path).stdout)
    assert "None of the 56 steps that microbatching would cut is unsafe at the cut." in safe
    assert "refuses none needlessly. With" in safe
    small = _words(_run("audit", "--dbo-prefill-token-threshold=99999", path).stdout)
    assert "None of the 143 steps is large enough to be cut: see --dbo-prefill-token-threshold" not in small
    both = ("--dbo-prefill-token-threshold=99999", "--dbo-decode-token-threshold=99999")
    small = _words(_run("audit", *both, path).stdout)
    assert small.endswith(
        "None of the 143 steps is large enough to be cut: see --dbo-prefill-token-threshold and "
        "--dbo-decode-token-threshold."
    )


def test_long_names_and_large_counts_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    counts = dict.fromkeys(("steps", "eligible", "kept", "hazardous", "hazardous_any_cut"), 4_876_543)
    audits = [TraceAudit(f"worker-on-a-host-with-a-long-name-{n}.jsonl", **counts) for n in range(2)]
    audits[0].eligible_tokens = 10**12
    print_audits(audits, Policy.REORDER, 256)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[3].split()[0] == "worker-...name-0"


def test_ranks() -> None:
    result = _run("audit", "--ranks", "256", TRACES / "grpo-t1.jsonl.gz")
    rows = {line.split()[0]: line.split()[1::2] for line in result.stdout.splitlines() if "%" in line}
    assert rows["1"] == ["92.7", "92.7", "100.0", "7.3", "0.0"]
    assert rows["2"] == ["85.9", "85.9", "100.0", "14.1", "0.0"]
    assert rows["256"] == ["0.0", "0.0", "100.0", "100.0", "0.0"]
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert _run("audit", "--ranks", "0", TRACES / "grpo-t1.jsonl.gz").returncode == 2


def test_the_example_comes_with_the_package() -> None:
    (line,) = _json(_run("audit", "--example", "--json"))
    whole = gzip.decompress((TRACES / "grpo-t128-b64.jsonl.gz").read_bytes()).splitlines()
    assert gzip.decompress(Path(EXAMPLE).read_bytes()).splitlines() == whole[:60]
    assert (line["steps"], line["hazardous"], line["engine_missed"]) == (59, 5, 5)


def test_a_log_of_requests_points_to_simulate(tmp_path: Path) -> None:
    path = tmp_path / "my requests.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n')
    result = _run("audit", path)
    assert result.returncode == 2
    assert result.stderr == (
        f"{path}:1: a log of requests, not of steps; try: ubatch-guard simulate '{path}'\n"
    )


def test_the_bare_command_prints_help() -> None:
    result = _run()
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == _run("--help").stdout


def test_audit_needs_numpy_alone() -> None:
    prelude = _without("rich", "zstandard", "torch", "vllm", "prometheus_client", "safetensors")
    result = _run("audit", "--json", TRACES / "fork-t1.jsonl.gz", prelude=prelude)
    assert (result.returncode, result.stderr) == (0, "")


def test_explain_names_the_culprits() -> None:
    path = MICRO / "v-reader-first.jsonl.gz"
    zero = ("--dbo-prefill-token-threshold", "0")
    lines = _run("audit", "--explain", *zero, path).stdout.splitlines()
    assert lines[0] == (
        f"{path}:2: cuts 48..79 of 48..95 unsafe: 'r' (position 0) reads block 4 of group 0, "
        "which 'w' (position 1) writes"
    )
    assert lines[1] == f"{path}:2: reordered, 2 of 2 requests moved"
    assert f"{path}:2: vetoed" in _run("audit", "--explain", "--policy", "veto", *zero, path).stdout
    (line,) = _json(_run("audit", "--explain", "--json", *zero, path))
    assert line["unsafe_steps"] == [
        {
            "line": 2,
            "feasible_cuts": [48, 95],
            "unsafe_cuts": [{"first": 48, "last": 79, "reader": "r", "writer": "w", "group": 0, "block": 4}],
            "order": ["w", "r"],
        }
    ]


def test_what_cannot_be_read_is_named_and_the_rest_audited(tmp_path: Path) -> None:
    good = TRACES / "fork-t1.jsonl.gz"
    content = gzip.decompress(good.read_bytes())
    bad = {
        "nowhere.jsonl.gz": None,
        "cut.jsonl.gz": good.read_bytes()[:-100],
        "not-json.jsonl": content[:5000].rpartition(b"\n")[0] + b"\nnonsense\n",
        "version.jsonl": content.replace(b'"version": 1', b'"version": 3', 1),
        "empty.jsonl": b"",
        "binary.jsonl": bytes(range(256)) * 20,
    }
    for name, data in bad.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
    result = _run("audit", "--json", *(tmp_path / name for name in bad), good, tmp_path)
    assert result.returncode == 2
    assert [line["trace"] for line in _json(result)] == [good.name]
    errors = result.stderr.splitlines()
    assert len(errors) == len(bad) + 1
    for error, path in zip(errors, [*(tmp_path / name for name in bad), tmp_path], strict=True):
        number = r":\d+" if path.is_file() else ""
        assert re.fullmatch(re.escape(str(path)) + number + r": \S.*", error)
    assert ":2: not JSON" not in result.stderr
    assert re.search(r"version.jsonl:1: version is 3", result.stderr)


def test_partial_counts_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes((TRACES / "grpo-t1.jsonl.gz").read_bytes()[:-5000])
    result = _run("audit", "--json", "--partial", path)
    assert result.returncode == 0
    assert 0 < int(str(_json(result)[0]["steps"])) < 290


def test_zstd_without_its_package(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd and more")
    result = _run("audit", path, prelude=_without("zstandard"))
    assert result.returncode == 2
    assert re.fullmatch(r".*:1: zstd needs .*ubatch-guard\[cli\]'\n", result.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["audit"],
        ["audit", "--policy", "observe", "x"],
        ["audit", "--dbo-prefill-token-threshold", "-1", "x"],
        ["audit", "--dbo-decode-token-threshold", "many", "x"],
        ["audit", "--nonsense", "x"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    result = _run(*arguments)
    assert result.returncode == 2
    assert "usage: ubatch-guard" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["audit", "doctor"])
def test_help(command: str) -> None:
    assert command in _run("--help").stdout
    result = _run(command, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"usage: ubatch-guard {command}" in result.stdout
    assert "Exit status" in result.stdout


def test_version() -> None:
    assert re.fullmatch(r"ubatch-guard \d+\.\d+\.\S+\n", _run("--version").stdout)


def test_a_missing_extra_is_named() -> None:
    result = _run("demo", prelude=_without("torch"))
    assert result.returncode == 2
    assert result.stderr == "ubatch-guard demo: torch is missing: pip install 'ubatch-guard[engine]'\n"


def test_a_reader_that_has_seen_enough() -> None:
    code = "import sys; from ubatch_guard.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "audit", "--json", *[str(TRACES / "fork-t1.jsonl.gz")] * 40],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


_COMMAND = "import sys; from ubatch_guard.cli import main; sys.exit(main())"
_GOOD = TRACES / "fork-t1.jsonl.gz"


def _shell(line: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which ``ug`` is the command."""
    return subprocess.run(
        ["bash", "-c", f'ug() {{ "$PYTHON" -c "$COMMAND" "$@"; }}; {line}', "bash", *map(str, arguments)],
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHON": sys.executable, "COMMAND": _COMMAND, **environment},
    )


@pytest.mark.parametrize(
    "line",
    [
        'ug audit --json <(gzip -dc "$1")',
        'ug audit --json <(cat "$1")',
        'ug audit --json /dev/stdin < "$1"',
        'cat "$1" | ug audit --json /dev/stdin',
        'gzip -dc "$1" | ug audit --json /dev/stdin',
        'mkfifo "$2/pipe"; cat "$1" > "$2/pipe" & ug audit --json "$2/pipe"',
        '(head -c 1 "$1"; sleep 0.2; tail -c +2 "$1") | ug audit --json /dev/stdin',
    ],
)
def test_a_trace_may_come_through_a_pipe(line: str, tmp_path: Path) -> None:
    result = _shell(line, _GOOD, tmp_path)
    assert (result.returncode, result.stderr) == (0, b"")
    assert json.loads(result.stdout)["steps"] == 143


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("option", ["--json", "--explain", "--policy=veto"])
def test_output_that_cannot_be_written_is_one_line(option: str, unbuffered: str) -> None:
    result = _shell('ug audit "$2" "$1" > /dev/full', _GOOD, option, PYTHONUNBUFFERED=unbuffered)
    assert result.returncode == 1
    assert result.stderr == b"ubatch-guard: the output cannot be written: No space left on device\n"


def test_a_closed_output_is_one_line() -> None:
    result = _shell('ug audit "$1" >&-', _GOOD)
    assert (result.returncode, result.stderr) == (1, b"ubatch-guard: standard output is closed\n")


def test_a_closed_standard_error_costs_nothing() -> None:
    result = _shell('ug audit --json "$1" 2>&-', _GOOD)
    assert (result.returncode, json.loads(result.stdout)["steps"]) == (0, 143)
    # What is said of a bad one must not get into the output.
    result = _shell('ug audit --json /nowhere "$1" 2>&-', _GOOD)
    assert (result.returncode, json.loads(result.stdout)["steps"]) == (2, 143)
    if Path("/dev/full").exists():
        result = _shell('ug audit --json "$1" 2>/dev/full', _GOOD)
        assert (result.returncode, json.loads(result.stdout)["steps"]) == (0, 143)


STRANGE_NAMES = [
    "caf\u00e9",
    ":smile:",
    "[bold]x",
    "[",
    "a\nb",
    "\x1b[31mred",
    "\udcff",
    "-",
    "\u202eabc",
]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "utf-16"])
@pytest.mark.parametrize("rich", [True, False])
def test_any_file_name_goes_with_any_output(encoding: str, rich: bool, tmp_path: Path) -> None:
    micro = (MICRO / "v-reader-first.jsonl.gz").read_bytes()
    paths = [tmp_path / f"{name}.jsonl.gz" for name in STRANGE_NAMES]
    for path in paths:
        path.write_bytes(micro)
    prelude = "" if rich else _without("rich")
    result = subprocess.run(
        [sys.executable, "-c", f"{prelude}\n{_COMMAND}", "audit", "--explain", *map(os.fsencode, paths)],
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert (result.returncode, result.stderr) == (0, b"")
    text = result.stdout.decode(encoding)
    for name in (":smile:", "[bold]x", r"a\nb", r"\x1b[31mred", r"\udcff"):
        assert name in text
    assert "\x1b" not in text


def test_what_is_wrong_is_one_line_whatever_the_name() -> None:
    result = _shell("ug audit $'/no\\nwhere\\xff\\e[31m'", PYTHONIOENCODING="ascii")
    assert result.returncode == 2
    assert result.stderr == b"/no\\nwhere\\udcff\\x1b[31m: No such file or directory\n"


def test_memory_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    header = json.loads(gzip.decompress(_GOOD.read_bytes()).splitlines()[0])
    path = tmp_path / "wide.jsonl"
    path.write_text(json.dumps({**header, "num_blocks": 2**31 - 1}) + "\n")
    result = _shell('ulimit -v 4000000; ug audit "$1"', path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"{path}:1: num_blocks".encode())
    assert result.stderr.count(b"\n") == 1


@pytest.mark.parametrize("module", ["argparse", "numpy", "ubatch_guard._core", "ubatch_guard.commands.audit"])
def test_an_interrupt_while_modules_are_loaded_ends_quietly(module: str) -> None:
    """The interrupt comes just when ``module`` is looked for."""
    prelude = textwrap.dedent(
        f"""
        import signal, sys
        # Whoever runs the tests in the background has the interrupt ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        class Interrupting:
            def find_spec(self, name, path=None, target=None):
                if name == {module!r}:
                    signal.raise_signal(signal.SIGINT)
        sys.meta_path.insert(0, Interrupting())
        """
    )
    result = _run("audit", _GOOD, prelude=prelude)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_the_command_line_loads_nothing_before_it_can_be_interrupted() -> None:
    code = "import sys; before = set(sys.modules); import ubatch_guard.cli; print(*set(sys.modules) - before)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) <= {"ubatch_guard", "ubatch_guard.cli", "__future__", "errno"}


def test_the_package_has_what_it_lists() -> None:
    code = (
        "import ubatch_guard, sys; assert 'numpy' not in sys.modules;"
        "from ubatch_guard import *; assert Guard is ubatch_guard.Guard; import ubatch_guard.guard;"
        "assert ubatch_guard.guard.Guard is Guard;"
        "print(*(name for name in ubatch_guard.__all__ if getattr(ubatch_guard, name) is None), end='');"
        "print(hasattr(ubatch_guard, 'nonsense'), 'Guard' in dir(ubatch_guard))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False True\n"


def test_progress_on_a_terminal() -> None:
    """With a terminal for standard error, a bar shows there and the table stays clean."""
    pytest.importorskip("rich")
    terminal, other_end = pty.openpty()
    code = "import sys; from ubatch_guard.cli import main; sys.exit(main())"
    path = TRACES / "hybrid-swa-rag-t1.jsonl.gz"
    with subprocess.Popen(
        [sys.executable, "-c", code, "audit", "--engine", "reference", "--json", str(path)],
        stdout=subprocess.PIPE,
        stderr=other_end,
        env={**os.environ, "TERM": "xterm"},
    ) as process:
        os.close(other_end)
        shown = b""
        while True:
            try:
                piece = os.read(terminal, 1 << 16)
            except OSError:
                break
            if not piece:
                break
            shown += piece
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["steps"] == 162
    os.close(terminal)
    assert path.name.encode() in shown
    assert b"kB" in shown
