"""What an order may and may not do: which requests are decodes, and have to lead."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ubatch_guard.step import IntArray, Phase


def decode_phases(
    num_computed_tokens: IntArray,
    num_scheduled_tokens: IntArray,
    may_read: npt.NDArray[np.bool_],
    threshold: int,
) -> npt.NDArray[np.int8]:
    """int8, shape ``[num_reqs]``: `Phase.DECODE` for the requests that have to lead, else `Phase.PREFILL`.

    A decode runs at most ``threshold`` tokens, and its prefix was written in earlier steps. A request as
    short as that which ``may_read`` what is written in this step (it is new, or set back by a failed KV load)
    is none: it may have to follow its writer.
    """
    decode = ~may_read & (num_computed_tokens > 0) & (num_scheduled_tokens <= threshold)
    return np.where(decode, Phase.DECODE, Phase.PREFILL).astype(np.int8)
