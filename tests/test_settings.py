from __future__ import annotations

import pytest

from ubatch_guard.settings import Settings, SettingsError
from ubatch_guard.step import Policy


def test_nothing_set_reorders() -> None:
    assert Settings.from_environment({"PATH": "/bin"}) == Settings(policy=Policy.REORDER)


def test_everything_set() -> None:
    settings = Settings.from_environment(
        {
            "UBATCH_GUARD_MODE": "Veto",
            "UBATCH_GUARD_TRACE": "/tmp/steps.{rank}.jsonl",
            "UBATCH_GUARD_TRACE_MAX_BYTES": "4096",
            "UBATCH_GUARD_VERIFY": "100",
            "UBATCH_GUARD_STRICT": "yes",
            "UBATCH_GUARD_LOG_INTERVAL": "2.5",
            "UBATCH_GUARD_POISON": "1",
        }
    )
    assert settings == Settings(Policy.VETO, "/tmp/steps.{rank}.jsonl", 4096, 100, True, 2.5, poison=True)


@pytest.mark.parametrize(
    ("mode", "policy"), [("off", None), ("observe", Policy.OBSERVE), ("reorder", Policy.REORDER)]
)
def test_modes(mode: str, policy: Policy | None) -> None:
    assert Settings.from_environment({"UBATCH_GUARD_MODE": mode}).policy is policy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODE", "on"),
        ("MODE", ""),
        ("VERIFY", "-1"),
        ("VERIFY", "1.5"),
        ("TRACE_MAX_BYTES", "0"),
        ("TRACE", "/tmp/steps-{rnk}-{pid}.jsonl"),
        ("STRICT", "maybe"),
        ("LOG_INTERVAL", "soon"),
        ("LOG_INTERVAL", "inf"),
        ("LOG_INTERVAL", "nan"),
        ("MODES", "off"),
    ],
)
def test_what_is_malformed_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"UBATCH_GUARD_{name}"):
        Settings.from_environment({f"UBATCH_GUARD_{name}": value})
