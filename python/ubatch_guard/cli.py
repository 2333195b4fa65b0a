"""The command ``ubatch-guard``. Each subcommand's module is imported only when it is asked for.

Nothing is imported here that the interpreter has not loaded itself, so that an interrupt while the rest is
loaded is met by `main`.
"""

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    Command = Callable[[argparse.Namespace], int]

_SUMMARIES = {
    "audit": "count unsafe steps in step traces",
    "simulate": "count them for the requests of a log, without an engine",
    "demo": "show the hazard and its cure on a small torch model",
    "doctor": "say whether the vLLM installed here is guarded",
    "bench": "time the guard against vLLM's own rule",
}
_EXTRA_OF_MODULE = {
    "plotly": "report",
    "prometheus_client": "metrics",
    "rich": "cli",
    "safetensors": "engine",
    "torch": "engine",
    "zstandard": "cli",
}
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""How a write to standard output fails, but for a closed pipe; commands meet errors of their own files."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    try:
        _open_streams()
        if sys.stdout is None:
            print("ubatch-guard: standard output is closed", file=sys.stderr)
            return 1
        try:
            status = _run(list(sys.argv[1:] if argv is None else argv))
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 2
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        _drop_output()
        return 1
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        print(f"ubatch-guard: the output cannot be written: {error.strerror}", file=sys.stderr)
        _drop_output()
        return 1
    return status


def _run(arguments: list[str]) -> int:
    import argparse

    from ubatch_guard import __version__

    # Only the chosen command declares its arguments, so that the others' modules need not be there.
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="ubatch-guard", description="Exact guard for microbatched LLM inference with prefix caching."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    if not arguments:
        arguments = ["--help"]
    try:
        for name, summary in _SUMMARIES.items():
            command = commands.add_parser(name, help=summary)
            if name == chosen:
                command.set_defaults(run=_COMMANDS[name](command))
        args = parser.parse_args(arguments)
        run: Command = args.run
        return run(args)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRA_OF_MODULE:
            raise
        extra = _EXTRA_OF_MODULE[module]
        hint = f"{module} is missing: pip install 'ubatch-guard[{extra}]'"
        print(f"ubatch-guard {chosen}: {hint}", file=sys.stderr)
        return 2


def _open_streams() -> None:
    """Make the standard streams take any text, and standard error be there."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A file name need not fit the encoding of the terminal.
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Let the interpreter's own flush at the end succeed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _from_module(name: str) -> Callable[[argparse.ArgumentParser], Command]:
    """A command whose module has ``add_arguments(parser)`` and ``run(args)``."""

    def declare(parser: argparse.ArgumentParser) -> Command:
        import importlib

        module = importlib.import_module(name)
        module.add_arguments(parser)
        run: Command = module.run
        return run

    return declare


_COMMANDS = {
    "audit": _from_module("ubatch_guard.commands.audit"),
    "simulate": _from_module("ubatch_guard.commands.simulate"),
    "demo": _from_module("ubatch_guard.engine.demo"),
    "doctor": _from_module("ubatch_guard.vllm.doctor"),
    "bench": _from_module("ubatch_guard.bench"),
}

if __name__ == "__main__":
    sys.exit(main())
