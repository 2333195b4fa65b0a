"""Which steps an engine may cut, and which requests are decodes: one rule each, for runner and audit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ubatch_guard.step import IntArray, Phase


def eligible(
    num_tokens: int,
    num_scheduled_tokens: IntArray,
    *,
    decode_query_len: int,
    decode_token_threshold: int,
    prefill_token_threshold: int,
) -> bool:
    """Whether a step is large enough to be cut between requests.

    vLLM's rule (``v1/worker/ubatch_utils.py``, ``check_ubatch_thresholds``; a batch is uniform by
    ``get_uniform_decode_token_count``), and two requests or more, since a single one reads nothing of
    another's.

    Args:
        num_tokens: Scheduled tokens of the step.
        num_scheduled_tokens: int32 or int64, shape ``[num_reqs]``; none is 0.
        decode_query_len: Tokens of a decode with all of its drafts: 1 + number of draft tokens.
        decode_token_threshold: Fewest tokens of a step in which every query is ``decode_query_len`` long
            (``--dbo-decode-token-threshold``).
        prefill_token_threshold: The same of any other step (``--dbo-prefill-token-threshold``).
    """
    if len(num_scheduled_tokens) < 2:
        return False
    enough_for_decodes = bool(num_tokens >= decode_token_threshold)
    enough_for_prefills = bool(num_tokens >= prefill_token_threshold)
    if enough_for_decodes is enough_for_prefills:
        return enough_for_decodes
    # Most steps are decodes without drafts, which are known by their sum.
    uniform = num_tokens == decode_query_len * len(num_scheduled_tokens) and (
        decode_query_len == 1 or bool((num_scheduled_tokens == decode_query_len).all())
    )
    return enough_for_decodes if uniform else enough_for_prefills


def decode_phases(
    num_computed_tokens: IntArray,
    num_scheduled_tokens: IntArray,
    may_read: npt.NDArray[np.bool_],
    decode_threshold: int | None,
) -> npt.NDArray[np.int8]:
    """The phases of a batch whose decodes must lead, as vLLM's ``split_decodes_and_prefills`` wants it.

    A decode runs at most ``decode_threshold`` tokens, and its prefix was written in earlier steps. A request
    as short as that which ``may_read`` what is written in this step is none: it may have to follow its
    writer.

    Args:
        num_computed_tokens: int32 or int64, shape ``[num_reqs]``.
        num_scheduled_tokens: int32 or int64, shape ``[num_reqs]``.
        may_read: bool, shape ``[num_reqs]``: new or resumed in this step, or set back by a failed KV load.
        decode_threshold: Longest query that counts as a decode; None and 0 count as 1.

    Returns:
        int8, shape ``[num_reqs]``: ``Phase.DECODE`` or ``Phase.PREFILL``.
    """
    decode = ~may_read & (num_computed_tokens > 0) & (num_scheduled_tokens <= (decode_threshold or 1))
    return np.where(decode, Phase.DECODE, Phase.PREFILL).astype(np.int8)
