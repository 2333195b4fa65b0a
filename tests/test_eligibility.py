"""Which steps may be cut and which requests are decodes, as vLLM has it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ubatch_guard.eligibility import decode_phases, eligible
from ubatch_guard.step import Phase


def _eligible(scheduled: list[int], query_len: int = 1, decode: int = 32, prefill: int = 512) -> bool:
    return eligible(
        sum(scheduled),
        np.array(scheduled, np.int32),
        decode_query_len=query_len,
        decode_token_threshold=decode,
        prefill_token_threshold=prefill,
    )


def test_verifications_of_drafts_are_decodes() -> None:
    assert _eligible([4] * 16, query_len=4)
    assert not _eligible([4] * 7, query_len=4), "28 tokens"
    assert not _eligible([4] * 16, query_len=1), "an engine without drafts schedules no such decode"
    assert not _eligible([4] * 15 + [1], query_len=4), "not uniform"
    assert not _eligible([1] * 32, query_len=4), "decodes without drafts, where there should be some"


def test_one_request_is_never_cut_from_another() -> None:
    assert not _eligible([10_000])
    assert not _eligible([])


@pytest.mark.parametrize("query_len", [1, 2])
def test_the_rule_is_vllms(query_len: int) -> None:
    """Its words (``check_ubatch_thresholds``, ``get_uniform_decode_token_count``) without the short cuts."""
    cases = 0
    for decode, prefill in product(range(6), repeat=2):
        for scheduled in product((1, 2, 3), repeat=2):
            uniform = len(set(scheduled)) == 1 and scheduled[0] == query_len
            theirs = sum(scheduled) >= (decode if uniform else prefill)
            assert _eligible(list(scheduled), query_len, decode, prefill) is theirs
            cases += theirs
    assert 0 < cases < 6 * 6 * 9


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_decode_is_short_has_a_prefix_and_reads_nothing_new(dtype: type) -> None:
    computed = np.array([9, 9, 0, 9, 9], dtype)
    scheduled = np.array([1, 3, 1, 4, 1], dtype)
    may_read = np.array([False, False, False, False, True])

    def decodes(threshold: int | None) -> list[int]:
        phases = decode_phases(computed, scheduled, may_read, threshold)
        assert phases.dtype == np.int8
        return np.flatnonzero(phases == Phase.DECODE).tolist()

    assert decodes(None) == decodes(0) == decodes(1) == [0]
    assert decodes(3) == [0, 1]
    assert decodes(4) == [0, 1, 3]
