"""The audit against counts that an independent program made of traces of the real vLLM engine."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import oracle
import pytest

from ubatch_guard import reference
from ubatch_guard._core import Checker, Mirror
from ubatch_guard.step import Phase, Policy, UnsafeCuts
from ubatch_guard.trace import Admission, Changes, Replay, StepRecord, TraceError, TraceReader, apply_changes
from ubatch_guard.trace.audit import AuditedStep, AuditOptions, audit_trace, decodes_lead

TRACES = Path(__file__).parent / "traces"


def _expected() -> list[Any]:
    """Trace, token thresholds and expected counts."""
    cases = []
    for folder, threshold in ((TRACES, {}), (TRACES / "micro", {"threshold": 0})):
        for line in (folder / "expected.jsonl").read_text().splitlines():
            counts = json.loads(line)
            options = {
                "prefill_token_threshold": threshold.get("threshold", 512),
                "decode_token_threshold": threshold.get("threshold", 32),
            }
            cases.append(pytest.param(folder / counts["trace"], options, counts, id=counts["trace"]))
    return cases


every_trace = pytest.mark.parametrize(("path", "thresholds", "expected"), _expected())


def test_every_trace_is_expected() -> None:
    assert len(_expected()) == len(list(TRACES.rglob("*.jsonl.gz"))) == 21


# The reference takes ten seconds for the longest two. It is asked about their unsafe steps all the same, by
# `test_mirror_checker_and_reference_agree_on_every_step`.
LONG = ("mooncake-conversation-none.jsonl.gz", "mooncake-conversation-t512.jsonl.gz")


@pytest.mark.parametrize(
    ("path", "thresholds", "expected", "slow"),
    [
        pytest.param(*case.values, slow, id=f"{'reference' if slow else 'core'}-{case.id}")
        for case in _expected()
        for slow in (False, True)
        if not (slow and case.id in LONG)
    ],
)
def test_counts_are_the_expected_ones(
    path: Path, thresholds: dict[str, int], expected: dict[str, Any], slow: bool
) -> None:
    audit = asdict(audit_trace(path, AuditOptions(Policy.REORDER, **thresholds, reference=slow)))
    reorderable = expected.pop("reorderable")
    assert {key: audit[key] for key in expected} == expected
    expected["reorderable"] = reorderable
    # Reordered, every step can be split.
    assert (audit["kept"], audit["vetoed"]) == (expected["eligible"], 0)
    assert audit["kept_tokens"] == audit["eligible_tokens"]
    assert audit["reordered"] == expected["hazardous_any_cut"] >= reorderable
    assert 0 < audit["check_us_p50"] <= audit["check_us_p99"]


@every_trace
def test_veto_runs_unsafe_steps_whole(
    path: Path, thresholds: dict[str, int], expected: dict[str, Any]
) -> None:
    audit = audit_trace(path, AuditOptions(Policy.VETO, **thresholds))
    assert (audit.vetoed, audit.reordered) == (expected["hazardous_any_cut"], 0)
    assert audit.kept + audit.vetoed == audit.eligible == expected["eligible"]
    assert audit.kept_tokens == audit.safe_tokens <= audit.eligible_tokens
    assert (audit.engine_kept_tokens < audit.eligible_tokens) is bool(audit.engine_vetoed)


def test_tokens_are_those_of_the_steps_counted() -> None:
    tokens = {"eligible": 0, "refused": 0, "unsafe": 0}
    path = TRACES / "grpo-t1.jsonl.gz"

    def tally(step: AuditedStep) -> None:
        num_tokens = int(step.record.num_scheduled_tokens.sum())
        few = num_tokens < (32 if step.record.num_scheduled_tokens.max() == 1 else 512)
        assert (step.verdict is None) == (few or len(step.record.request_ids) < 2)
        if step.verdict is not None:
            tokens["eligible"] += num_tokens
            tokens["refused"] += num_tokens * (not step.record.vllm_allows)
            tokens["unsafe"] += num_tokens * bool(step.verdict.unsafe)

    audit = audit_trace(path, AuditOptions(Policy.VETO), on_audited=tally)
    assert audit.eligible_tokens == tokens["eligible"] == audit.kept_tokens + tokens["unsafe"]
    assert audit.engine_kept_tokens == tokens["eligible"] - tokens["refused"]
    assert 0 < tokens["refused"] < tokens["eligible"]


def _cuts(found: list[Any]) -> tuple[UnsafeCuts, ...]:
    return tuple(UnsafeCuts(*fields) for fields in found)


@every_trace
def test_mirror_checker_and_reference_agree_on_every_step(
    path: Path, thresholds: dict[str, int], expected: dict[str, Any]
) -> None:
    with TraceReader(path) as trace:
        replay = Replay(trace.header)
        mirror = Mirror(trace.header.groups)
        checker = Checker(trace.header.groups)
        steps = 0
        for record in trace:
            step = replay.step(record)
            apply_changes(mirror, record.changes)
            slots = mirror.slots(record.request_ids)
            counts = (record.num_computed_tokens, record.num_scheduled_tokens)
            stateless = _cuts(checker.unsafe_cuts(step.block_tables, *counts))
            assert _cuts(mirror.unsafe_cuts(slots, *counts)) == stateless
            assert checker.is_safe(step.block_tables, *counts) is not bool(stateless)
            assert mirror.is_safe(slots, *counts) is not bool(stateless)
            if steps % 7 == 0 or stateless:
                assert reference.unsafe_cuts(step) == stateless
            phases = decodes_lead(record, trace.header.decode_threshold)
            order = checker.order(step.block_tables, *counts, phases)
            assert mirror.order(slots, *counts, phases) == order
            assert order is not None
            assert sorted(phases) == [phases[position] for position in order[0]]
            if stateless:
                assert reference.unsafe_cuts(step.permuted(order[0])) == ()
            steps += 1
        assert steps == expected["steps"]


def test_the_oracle_agrees_on_the_micro_traces() -> None:
    for path in sorted((TRACES / "micro").glob("*.jsonl.gz")):
        with TraceReader(path) as trace:
            replay = Replay(trace.header)
            for record in trace:
                step = replay.step(record)
                cuts = {
                    cut for found in reference.unsafe_cuts(step) for cut in range(found.first, found.last + 1)
                }
                assert cuts == oracle.unsafe_cuts(step), path.name


def test_unsafe_steps_are_told_with_their_culprits() -> None:
    path = TRACES / "micro" / "v-reader-first.jsonl.gz"
    told: list[AuditedStep] = []
    audit_trace(path, AuditOptions(Policy.REORDER, 0, 0), on_audited=told.append)
    (step,) = told
    assert step.line == 2
    assert step.record.request_ids == ("r", "w")
    assert step.verdict is not None
    assert (step.feasible.first, step.feasible.last) == (48, 95)
    # The reader's 16 tokens come first, then the writer's 80; block 4 holds its tokens 48 to 63.
    assert step.verdict.unsafe == (UnsafeCuts(48, 79, reader=0, writer=1, group=0, block=4),)
    assert step.verdict.order is not None
    assert step.verdict.order.permutation == (1, 0)


def test_decodes_lead() -> None:
    def record(**changes: Any) -> StepRecord:
        return StepRecord(
            Changes(**changes),
            request_ids=("a", "b", "c"),
            num_computed_tokens=np.array([9, 9, 0], dtype=np.int32),
            num_scheduled_tokens=np.array([1, 2, 1], dtype=np.int32),
        )

    assert decodes_lead(record(), None).tolist() == [Phase.DECODE, Phase.PREFILL, Phase.PREFILL]
    assert decodes_lead(record(), 0).tolist() == [Phase.DECODE, Phase.PREFILL, Phase.PREFILL]
    assert decodes_lead(record(), 2).tolist() == [Phase.DECODE, Phase.DECODE, Phase.PREFILL]
    assert decodes_lead(record(new=[Admission("b", 9, [])]), 2).tolist() == [0, 2, 2]
    assert decodes_lead(record(resumed=[Admission("b", 9, [])]), 2).tolist() == [0, 2, 2]
    assert decodes_lead(record(set_back=["a"]), 2).tolist() == [2, 0, 2]


def _trace(tmp_path: Path, *lines: dict[str, Any], **header: Any) -> Path:
    first = {
        "format": "ubatch-guard-steps",
        "version": 1,
        "block_sizes": [4],
        "sliding_windows": [None],
        "num_blocks": 10,
        "decode_threshold": 1,
        "num_ubatches": 2,
        **header,
    }
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, *lines)))
    return path


def _line(new: list[Any], batch: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "finished": [],
        "preempted": [],
        "new": new,
        "resumed": [],
        "appended": [],
        "batch": batch,
        "vllm_allows": True,
        **more,
    }


def _audit(path: Path, **options: Any) -> dict[str, Any]:
    """The counts, which core and reference must agree on."""
    answers = []
    for slow in (False, True):
        answer = asdict(audit_trace(path, AuditOptions(**options, reference=slow)))
        del answer["check_us_p50"], answer["check_us_p99"]
        answers.append(answer)
    assert answers[0] == answers[1]
    return answers[0]


def test_thresholds(tmp_path: Path) -> None:
    new = [["a", 0, [[1, 2]]], ["b", 0, [[3, 4]]]]
    path = _trace(
        tmp_path,
        _line(new, [["a", 0, 4], ["b", 0, 3]]),
        _line([], [["a", 4, 1], ["b", 3, 1]]),
        _line([], [["a", 5, 1]]),
    )
    counts = {
        (prefill, decode): _audit(path, prefill_token_threshold=prefill, decode_token_threshold=decode)[
            "eligible"
        ]
        for prefill in (7, 8)
        for decode in (2, 3)
    }
    assert counts == {(7, 2): 2, (7, 3): 1, (8, 2): 1, (8, 3): 0}


def test_verifications_of_drafts_are_eligible(tmp_path: Path) -> None:
    names = [f"r{number}" for number in range(16)]
    first = _line([[name, 0, [[1, 2, 3]]] for name in names], [[name, 0, 4] for name in names])
    verify = _line([], [[name, 4, 4] for name in names])
    header = {"version": 2, "decode_threshold": 4, "decode_query_len": 4}
    assert _audit(_trace(tmp_path, first, verify, **header))["eligible"] == 2
    # Version 1 cannot say that these are decodes.
    assert _audit(_trace(tmp_path, first, verify, decode_threshold=4))["eligible"] == 0


def test_a_request_that_is_set_back_may_follow_its_writer(tmp_path: Path) -> None:
    first = _line([["b", 0, [[1, 2]]]], [["b", 0, 4]])
    second = _line([["w", 0, [[1]]]], [["b", 4, 1], ["w", 0, 4]], set_back=["b"])
    header = {"version": 2, "decode_query_len": 1}
    audit = _audit(_trace(tmp_path, first, second, **header), prefill_token_threshold=0)
    assert (audit["hazardous"], audit["kept"], audit["reordered"]) == (1, 1, 1)


def test_a_streaming_session_is_audited_on_its_new_row(tmp_path: Path) -> None:
    first = _line([["s", 0, [[1, 2]]], ["r", 4, [[5, 6]]]], [["s", 0, 8], ["r", 4, 1]])
    # The session now writes what r reads, behind it.
    again = _line([["s", 0, [[5, 7, 8]]]], [["r", 4, 1], ["s", 0, 12]])
    header = {"version": 2, "decode_query_len": 1}
    audit = _audit(_trace(tmp_path, first, again, **header), prefill_token_threshold=0)
    assert (audit["eligible"], audit["hazardous_any_cut"]) == (2, 0), "cuts 1 to 4 of 13"
    again["batch"] = [["r", 4, 5], ["s", 0, 12]]
    again["appended"] = [["r", [[9]]]]
    audit = _audit(_trace(tmp_path, first, again, **header), prefill_token_threshold=0)
    assert (audit["hazardous"], audit["hazardous_any_cut"]) == (1, 1)


def test_the_cuts_really_made_are_counted(tmp_path: Path) -> None:
    # Offsets 0..2 are the reader's, 3..5 the writer's of its block: cuts 1 to 5 are unsafe.
    new = [["r", 3, [[2, 3]]], ["w", 0, [[2, 4]]]]
    first = _line(new, [["r", 3, 3], ["w", 0, 8]])

    def audit(*cuts: Any) -> tuple[int | None, int | None]:
        path = _trace(tmp_path, *(first | ({} if first is None else {"cuts": cut}) for cut in cuts), **header)
        answer = _audit(path)
        return answer["cut"], answer["cut_unsafe"]

    header = {"version": 2, "decode_query_len": 1, "num_ubatches": 3}
    assert audit(None) == (None, None)
    assert audit([]) == (0, 0)
    assert audit([4]) == (1, 1)
    assert audit([6, 20]) == (1, 0)
    assert audit([3, 6], [], [6], [5]) == (3, 2)


def test_num_ubatches_beyond_reason_does_not_hang(tmp_path: Path) -> None:
    new = [["r", 64, [[1, 2, 3, 4, 9] * 4]], ["w", 0, [[1, 2, 3, 4, 5]]]]
    line = _line(new, [["r", 64, 8], ["w", 0, 20]])
    with pytest.raises(TraceError, match="num_ubatches"):
        audit_trace(_trace(tmp_path, line, num_ubatches=2**31 - 1), AuditOptions())
    assert _audit(_trace(tmp_path, line, num_ubatches=1024), prefill_token_threshold=0)["hazardous"] == 0


@pytest.mark.parametrize("slow", [False, True])
def test_groups_that_cannot_be_are_said_with_their_line(tmp_path: Path, slow: bool) -> None:
    path = _trace(tmp_path, sliding_windows=[4], attention_chunk_sizes=[4])
    with pytest.raises(TraceError, match="window") as caught:
        audit_trace(path, AuditOptions(reference=slow))
    assert caught.value.line == 1


def test_a_wide_step_is_too_much_for_the_reference_alone(tmp_path: Path) -> None:
    # One row of a million columns, and 100 short ones.
    wide = ["wide", 0, [[0] * 1_000_000]]
    short = [[f"r{number}", 0, [[1]]] for number in range(100)]
    path = _trace(tmp_path, _line([wide, *short], [["wide", 0, 4], *([name, 0, 1] for name, *_ in short)]))
    with pytest.raises(TraceError, match="101 rows and 1000000 columns") as caught:
        audit_trace(path, AuditOptions(reference=True))
    assert caught.value.line == 2
    assert audit_trace(path, AuditOptions(prefill_token_threshold=0)).eligible == 1


def test_no_eligible_step_has_no_time(tmp_path: Path) -> None:
    audit = audit_trace(_trace(tmp_path), AuditOptions())
    assert (audit.steps, audit.eligible, audit.check_us_p50, audit.check_us_p99) == (0, 0, None, None)


def test_three_microbatches_have_two_cuts(tmp_path: Path) -> None:
    # Offsets 0..2 are a's, the reader's 3..5, the writer's 6..8: cuts 4..8 are unsafe, cut 3 is not.
    new = [["a", 0, [[1]]], ["r", 3, [[2, 3]]], ["w", 0, [[2]]]]
    line = _line(new, [["a", 0, 3], ["r", 3, 3], ["w", 0, 3]])
    thresholds = {"prefill_token_threshold": 0, "decode_token_threshold": 0}
    three = _audit(_trace(tmp_path, line, num_ubatches=3), **thresholds)
    assert (three["hazardous"], three["hazardous_any_cut"]) == (1, 1)
    new[1][1:] = [3, [[2, 3, 4]]]
    line = _line(new, [["a", 0, 3], ["r", 3, 8], ["w", 0, 1]])
    # The only cuts are 4 and 8 of 12; w's one token is offset 11.
    assert _audit(_trace(tmp_path, line, num_ubatches=3), **thresholds)["hazardous"] == 1


def test_hazard_away_from_the_cut_itself(tmp_path: Path) -> None:
    # 12 tokens, cut at 6; unsafe are 10 and 11 only.
    new = [["a", 0, [[1, 4, 5]]], ["r", 2, [[2]]], ["w", 0, [[2]]]]
    line = _line(new, [["a", 0, 9], ["r", 2, 1], ["w", 0, 2]], vllm_allows=False)
    thresholds = {"prefill_token_threshold": 0, "decode_token_threshold": 0}
    audit = _audit(_trace(tmp_path, line), **thresholds)
    assert (audit["hazardous"], audit["hazardous_any_cut"]) == (0, 1)
    assert (audit["engine_vetoed"], audit["engine_missed"], audit["engine_needless"]) == (1, 0, 0)
    assert (audit["kept"], audit["vetoed"], audit["reordered"]) == (1, 0, 1)


def test_a_step_that_no_order_helps_is_vetoed(tmp_path: Path) -> None:
    # Each reads what the other writes.
    new = [["a", 4, [[1, 2]]], ["b", 4, [[2, 1]]]]
    line = _line(new, [["a", 4, 4], ["b", 4, 4]])
    audit = _audit(_trace(tmp_path, line), prefill_token_threshold=0)
    assert (audit["hazardous"], audit["kept"], audit["vetoed"], audit["reordered"]) == (1, 0, 1, 0)


def test_decodes_that_must_lead_forbid_an_order(tmp_path: Path) -> None:
    # b is a decode in the second step, but reads the block that w writes.
    first = _line([["b", 0, [[1, 2]]]], [["b", 0, 4]])
    second = _line([["w", 0, [[1]]]], [["b", 4, 1], ["w", 0, 4]])
    audit = _audit(_trace(tmp_path, first, second), prefill_token_threshold=0)
    assert (audit["hazardous"], audit["kept"], audit["vetoed"]) == (1, 0, 1)


@pytest.mark.parametrize("slow", [False, True])
def test_a_row_too_short_is_said_with_its_line(tmp_path: Path, slow: bool) -> None:
    new = [["a", 0, [[1]]], ["b", 0, [[2, 3]]]]
    path = _trace(tmp_path, _line(new, [["a", 0, 4], ["b", 0, 4]]), _line([], [["a", 4, 1], ["b", 4, 4]]))
    with pytest.raises(TraceError, match="column") as caught:
        audit_trace(path, AuditOptions(prefill_token_threshold=0, reference=slow))
    assert caught.value.line == 3


def test_a_trace_that_breaks_off_counts_as_far_as_it_goes(tmp_path: Path) -> None:
    source = TRACES / "grpo-t1.jsonl.gz"
    path = tmp_path / "broken.jsonl.gz"
    path.write_bytes(source.read_bytes()[:-5000])
    with pytest.raises(TraceError, match="truncated") as caught:
        audit_trace(path, AuditOptions())
    audit = audit_trace(path, AuditOptions(partial=True))
    assert 0 < audit.steps == caught.value.line - 2


ODDITIES = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**64,
    1.5,
    float("nan"),
    "",
    "0-a3d26084",
    "\ud800",
    [],
    [[]],
    {},
    [0],
]


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: container and key."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    places = [(value, key) for key in keys]
    return places + [place for key in keys for place in _nodes(value[key])]


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_trace_is_audited_or_refused(seed: int, tmp_path: Path) -> None:
    """Whatever stands in a trace, the answer is counts or a TraceError, and core and reference agree."""
    random = Random(seed)
    lines = gzip.decompress((TRACES / "grpo-ngram-t4.jsonl.gz").read_bytes()).splitlines()[:8]
    path = tmp_path / "trace.jsonl"
    errors: list[TraceError] = []
    for _ in range(10):
        values = [json.loads(line) for line in lines]
        for _ in range(random.choice([1, 1, 2])):
            container, key = random.choice(_nodes(random.choice(values)))
            if random.random() < 0.2:
                del container[key]
            else:
                container[key] = random.choice(ODDITIES)
        text = "".join(json.dumps(value) + "\n" for value in values).encode()
        if random.random() < 0.2:
            place = random.randrange(len(text))
            text = text[:place] + bytes([random.randrange(256)]) + text[place + 1 :]
        path.write_bytes(text)
        try:
            _audit(path, prefill_token_threshold=0)
        except TraceError as error:
            errors.append(error)
    assert errors
    for error in errors:
        assert error.path == str(path)
        assert 0 < error.line <= len(lines)
        assert "\n" not in error.reason
