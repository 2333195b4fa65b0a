"""Benchmark the last commits with asv and publish the graphs as a static site, benches/.asv/html.

With --picture FILE, one graph of the site is also drawn into FILE by a headless Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCHES = ROOT / "benches"
SITE = BENCHES / ".asv" / "html"
WHEEL_SOURCES = ("rust", "python", "Cargo.toml", "Cargo.lock", "pyproject.toml")
"""What a commit must change to be worth a point: the rest is the same wheel."""
MACHINE = "local"
PICTURED = "#bench_check.Ratio.track_mirror?y-axis-scale=log"
LIBRARIES = Path("/usr/share/javascript")
DEBIAN_PACKAGES = {
    "jquery-3.3.1.min.js": "libjs-jquery: jquery/jquery.min.js",
    "jquery.flot.min.js": "libjs-jquery-flot: jquery-flot/jquery.flot.min.js",
    "stupidtable.min.js": "libjs-jquery-stupidtable: jquery-stupidtable/stupidtable.min.js",
    "md5.min.js": "node-blueimp-md5: blueimp-md5/md5.min.js",
    "bootstrap.min.js": "libjs-bootstrap: bootstrap/js/bootstrap.min.js",
    "bootstrap.min.css": "libjs-bootstrap: bootstrap/css/bootstrap.min.css",
}
"""Where Debian has the libraries that asv's pages load from elsewhere; its Flot holds the plug-ins too."""
OWN_AXIS_LABELS = "jquery.flot.axislabels.js"
"""asv's plug-in for what Debian's newer Flot does itself; both together write every label twice."""
ADAPTERS = """<style>.legendLayer .background { fill: white; stroke: silver; }</style>
<script>
const raised = {...[..."⁰¹²³⁴⁵⁶⁷⁸⁹"], "-": "⁻"};
String.prototype.sup = function () { return this.replace(/./g, c => raised[c]); };
</script>"""
"""Its labels are SVG: a legend needs its colour said, and HTML for powers of ten shows as such."""
SOME_FAILED = 2
"""asv's exit status when a benchmark failed, as those do that ask for more than an old commit has."""


def main() -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=10, help="how many commits (default 10)")
    parser.add_argument("--bench", default="^(?!bench_engine)", help="regular expression of benchmarks")
    parser.add_argument("--picture", type=Path, help="also draw a graph into this PNG file")
    parser.add_argument("--picture-only", action="store_true", help="of the site that is there already")
    args = parser.parse_args()
    if not args.picture_only:
        benchmark(args.commits, args.bench)
        _asv("publish")
        if missing := make_standalone(SITE):
            print("The pages load libraries from the network; for a site without: apt install", *missing)
        print(f"Look at it with: python -m http.server -d {SITE.relative_to(ROOT)}")
    if args.picture:
        with serve(SITE) as url:
            browse(f"{url}/{PICTURED}", args.picture)
    return 0


def benchmark(commits: int, bench: str) -> None:
    """Run the benchmarks on the last commits that change the wheel; what asv has it does not run again."""
    command = ["git", "log", f"--max-count={commits}", "--format=%H", "--", *WHEEL_SOURCES]
    hashes = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    _asv("machine", "--yes", "--machine", MACHINE)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(hashes)
        file.flush()
        options = ("--quick", "--skip-existing-commits", "--machine", MACHINE, "--bench", bench)
        _asv("run", *options, f"HASHFILE:{file.name}", accept=SOME_FAILED)


def make_standalone(site: Path) -> list[str]:
    """Let the pages load their libraries from the site itself; the Debian packages that lack, if any do."""
    sources = [entry.split(": ") for entry in DEBIAN_PACKAGES.values()]
    missing = sorted({package for package, file in sources if not (LIBRARIES / file).exists()})
    if missing:
        return missing
    index = site / "index.html"
    lines = []
    for line in index.read_text().splitlines():
        if OWN_AXIS_LABELS in line:
            continue
        address = re.search(r'(?:src|href)="(https://[^"]+)" integrity', line)
        if address is None:
            lines.append(line)
            continue
        name = address[1].rpartition("/")[2]
        if name in DEBIAN_PACKAGES:
            shutil.copy(LIBRARIES / DEBIAN_PACKAGES[name].partition(": ")[2], site / name)
            tag = (
                '<link rel="stylesheet" href="{}">' if name.endswith(".css") else '<script src="{}"></script>'
            )
            lines.append(tag.format(name))
            if name.endswith(".css"):
                lines.append(ADAPTERS)
    index.write_text("\n".join(lines))
    return []


def browser() -> str | None:
    """Chromium or a relative of it, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine; the address. asv's pages do not work as files."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet."""

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def browse(url: str, picture: Path | None = None) -> str:
    """Open a page in a headless browser and return the document it becomes, or draw it into a PNG file."""
    chromium = browser()
    if chromium is None:
        raise FileNotFoundError("no Chromium (Debian: apt install chromium)")
    # Root cannot have a sandbox; the pages are our own. Time runs ahead until the page is done.
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=20000",
    ]
    options += (
        ["--dump-dom"] if picture is None else ["--window-size=1280,800", f"--screenshot={picture.resolve()}"]
    )
    command = [chromium, *options, url]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def _asv(command: str, *arguments: str, accept: int = 0) -> None:
    asv = Path(sys.executable).with_name("asv")
    status = subprocess.run([asv, command, *arguments], cwd=BENCHES, check=False).returncode
    if status not in (0, accept):
        raise SystemExit(f"asv {command} failed with status {status}")


if __name__ == "__main__":
    sys.exit(main())
