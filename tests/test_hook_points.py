"""What the guard needs of a vLLM, read from sources; and the doctor where there is no vLLM, or an odd one."""

from __future__ import annotations

import ast
import compileall
import importlib.util
import json
from pathlib import Path

import pytest

from ubatch_guard.cli import main
from ubatch_guard.vllm import doctor
from ubatch_guard.vllm.contract import Needs, members_of, missing
from ubatch_guard.vllm.doctor import Exit
from ubatch_guard.vllm.generation import HookPoints, read_hook_points
from ubatch_guard.vllm.v1 import V1
from ubatch_guard.vllm.v2 import V2

VOTE = """
    def execute_model(self, scheduler_output, dummy_run=False):
        dispatch(num_reqs, allow_ubatching=(self.ubatch_runner is not None and not dummy_run))
"""


def write_vllm(folder: Path, generation, vote: str, without: str = "") -> Path:
    """Sources that have what the contract of a generation asks for, but for one name."""
    package = folder / "vllm"
    files: dict[Path, str] = {package / "v1/worker/ubatch_utils.py": "", package / "v1/worker/gpu/x.py": ""}
    if generation is V2:
        files[package / "v1/worker/gpu/ubatch_utils.py"] = ""
    for needs in generation.contract:
        path = package.joinpath(*needs.module.split(".")[1:]).with_suffix(".py")
        lines = [f"class {needs.cls}:", "    always = 0"]
        for name in needs.names:
            method, _, parameters = name.rstrip(")").partition("(")
            if f"def {method}(" in vote or f"{needs.cls}.{method}" == without:
                continue
            lines.append(
                f"    def {method}(self, {parameters}): ..." if parameters else f"    {method}: int = 0"
            )
        is_runner = needs.module == generation.module and needs.cls == generation.cls
        files[path] = files.get(path, "") + "\n".join(lines) + "\n" + (vote if is_runner else "")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


V1_VOTE = (
    "    def _allow_microbatching(self, num_reqs, num_scheduled_tokens_np): ...\n"
    "    def _determine_batch_execution_and_padding(self, num_reqs, num_scheduled_tokens_np): ...\n"
)
V1_KEYWORD_VOTE = (
    "    def _determine_batch_execution_and_padding(\n"
    "        self, num_reqs, num_scheduled_tokens_np, allow_microbatching=True): ...\n"
)


def points(folder: Path, generation, vote: str, without: str = "") -> HookPoints:
    found = read_hook_points(generation, write_vllm(folder, generation, vote, without))
    assert found is not None
    return found


def test_v1_votes_by_a_method_or_before_that_by_a_keyword(tmp_path: Path) -> None:
    by_method = points(tmp_path / "a", V1, V1_VOTE)
    assert (by_method.vote, by_method.missing) == ("_allow_microbatching", ())
    by_keyword = points(tmp_path / "b", V1, V1_KEYWORD_VOTE)
    assert by_keyword.vote == "_determine_batch_execution_and_padding(allow_microbatching=)"
    assert not by_keyword.missing


def test_v1_without_any_vote(tmp_path: Path) -> None:
    found = points(tmp_path, V1, V1_KEYWORD_VOTE.replace("allow_microbatching", "allow"))
    assert found.missing == (
        "_determine_batch_execution_and_padding(num_reqs, num_scheduled_tokens_np, allow_microbatching)",
    )


def test_v2_votes_by_its_ubatch_runner(tmp_path: Path) -> None:
    found = points(tmp_path, V2, VOTE)
    assert (found.vote, found.missing) == ("ubatch_runner", ())


@pytest.mark.parametrize(
    "vote",
    [
        VOTE.replace("allow_ubatching", "may_split"),
        VOTE.replace("self.ubatch_runner is not None", "self.ubatching"),
        VOTE.replace("self.ubatch_runner is not None", "self.ubatch_runner is None"),
        VOTE.replace(" and not dummy_run", " or dummy_run"),
        "    # allow_ubatching=self.ubatch_runner is not None\n"
        "    def execute_model(self, scheduler_output): ...\n",
    ],
    ids=["renamed", "by other means", "the other way round", "one of two", "in a comment"],
)
def test_a_vote_of_another_kind_is_missing_and_not_nothing_to_guard(tmp_path: Path, vote: str) -> None:
    found = points(tmp_path, V2, vote)
    assert found.vote is None
    assert any("allow_ubatching" in name for name in found.missing)


def test_a_v2_without_microbatches_has_nothing_to_guard(tmp_path: Path) -> None:
    package = write_vllm(tmp_path, V2, VOTE)
    (package / "v1/worker/gpu/ubatch_utils.py").unlink()
    assert read_hook_points(V2, package) == HookPoints("v2", V2.module, None, ())


@pytest.mark.parametrize(
    ("generation", "needs", "name"),
    [
        (generation, needs, name.partition("(")[0])
        for generation in (V1, V2)
        for needs in generation.contract
        for name in needs.names
        if name.partition("(")[0] not in ("execute_model", "_determine_batch_execution_and_padding")
    ],
)
def test_every_name_that_is_read_is_looked_for(tmp_path: Path, generation, needs: Needs, name: str) -> None:
    """The one that a release drops is named; `CachedRequestData.resumed_req_ids` was such a one."""
    vote = VOTE if generation is V2 else V1_VOTE
    found = points(tmp_path, generation, vote, without=f"{needs.cls}.{name}")
    assert [said for said in found.missing if f"{needs.cls}.{name}" in said] == list(found.missing)
    assert len(found.missing) == 1


def test_members_are_fields_methods_and_what_is_assigned_to_self() -> None:
    source = """
class Runner:
    field: int
    constant = 1
    def method(self, first, *, second): ...
    def __init__(self):
        self.one = 1
        self.two: int = 2
        self.three, self.four = 3, 4
        local = other.five = 5
"""
    members = members_of(ast.parse(source).body[0])
    assert {"field", "constant", "method", "one", "two", "three", "four"} <= set(members)
    assert members["method"] == {"self", "first", "second"}
    assert not {"local", "five"} & set(members)


def test_a_module_or_class_that_is_gone_is_named(tmp_path: Path) -> None:
    package = write_vllm(tmp_path, V2, VOTE)
    contract = (Needs("vllm.v1.gone", "X", ("a",)), Needs("vllm.v1.core.sched.output", "Gone", ("a",)))
    assert missing(package, contract) == ["the module vllm.v1.gone", "vllm.v1.core.sched.output.Gone"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="there is a vLLM here")
def test_doctor_without_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == Exit.NO_VLLM == 2
    assert json.loads(capsys.readouterr().out)["status"] == "no_vllm"


@pytest.fixture
def found_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package that ``import vllm`` would load: sources with V2 alone."""
    package = write_vllm(tmp_path, V2, VOTE)
    (package / "__init__.py").write_text("raise SystemError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("UBATCH_GUARD_MODE", "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    return package


def test_doctor_imports_nothing_and_is_content(found_vllm: Path) -> None:
    found = doctor.diagnose()
    assert found.runner_in_use == "v2"
    assert found.status is Exit.GUARDED, found.missing


def test_doctor_says_what_a_release_dropped(found_vllm: Path) -> None:
    output = found_vllm / "v1/core/sched/output.py"
    output.write_text(output.read_text().replace("scheduled_new_reqs", "new_reqs"))
    found = doctor.diagnose()
    assert found.status is Exit.NOT_GUARDED
    (lacking,) = found.missing
    assert "SchedulerOutput.scheduled_new_reqs" in lacking


def test_doctor_where_there_are_no_sources(found_vllm: Path) -> None:
    compileall.compile_dir(found_vllm, quiet=1, legacy=True)
    for source in found_vllm.rglob("*.py"):
        source.unlink()
    found = doctor.diagnose()
    assert found.status is Exit.NOT_GUARDED
    assert found.missing == [f"the sources of {V2.module}, which is there compiled"]
    for compiled in found_vllm.rglob("*.pyc"):
        compiled.unlink()
    (found_vllm / "__init__.py").write_text("")
    assert doctor.diagnose().status is Exit.NOT_GUARDED


@pytest.mark.parametrize("mode", ["off", "observe", "nonsense"])
def test_doctor_where_the_guard_does_not_decide(
    found_vllm: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("UBATCH_GUARD_MODE", mode)
    assert doctor.diagnose().status is Exit.NOT_GUARDED


def test_doctor_that_cannot_prove_says_why(found_vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--prove"]) == Exit.NOT_GUARDED
    said = capsys.readouterr().out
    assert "cannot be driven here: SystemError: imported" in said
    assert len(said.splitlines()) <= 10


def test_doctor_is_a_table_that_fits_80_columns(
    found_vllm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == Exit.GUARDED
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("is guarded")
    assert [line[:16].split() for line in lines[2:] if line[0] != " "] == [
        ["ok", "model", "runner"],
        ["ok", "plugin"],
        ["ok", "mode"],
        ["ok", "attention"],
    ]
    assert len(lines) <= 10
    monkeypatch.setenv("UBATCH_GUARD_MODE", "observe")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert main(["doctor", "--verbose"]) == Exit.NOT_GUARDED
    said = capsys.readouterr().out
    assert said.splitlines()[0].endswith("is NOT guarded")
    assert "NO plugin        VLLM_PLUGINS leaves out ubatch_guard" in said
    assert "-> set UBATCH_GUARD_MODE to reorder, or unset it" in said
    assert f"({V2.module})" in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_the_doctors_json_has_the_same_keys(found_vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == Exit.GUARDED
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["status", "vllm", "runner_in_use", "runners", "backends", "mode", "missing"]
    assert found["missing"] == []
