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


def test_table_for_people() -> None:
    result = _run("audit", TRACES / "grpo-t1.jsonl.gz", TRACES / "fork-t1.jsonl.gz")
    assert (result.returncode, result.stderr) == (0, "")
    row = next(line for line in result.stdout.splitlines() if "grpo-t1" in line)
    assert row.split()[:7] == ["grpo-t1", "290", "164", "12", "12", "12", "0"]
    total = next(line for line in result.stdout.splitlines() if line.split()[:1] == ["all"])
    assert total.split()[1:4] == ["433", "220", "12"]


def test_table_without_rich() -> None:
    arguments = ("audit", TRACES / "grpo-t1.jsonl.gz", TRACES / "fork-t1.jsonl.gz")
    plain = _run(*arguments, prelude=_without("rich", "zstandard"))
    assert (plain.returncode, plain.stderr) == (0, "")
    lines = [line.split() for line in plain.stdout.splitlines()]
    assert [line[:4] for line in lines[3:6]] == [
        ["grpo-t1", "290", "164", "12"],
        ["fork-t1", "143", "56", "0"],
        ["all", "433", "220", "12"],
    ]


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
        assert re.fullmatch(re.escape(str(path)) + r":\d+: \S.*", error)
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
        [],
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


def test_progress_on_a_terminal() -> None:
    """With a terminal for standard error, a bar shows there and the table stays clean."""
    pytest.importorskip("rich")
    terminal, other_end = pty.openpty()
    code = "import sys; from ubatch_guard.cli import main; sys.exit(main())"
    path = TRACES / "mooncake-conversation-none.jsonl.gz"
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
        assert json.loads(process.stdout.read())["steps"] == 553
    os.close(terminal)
    assert path.name.encode() in shown
    assert b"kB" in shown
