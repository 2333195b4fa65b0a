"""The guard of one model runner: what it plans, votes, counts and records. Knows no engine's names."""
