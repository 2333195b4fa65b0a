"""vLLM 0.34 with DBO: the first microbatch reads KV that the second one has still to write.

    VLLM_TARGET_DEVICE=cpu python scheduler_order.py

Two requests with the same prompt in one step, through vLLM's own scheduler and batch order; no model, no GPU.
Exit status 1 while the fault is there, 0 without it. See README.md.
"""

import inspect
import sys

# Sets vLLM's environment, so it comes first.
from priority_preemption import add_request, make_scheduler
from vllm import __version__
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids


def main() -> int:
    """Schedule, sort, cut, and look who reads what from whom."""
    print("vllm", __version__)
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=64)
    prompt = list(range(100, 140))
    add_request(scheduler, "writer", prompt)
    add_request(scheduler, "reader", [*prompt, 1])
    output = scheduler.schedule()
    counts = output.num_scheduled_tokens
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    rows = {new.req_id: new.block_ids[0] for new in output.scheduled_new_reqs}
    print(f"scheduled: {counts}, computed before: {starts}")

    known = {
        "num_tokens_per_req": counts,
        "draft_tokens": output.scheduled_spec_decode_tokens,
        "decode_query_len": 1,
        "new_req_ids": set(starts),  # with the patch
    }
    order = sort_batch_req_ids(
        **{name: known[name] for name in inspect.signature(sort_batch_req_ids).parameters}
    )
    cut = sum(counts.values()) // 2  # two microbatches, no padding
    print(f"batch order: {order}, cut at token {cut}")

    first = {name: sum(counts[other] for other in order[: order.index(name)]) for name in order}
    shared = set(rows["reader"]) & set(rows["writer"])
    print(f"blocks that the writer fills and the reader reads: {sorted(shared)}")
    late = [position for position in range(starts["reader"]) if first["writer"] + position >= cut]
    if first["reader"] < cut and late:
        print(f"WRONG: microbatch 0 reads positions {late[0]}..{late[-1]}, which microbatch 1 writes")
        return 1
    print("right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
