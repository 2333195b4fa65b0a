"""The command ``ubatch-guard``. Each subcommand's module is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from ubatch_guard import __version__

_SUMMARIES = {
    "audit": "count unsafe steps in step traces",
    "demo": "show the hazard and its cure on a small torch model",
    "doctor": "say whether the vLLM installed here is guarded",
    "bench": "time the guard against vLLM's own rule",
}
_EXTRA_OF_MODULE = {
    "prometheus_client": "metrics",
    "rich": "cli",
    "safetensors": "engine",
    "torch": "engine",
    "zstandard": "cli",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Only the chosen command declares its arguments, so that the others' modules need not be there.
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="ubatch-guard", description="Exact guard for microbatched LLM inference with prefix caching."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    try:
        for name, summary in _SUMMARIES.items():
            command = commands.add_parser(name, help=summary)
            if name == chosen:
                command.set_defaults(run=_COMMANDS[name](command))
        args = parser.parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = args.run
        status = run(args)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRA_OF_MODULE:
            raise
        extra = _EXTRA_OF_MODULE[module]
        hint = f"{module} is missing: pip install 'ubatch-guard[{extra}]'"
        print(f"ubatch-guard {chosen}: {hint}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has seen enough; the interpreter must not try to flush it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _from_module(name: str) -> Callable[[argparse.ArgumentParser], Callable[[argparse.Namespace], int]]:
    """A command whose module has ``add_arguments(parser)`` and ``run(args)``."""

    def declare(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
        module = importlib.import_module(name)
        module.add_arguments(parser)
        run: Callable[[argparse.Namespace], int] = module.run
        return run

    return declare


_COMMANDS = {
    "audit": _from_module("ubatch_guard.trace.command"),
    "demo": _from_module("ubatch_guard.engine.demo"),
    "doctor": _from_module("ubatch_guard.vllm.doctor"),
    "bench": _from_module("ubatch_guard.bench"),
}

if __name__ == "__main__":
    sys.exit(main())
