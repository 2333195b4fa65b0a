"""``ubatch-guard bench``: the cases are the steps they say, the answers are right, the lines are whole."""

import argparse
import json
import math

import numpy as np
import pytest

from ubatch_guard import bench
from ubatch_guard.cases import CASES, CONTEXTS, REQUESTS, Case, by_name, of_context, of_requests, rows_of

BOTH = [variant for case in CASES for variant in (case, case.shuffle())]


def _run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(argv))


@pytest.mark.parametrize("case", BOTH, ids=lambda case: case.name)
def test_rows_of_a_case_share_no_block(case: Case) -> None:
    ids = np.concatenate([row for (row,) in rows_of(case.step())])
    assert len(np.unique(ids)) == len(ids)
    assert ids.min() == 1
    assert ids.max() < case.step().groups[0].num_blocks


def test_a_case_is_the_step_it_says() -> None:
    step = by_name("mixed256").step()
    assert step.num_reqs == 256
    assert step.num_computed_tokens.tolist() == [4096] * 224 + [8192] * 24 + [0] * 8
    assert step.num_scheduled_tokens.tolist() == [1] * 224 + [64] * 24 + [2048] * 8
    assert step.block_tables[0].dtype == np.int32
    assert step.block_tables[0].shape == (256, (8192 + 64) // 16)


def test_a_fresh_pool_is_in_sequence_and_a_used_one_is_not() -> None:
    (fresh,) = next(rows_of(by_name("gsm8k").step()))
    (used,) = next(rows_of(by_name("gsm8k-shuffled").step()))
    assert fresh.tolist() == list(range(1, 47))
    assert len(used) == 46
    assert np.abs(np.diff(used)).mean() > 5


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_work_of_a_step_does_not_depend_on_its_context(context: int) -> None:
    step = of_context(context).step()
    assert step.num_tokens == of_context(CONTEXTS[0]).step().num_tokens
    assert step.num_computed_tokens.max() == context


@pytest.mark.parametrize("num_reqs", REQUESTS)
def test_batch_sizes(num_reqs: int) -> None:
    assert of_requests(num_reqs).step().num_reqs == num_reqs


@pytest.mark.parametrize("case", BOTH, ids=lambda case: case.name)
def test_every_answer_is_the_references(case: Case) -> None:
    bench.Subjects(case.step()).check()


def test_a_wrong_answer_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = bench.Subjects(by_name("gsm8k").step())
    monkeypatch.setattr(subjects, "mirrored", lambda: False)
    with pytest.raises(AssertionError, match="safe=True, not so: mirror"):
        subjects.check()


def test_the_floor_reads_the_readers_rows() -> None:
    case = Case("small", decodes=1, readers=2, context=64, writers=1, tokens=16)
    step = case.step()
    assert bench.Subjects(step).floor(case)() == int(step.block_tables[0][1:3, :4].sum())


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--json", "--all", "--rounds", "1") == 0
    lines = {line["case"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {case.name for case in BOTH} <= set(lines)
    for case in BOTH:
        line = lines[case.name]
        assert math.isclose(line["mirror_ratio"], line["numpy_us"] / line["mirror_us"])
        assert math.isclose(line["stateless_ratio"], line["numpy_us"] / line["stateless_us"])
        assert (line["floor_us"] is None) == case.name.startswith(("gsm8k", "decode256"))
    # The guard is worth its while by orders of magnitude; no noise hides that.
    assert lines["long1024"]["mirror_ratio"] > 100
    assert lines["mirror-bytes-per-block"]["value"] <= bench.BLOCK_BYTES_GOAL
    assert lines["mirror-bytes-per-entry"]["value"] <= bench.ENTRY_BYTES_GOAL


def test_the_table_names_every_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(bench, "CASES", CASES[:2])
    assert _run("--rounds", "1") == 0
    out = capsys.readouterr().out
    assert out.count("decode256-shuffled") == 2
    assert "(>= 20)" in out


@pytest.mark.parametrize("rounds", ["0", "-1", "x"])
def test_rounds_that_cannot_be_are_refused(rounds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        _run("--rounds", rounds)
    assert refused.value.code == 2
    assert "--rounds" in capsys.readouterr().err
