"""An engine that chooses its own cut: take the safe cut nearest to the middle of the step."""

import numpy as np

from ubatch_guard import Guard, KVCacheGroup, Step

group = KVCacheGroup(tokens_per_column=16, num_blocks=64)
guard = Guard([group])

# A short request with a prefix hit on blocks 1 to 4, and the request that computes them in this very step.
step = Step(
    num_computed_tokens=np.array([64, 0]),
    num_scheduled_tokens=np.array([16, 96]),
    block_tables=(np.array([[1, 2, 3, 4, 9, 0], [1, 2, 3, 4, 5, 6]], np.int32),),
    groups=(group,),
)
middle = step.num_tokens // 2
print("unsafe cuts:", [(cuts.first, cuts.last) for cuts in guard.unsafe_cuts(step)])
print(f"instead of {middle}, cut at {guard.nearest_safe_cut(step, middle)}")
