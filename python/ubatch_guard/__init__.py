"""Exact guard for microbatched LLM inference with prefix caching."""
