#!/usr/bin/env bash
# All that can only be known on a card, in under eight minutes, as one JSON file:
#     bench/gpu/run.sh [--device cuda:0] [--quick] [--out FILE] [--wheels FOLDER] [--only PART ...]
# Needs Python with torch >= 2.11, transformers, peft, accelerate and safetensors, and no network. What else the core
# needs (pydantic) is installed from --wheels where it is missing; fetch it elsewhere beforehand:
#     pip download --only-binary=:all: --python-version 3.12 -d FOLDER pydantic psutil PyYAML
# `--device cpu --quick` goes the same ways on a tiny model, without a card.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
wheels=""
arguments=()
while (($#)); do
    case "$1" in
        --wheels) wheels="$2"; shift 2 ;;
        *) arguments+=("$1"); shift ;;
    esac
done
missing=()
for name in pydantic psutil yaml; do
    "$python" -c "import $name" 2>/dev/null || missing+=("$name")
done
if ((${#missing[@]})); then
    if [[ -z "$wheels" ]]; then
        echo "Missing: ${missing[*]}. Give --wheels FOLDER with them (see the head of this file)." >&2
        exit 2
    fi
    beside="$(mktemp -d)"
    trap 'rm -rf "$beside"' EXIT
    "$python" -m pip install --quiet --no-index --find-links "$wheels" --target "$beside" "${missing[@]/yaml/PyYAML}"
    export PYTHONPATH="$beside${PYTHONPATH:+:$PYTHONPATH}"
fi
# As a run has it: segments that grow, locked RAM that is not rounded up. A setting that is there is left alone.
settings="$("$python" -c "from vramfit.engine.accelerators import prepare_allocator as prepare; made = {}; prepare(made); print(*made.values())")"
settings="${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-$settings}}"
[[ -z "$settings" ]] || export PYTORCH_ALLOC_CONF="$settings" PYTORCH_CUDA_ALLOC_CONF="$settings"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$python" bench/gpu/run.py "${arguments[@]}"
