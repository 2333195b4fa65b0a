"""Check the files of a release: what is in them, and that they agree. Usage: check_dist.py FOLDER [TAG].

With the tag that is released, it has to be the version, and no architecture may be missing.
"""

from __future__ import annotations

import email
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ARCHITECTURES = ["aarch64", "x86_64"]
WHEEL_NAME = re.compile(r"ubatch_guard-[^-]+-cp310-abi3-manylinux2014_(\w+)\.manylinux_2_17_\1\.whl")
IN_A_WHEEL = (
    ".dist-info/METADATA",
    ".dist-info/licenses/LICENSE",
    ".cyclonedx.json",
    "ubatch_guard/_core.abi3.so",
    "ubatch_guard/_core.pyi",
    "ubatch_guard/py.typed",
)
IN_AN_SDIST = (
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "pyproject.toml",
    "rust/lib.rs",
)


def wheel_problems(path: Path, version: str) -> Iterator[str]:
    """What is wrong with a wheel."""
    if WHEEL_NAME.fullmatch(path.name) is None:
        yield "the name is not that of an abi3 wheel for manylinux2014"
    with zipfile.ZipFile(path) as wheel:
        content = {}
        for end in IN_A_WHEEL:
            found = [name for name in wheel.namelist() if name.endswith(end)]
            if len(found) != 1:
                yield f"{len(found)} files *{end}"
                return
            content[end] = wheel.read(found[0])
    about = email.message_from_bytes(content[".dist-info/METADATA"])
    if about["Version"] != version:
        yield f"version {about['Version']}, not {version}"
    needed = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    if [re.match(r"[\w-]+", line)[0] for line in needed] != ["numpy"]:  # type: ignore[index]
        yield f"needs {needed}, not numpy alone"
    crates = {component["name"] for component in json.loads(content[".cyclonedx.json"])["components"]}
    if not crates >= {"pyo3", "numpy"}:
        yield f"its bill of materials has only {sorted(crates)}"


def sdist_problems(path: Path, version: str) -> Iterator[str]:
    """What is wrong with an sdist."""
    if path.name != f"ubatch_guard-{version}.tar.gz":
        yield f"the name does not have version {version}"
    with tarfile.open(path) as sdist:
        files = {name.partition("/")[2]: name for name in sdist.getnames()}
        missing = [name for name in IN_AN_SDIST if name not in files]
        if missing:
            yield f"no {', '.join(missing)}"
            return
        about = sdist.extractfile(files["PKG-INFO"])
        assert about is not None
        page = about.read().decode()
    for link in re.findall(r"\]\(([^)]+)\)", page):
        if not link.startswith(("https://", "#")):
            yield f"a link that is dead on the package page: {link}"


def main(folder: Path, tag: str | None = None) -> int:
    """Say what is wrong; the exit status."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert found is not None
    version = found[1]
    sdists, wheels = sorted(folder.glob("*.tar.gz")), sorted(folder.glob("*.whl"))
    problems = [f"{path.name}: {problem}" for path in wheels for problem in wheel_problems(path, version)]
    problems += [f"{path.name}: {problem}" for path in sdists for problem in sdist_problems(path, version)]
    if len(sdists) != 1 or not wheels:
        problems.append(f"{len(sdists)} sdists and {len(wheels)} wheels in {folder}")
    if tag is not None:
        built = [found[1] for wheel in wheels if (found := WHEEL_NAME.fullmatch(wheel.name))]
        if built != ARCHITECTURES:
            problems.append(f"wheels for {built}, not for {ARCHITECTURES}")
        if tag != f"v{version}":
            problems.append(f"the tag is {tag}, the version {version}")
    if f"## [{version}] - 2" not in (ROOT / "CHANGELOG.md").read_text():
        problems.append(f"CHANGELOG.md has no dated {version}")
    print(*problems or [f"{len(sdists)} sdist and {len(wheels)} wheels of {version} are right"], sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
