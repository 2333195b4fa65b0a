"""A small inference engine with dual-batch overlap, to see the hazard and its cure in.

Real parts, each small enough to read in one sitting. Imports go down this list:

===================  ===========================================================================
``config``           the settings: model, cache, scheduler, microbatches
``request``          a request as its user sends it and as the scheduler sees it
``workloads``        prompts that share prefixes
``outputs``          what the scheduler tells the runner, and what the runner answers
``block_pool``       KV blocks: reference counts, prefix hashes, LRU eviction
``kv_cache``         which blocks a request gets, one row per KV cache group
``scheduler``        continuous batching, chunked prefill, preemption by recomputation
``streams``          transfers, and the two streams of a device
``sanitizer``        reports attention reads of KV slots that the step has still to write
``forward_context``  what a forward pass needs besides the weights
``ubatch``           cuts a step into microbatches and runs them in turns
``parallel``         the ranks' vote on a step and the exchange of expert tokens
``layers``           attention over paged KV, dense and expert MLPs
``model``            the decoder
``weights``          Hugging Face checkpoints and random weights
``input_batch``      the persistent batch and its block tables
``metadata``         from rows of the batch to slots and masks
``sampler``          greedy and seeded sampling
``runner``           one step: order, vote, cut, run, sample
``guarded``          the same runner under vLLM's rule, and with the guard dropped in
``llm_engine``       scheduler and runner in a loop
``timing``           step times under several rules, and the guard's share
``comparison``       one workload under each rule: who answers wrongly
``demo``             ``ubatch-guard demo``
===================  ===========================================================================

A step in eight lines: the scheduler picks requests and publishes their full blocks to the prefix cache
*before* anything is computed; the runner updates its persistent batch (``_update_states``), orders it
(``_may_reorder_batch``), asks whether it may be cut (``_allow_microbatching``), votes with the other ranks
(``_determine_batch_execution_and_padding``), cuts it (``maybe_create_ubatch_slices``), runs the microbatches,
which hand over to each other at every expert exchange, joins their outputs and samples.

Nothing here imports vLLM; the names are vLLM's, so that what drops into this runner drops into that one.
"""
