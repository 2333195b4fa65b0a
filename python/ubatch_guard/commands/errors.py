"""What commands say when something cannot be read or written."""

from __future__ import annotations

import contextlib
import sys

from ubatch_guard.report.answer import printable


def say_error(error: Exception) -> None:
    """Say what is wrong, in one line."""
    # What is left to say it to may be closed.
    with contextlib.suppress(OSError):
        print(printable(str(error)), file=sys.stderr)
