#!/usr/bin/env bash
# Makes a copy of an installed vLLM 0.34 with contrib/vllm-0.34/scheduler-order.patch in it; the installed one stays
# as it is.
#
#   scripts/patched_vllm.sh DEST [PYTHON]       then: PYTHONPATH=DEST PYTHON ...
#
# Copied is the vLLM that PYTHON (default: python3) would import, under the PYTHONPATH of now. Only the files that the
# patch changes are copies, all others are links. A patch that does not fit without fuzz is an error.
set -euo pipefail

dest=${1:?usage: patched_vllm.sh DEST [PYTHON]}
python=${2:-python3}
patch=$(cd "$(dirname "$0")/.." && pwd)/contrib/vllm-0.34/scheduler-order.patch
# Found without being imported: that would take seconds, and a device.
installed=$("$python" -c 'import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("vllm").origin).parent.resolve())')

rm -rf "$dest"
mkdir -p "$dest"
cp -rs "$installed" "$dest/vllm"
# vLLM tells its device by its own distribution.
cp -rs "${installed%/vllm}"/vllm-*.dist-info "$dest"
find "$dest/vllm" -name __pycache__ -prune -exec rm -r {} +
sed -n 's|^+++ b/||p' "$patch" | while read -r file; do
    cp --remove-destination "$(readlink -f "$dest/$file")" "$dest/$file"
    chmod u+w "$dest/$file"
done
patch --quiet --forward --fuzz=0 --no-backup-if-mismatch -p1 -d "$dest" <"$patch"
