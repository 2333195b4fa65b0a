"""Arguments that ``audit`` and ``simulate`` have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ubatch_guard.commands.pictures import add_picture_arguments
from ubatch_guard.step import Policy
from ubatch_guard.trace.audit import DBO_DECODE_TOKEN_THRESHOLD, DBO_PREFILL_TOKEN_THRESHOLD, AuditOptions

MAX_RANKS = 1 << 16


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what to audit for."""
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each trace")
    parser.add_argument(
        "--policy",
        choices=[Policy.VETO.value, Policy.REORDER.value],
        default=Policy.REORDER.value,
        help="what becomes of a step with an unsafe cut: run whole, or reordered with decodes in front "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--dbo-prefill-token-threshold",
        type=whole_number(0),
        default=DBO_PREFILL_TOKEN_THRESHOLD,
        metavar="N",
        help="fewest tokens of a step that is split (default: %(default)s)",
    )
    parser.add_argument(
        "--dbo-decode-token-threshold",
        type=whole_number(0),
        default=DBO_DECODE_TOKEN_THRESHOLD,
        metavar="N",
        help="the same where every query is one token (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks",
        type=whole_number(1, MAX_RANKS),
        default=1,
        metavar="N",
        help="also show what becomes of the overlap with up to N data-parallel ranks, 1 to 65,536",
    )
    add_picture_arguments(parser)


def audit_options(args: argparse.Namespace) -> AuditOptions:
    """What to audit for, as the arguments say."""
    return AuditOptions(
        policy=Policy(args.policy),
        prefill_token_threshold=args.dbo_prefill_token_threshold,
        decode_token_threshold=args.dbo_decode_token_threshold,
    )


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argument's type: an integer from ``least`` to ``most``."""

    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            bounds = f"from {least} on" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    return number
