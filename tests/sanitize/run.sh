#!/usr/bin/env bash
# The kernels under address, undefined-behaviour and thread sanitizers: driver.cpp, codes.cpp, experts.cpp, gradients.cpp and
# states.cpp of tests/sanitize on their own.
set -euo pipefail
cd "$(dirname "$0")"
kernels=../../src/nano_inference/ops/cpu/kernels
compiler=${CXX:-g++}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

flags=(-std=c++17 -O1 -g -fno-omit-frame-pointer -pthread -ffp-contract=off -w -I"$kernels")
if grep -q avx512_bf16 /proc/cpuinfo 2>/dev/null; then
    flags+=(-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mfma -mf16c -DNANO_AVX512 -DNANO_BF16 -DNANO_VNNI)
elif grep -q avx2 /proc/cpuinfo 2>/dev/null; then
    flags+=(-mavx2 -mfma -mf16c -DNANO_AVX2)
fi
tiles=(-DNANO_TILES) # the other law of sums
if grep -q amx_int8 /proc/cpuinfo 2>/dev/null; then
    tiles+=(-mamx-tile -mamx-bf16 -mamx-int8 -DNANO_AMX)
fi
for kind in address,undefined thread address,undefined+tiles; do
    echo "== $kind"
    if [[ $kind == *+tiles ]]; then
        flags+=("${tiles[@]}")
        kind=${kind%+tiles}
    fi
    for source in "$kernels"/*.cpp driver.cpp codes.cpp experts.cpp gradients.cpp states.cpp; do
        "$compiler" "${flags[@]}" -fsanitize="$kind" -fno-sanitize-recover=all -c "$source" -o "$folder/$(basename "$source").o" &
        [ "$(jobs -rp | wc -l)" -lt "$(nproc)" ] || wait -n
    done
    wait
    "$compiler" -fsanitize="$kind" -pthread "$folder"/*.o -o "$folder/driver"
    "$folder/driver" "${1:-20}"
done
