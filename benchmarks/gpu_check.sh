#!/usr/bin/env bash
# What one GPU machine can say of vipfast, in under six minutes:
#
#     bash benchmarks/gpu_check.sh OUT          # an NVIDIA GPU from sm_80 on
#     bash benchmarks/gpu_check.sh OUT --cpu    # no GPU: every part tiny, kernels interpreted; shows that it runs, measures nothing
#
# Needs Python >= 3.11 ($PYTHON, else python3) with torch, triton, numpy, scipy, transformers, pyyaml, threadpoolctl and pytest;
# vipfast need not be installed. A part that fails or runs out of time does not stop the next. Exit status: 0 all parts passed,
# 1 some did not, 2 nothing was run. It writes in OUT and nowhere else:
#     summary.txt       a line per part, then the last JSON line of each
#     environment.txt   GPU, driver, versions, commit
#     kernel_tests.txt  tests/kernels, compiled; on a GPU a skipped test fails the part
#     replays.txt       benchmarks/replay.py: 20 steps in bfloat16; 20 in float32 with two updates a step and a KL term
#     kernels.txt       benchmarks/kernels.py
#     tests.txt         the other tests that use a GPU where there is one; what needs a missing package is left out by name
#     replay.jsonl      a line per replayed step
#     results.csv       the rows that the benchmarks append
set -uo pipefail

TOTAL_S=345
fail() { echo "gpu_check: $*" >&2; exit 2; }

[ $# -ge 1 ] && [ $# -le 2 ] && [ "${1#-}" = "$1" ] && [ "${2:---cpu}" = --cpu ] || fail "usage: bash benchmarks/gpu_check.sh OUT [--cpu]"
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$(command -v "${PYTHON:-python3}") || fail "there is no ${PYTHON:-python3}; name a Python with PYTHON="
cpu=${2:-}
# A dry run measures nothing, and may share few and busy cores.
[ -z "$cpu" ] || { export CUDA_VISIBLE_DEVICES="" && TOTAL_S=1800; }
ask="import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else f'none (torch {torch.__version__})')"
gpu=$("$python" -c "$ask") || fail "$python cannot import torch; name another Python with PYTHON="
[ "${gpu#none}" = "$gpu" ] || [ -n "$cpu" ] || fail "torch sees no GPU here: $gpu. So no kernel can be compiled, tested or measured." \
    "Run this on a machine with an NVIDIA GPU and a torch built for CUDA, or add --cpu for a tiny dry run of every part"
mkdir -p "$1" && out=$(cd "$1" && pwd -P) || fail "$1: no such folder can be made; name another"
for old in summary environment kernel_tests replays kernels tests; do rm -f "$out/$old.txt"; done
rm -f "$out/replay.jsonl" "$out/results.csv"
work=$(mktemp -d "$out/.work.XXXXXX") || fail "$out cannot be written to; name another folder"
running=
trap 'rm -rf "$work"' EXIT
trap '[ -z "$running" ] || { kill "$running"; wait "$running"; }; exit 130' INT TERM # the part has a process group of its own
mkdir "$work/import" "$work/tmp" "$work/cache"

# The package alone goes on the path, by a link: the checkout itself there would make a top-level package of its folder kernels/, which
# transformers takes for the PyPI package of that name. For the same reason pytest is started with -P from an empty folder.
ln -s "$repo/vipfast" "$work/import/vipfast"
ln -s "$repo/tests/absent_packages.py" "$work/import/absent_packages.py"
path=:${PYTHONPATH-}:
path=$work/import${path//":$repo:"/:}
export PYTHONPATH=${path%:} PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$work/cache/python VIPFAST_RESULTS=$out/results.csv
export TMPDIR=$work/tmp XDG_CACHE_HOME=$work/cache HF_HOME=$work/cache/hf TRITON_CACHE_DIR=$work/cache/triton
export TORCHINDUCTOR_CACHE_DIR=$work/cache/inductor CUPY_CACHE_DIR=$work/cache/cupy HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
unset TRITON_INTERPRET # on a GPU kernels are to be compiled; without one, tests and benchmarks set it
cd "$work/tmp" || fail "$work/tmp has gone"

environment() {
    date -u '+%Y-%m-%d %H:%M UTC'
    echo "commit $(git -C "$repo" describe --always --dirty 2>/dev/null || echo unknown)"
    "$python" - <<'PY'
import os, platform
from importlib import metadata

import torch

print(f"python {platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores, {platform.platform()}")
needed = "torch triton numpy scipy transformers pytest".split()
extras = "cupy-cuda12x cupy-cuda13x flash-attn liger-kernel vllm peft pyarrow rich tyro hypothesis psutil datasets".split()
versions = {}
for name in needed + extras:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = None
print(", ".join(f"{name} {version}" for name, version in versions.items() if version))
print("not installed:", ", ".join(name for name, version in versions.items() if not version) or "none of the extras")
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    print(f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} multiprocessors, {gpu.total_memory / 2**30:.1f} GiB")
if missing := [name for name in needed if not versions[name]]:
    raise SystemExit(f"needed and missing: {', '.join(missing)}")
PY
    local code=$?
    [ -n "$cpu" ] || nvidia-smi || echo "no driver report: nvidia-smi failed or is not there"
    return $code
}

kernel_tests() {
    if [ -n "$cpu" ]; then
        "$python" -P -m pytest -qq -p no:cacheprovider --collect-only "$repo/tests/kernels" # the benchmarks' smoke runs some
        return
    fi
    local code=0
    # Compiling ahead of time for other GPUs needs none, and would take the time that this one is for.
    "$python" -P -m pytest -q -ra -p no:cacheprovider --continue-on-collection-errors --junitxml="$work/kernels.xml" "$repo/tests/kernels" \
        --ignore="$repo/tests/kernels/test_compile.py" || code=1
    "$python" - "$work/kernels.xml" <<'PY' || code=1
import sys
import xml.etree.ElementTree as ElementTree

cases = list(ElementTree.parse(sys.argv[1]).iter("testcase"))
skipped = {f"{case.get('classname')}::{case.get('name')}": case.find("skipped") for case in cases}
# What needs the interpreter is no test of compiled kernels; it comes next.
skipped = {name: why.get("message") for name, why in skipped.items() if why is not None and "interpret" not in why.get("message").lower()}
for name, why in skipped.items():
    print(f"skipped although there is a GPU: {name}: {why}")
raise SystemExit(1 if skipped or not cases else 0)
PY
    TRITON_INTERPRET=1 "$python" -P -m pytest -q -p no:cacheprovider -k interpreter_refuses_cuda "$repo/tests/kernels" || code=1
    return $code
}

kernel_benchmarks() {
    if [ -n "$cpu" ]; then
        "$python" "$repo/benchmarks/kernels.py" --smoke
    elif [ -e "$work/kernels.xml" ]; then
        "$python" "$repo/benchmarks/kernels.py" --tests "$work/kernels.xml" --limit-s 100
    else
        echo "no report of the kernel tests, so no speed would be printed"
        return 1
    fi
}

replay() {
    "$python" "$repo/benchmarks/replay.py" --output "$out" ${cpu:+--smoke} "$@"
}

allocation() {
    "$python" "$repo/benchmarks/allocators.py" ${cpu:+--smoke}
}

other_tests() {
    local files
    mapfile -t files < <(
        grep -rl --include='test_*.py' 'torch.cuda.is_available()' "$repo/tests/learn" "$repo/tests/engine" | sort
        grep -rl --include='test_*.py' 'no GPU for CuPy' "$repo/tests" | sort
    )
    "$python" -P -m pytest -q -ra -p no:cacheprovider -p absent_packages ${cpu:+--collect-only} "${files[@]}"
}

# part NAME LIMIT_S LOG FUNCTION ...: within LIMIT_S and what is left of the total; what it prints is added to LOG.
part() {
    local name=$1 limit=$2 log=$out/$3 left=$((TOTAL_S - SECONDS)) start=$SECONDS code=0 verdict=passed
    shift 3
    [ -z "$cpu" ] || limit=600
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 5 ]; then
        verdict="NOT RUN: the $TOTAL_S s of all parts are used up"
    else
        echo "== $name ==" >>"$log"
        timeout --kill-after=5 "$limit" bash -c '"$@"' part "$@" >>"$log" 2>&1 &
        running=$!
        wait "$running" || code=$?
        running=
        case $code in
            0) ;;
            124 | 137) verdict="STOPPED after $limit s, see ${log##*/}" ;;
            *) verdict="FAILED ($code), see ${log##*/}" ;;
        esac
        sed -n "/^== $name ==\$/,\$p" "$log" | grep '^{' | tail -n 1 >>"$work/json"
    fi
    [ "$verdict" = passed ] || status=1
    printf '%-24s %4d s  %s\n' "$name" $((SECONDS - start)) "$verdict" | tee -a "$out/summary.txt"
}

export python repo cpu out work
export -f environment kernel_tests kernel_benchmarks replay allocation other_tests
status=0
echo "gpu_check on $gpu, at most $TOTAL_S s, writing to $out" | tee "$out/summary.txt"
part "environment" 40 environment.txt environment
part "kernel tests" 140 kernel_tests.txt kernel_tests
part "replay, bfloat16" 50 replays.txt replay --dtype bfloat16
part "kernel benchmarks" 130 kernels.txt kernel_benchmarks
part "replay, float32" 50 replays.txt replay --dtype float32 --updates-per-step 2 --beta 0.02
part "allocation" 40 allocation.txt allocation
part "other tests" 60 tests.txt other_tests
cat "$work/json" >>"$out/summary.txt"
cat "$work/json"
echo "$([ $status = 0 ] && echo "all parts passed" || echo "NOT all parts passed") in $SECONDS s$([ -z "$cpu" ] || echo "; a dry run measures nothing")" | tee -a "$out/summary.txt"
exit $status
