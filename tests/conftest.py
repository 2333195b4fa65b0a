"""Hypothesis without a time limit for an example: machines are shared, and slow is not wrong."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
