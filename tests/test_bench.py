"""``ubatch-guard bench``: the cases are the steps they say, the answers are right, the lines are whole."""

import argparse
import json
import math
import re

import numpy as np
import pytest

from ubatch_guard import bench
from ubatch_guard.cases import CASES, CONTEXTS, REQUESTS, Case, by_name, of_context, of_requests, rows_of
from ubatch_guard.hook_cases import HOOK_CASES, NUM_STEPS, HookCase, HookSubjects, hook_case
from ubatch_guard.runner.guard import RunnerGuard

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


def test_the_hooks_are_timed_where_nobody_comes_and_where_many_do() -> None:
    assert [case.name for case in HOOK_CASES] == [
        "hooks-v1-64",
        "hooks-v1-256",
        "hooks-v1-1024",
        "hooks-v1-256-new1",
        "hooks-v1-960-new64",
        "hooks-v2-256",
        "hooks-v2-1024",
        "hooks-v2-256-new1",
        "hooks-v2-960-new64",
    ]


@pytest.mark.parametrize("case", HOOK_CASES, ids=lambda case: case.name)
def test_a_hook_case_grows_as_an_engine_does(case: HookCase) -> None:
    """Every decode gets a block in every 16th step, and about as many do in each."""
    subjects = HookSubjects(case)
    given = np.zeros(case.decodes, dtype=int)
    for step in subjects.steps[:16]:
        scheduled = step.scheduler_output
        grown = np.array([new is not None for new in scheduled.scheduled_cached_reqs.new_block_ids])
        given += grown
        assert grown.sum() == case.decodes // 16
        assert len(scheduled.scheduled_new_reqs) == case.arriving
        assert scheduled.kv_connector_metadata is None
    assert (given == 1).all()
    assert len(subjects.steps) == NUM_STEPS >= 64


@pytest.mark.parametrize("name", ["hooks-v1-64", "hooks-v1-256-new1", "hooks-v2-256", "hooks-v2-256-new1"])
def test_the_hooks_vote_right_and_can_start_over(name: str) -> None:
    subjects = HookSubjects(hook_case(name))
    subjects.check()
    subjects.open()
    subjects.guarded()
    counters = subjects.guard.counters
    # With the step that has the hazard.
    assert counters.steps == counters.eligible_allowed == 2 * (NUM_STEPS + 2) + 1
    assert counters.reordered == 1
    assert not counters.vetoed


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_guard_that_plans_no_order_stops_the_benchmark(
    runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunnerGuard, "plan", lambda *_: None)
    with pytest.raises(AssertionError, match="a reader in front of its writer"):
        HookSubjects(HookCase(runner, decodes=64)).check()


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--json", "--all", "--rounds", "1") == 0
    lines = {line["case"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {case.name for case in BOTH} <= set(lines)
    for case in BOTH:
        line = lines[case.name]
        assert math.isclose(line["mirror_ratio"], line["numpy_us"] / line["mirror_us"])
        assert math.isclose(line["stateless_ratio"], line["numpy_us"] / line["stateless_us"])
        assert (line["floor_us"] is None) == case.name.startswith(("gsm8k", "decode256"))
    for case in HOOK_CASES:
        line = lines[case.name]
        assert math.isclose(line["ratio"], line["hooks_us"] / line["yardstick_us"])
        assert (line["floor_us"] is None) == (not case.arriving)
        if case.arriving:
            assert math.isclose(line["floor_ratio"], line["hooks_us"] / line["floor_us"])
    # The guard is worth its while by orders of magnitude; no noise hides that.
    assert lines["long1024"]["mirror_ratio"] > 100
    assert lines["mirror-bytes-per-block"]["value"] <= bench.BLOCK_BYTES_GOAL
    assert lines["mirror-bytes-per-entry"]["value"] <= bench.ENTRY_BYTES_GOAL


def test_the_table_names_every_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(bench, "CASES", CASES[:2])
    monkeypatch.setattr(bench, "HOOK_CASES", HOOK_CASES[:1])
    for figures in ("growth", "upkeep"):
        monkeypatch.setattr(bench, figures, lambda _: iter(()))
    assert _run("--all", "--rounds", "1") == 0
    out = capsys.readouterr().out
    assert out.count("decode256-shuffled") == 2
    assert "(>= 20)" in out
    assert "hooks-v1-64" in out
    assert "(<= 3)" in out


def test_three_lines_for_users(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--rounds", "1") == 0
    first, second, third = capsys.readouterr().out.splitlines()
    number = r"\d[\d.,]*"
    assert re.fullmatch(
        rf"256 decodes: vLLM's rule {number} us, the guard {number} us \({number} times as fast\)", first
    )
    rule, guard, ratio = (
        float(found.replace(",", "")) for found in re.findall(rf"({number}) (?:us|times)", second)
    )
    assert ratio == pytest.approx(rule / guard, rel=0.02)
    assert ratio > 100
    assert re.fullmatch(rf"256 decodes, all hooks of Model Runner V2: {number} us a step", third)


@pytest.mark.parametrize("rounds", ["0", "-1", "x"])
def test_rounds_that_cannot_be_are_refused(rounds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        _run("--rounds", rounds)
    assert refused.value.code == 2
    assert "--rounds" in capsys.readouterr().err
