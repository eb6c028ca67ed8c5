#!/usr/bin/env bash
# Test and measure this engine on a machine with a GPU, in three commands of at most 560 seconds each.
#
#   scripts/gpu_check.sh --only right out/gpu/right      test that the engine runs and is right
#   scripts/gpu_check.sh --only speed out/gpu/speed      measure its speed against the roofline and a plain loop
#   scripts/gpu_check.sh --only causes out/gpu/causes    measure the parts of a step, and possible improvements
#
#   scripts/gpu_check.sh [options] [OUT]      OUT: folder of the results. Default: out/gpu
#     --only A,B        run only these stages or groups of stages (right, speed, causes). Default: all
#     --seconds N       limit all chosen stages together. Default: 560 per group, four times as long in a dry run
#     --models FOLDER   keep the random models here (18 GB with the large one). Default: a temporary folder, in memory
#                       (/dev/shm) if there is room, which is removed at the end
#     --dry-run         run every stage at toy size through Triton's interpreter, on a machine without a GPU
#     --python PROGRAM  run this Python. Default: python3
#     --list            print every stage with its group and its limit in seconds, and stop
#
# The script first prints missing requirements and the stages that it skips without them. Packages in a folder of
# PYTHONPATH count as installed. A stage that fails or reaches its limit does not stop the others.
# Exit code: 0 all stages passed, 1 a stage failed, 2 no stage could run. Results: OUT/gpu.json, OUT/gpu.txt (the table),
# OUT/log.txt, OUT/stages/ (output of each stage), OUT/shards/ (output of each process of the tests),
# OUT/trace-*.json.gz. OUT/gpu_check.tgz contains all of these. It is rewritten after every stage, in case the run is
# killed.
set -uo pipefail

# name, group, limit in seconds
stages=(
    "precompile right 75" "smoke right 80" "law right 60" "tests right 230" "sanitize right 90"
    "rates speed 20" "engine speed 150" "variants speed 150" "large speed 110" "torch-loop speed 100"
    "kernels causes 80" "pdl causes 40" "sweep causes 150" "rl causes 80" "transformers causes 90" "races causes 80"
)

usage() { sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"; }
die() { echo "gpu_check: $*" >&2; exit 2; }

dry=() only="right,speed,causes" total="" models="" python=python3 out=""
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=(--dry-run) ;;
        --only | --seconds | --models | --python)
            [ $# -gt 1 ] || die "$1 needs a value."
            case $1 in
                --only) only=$2 ;;
                --seconds) total=$2 ;;
                --models) models=$2 ;;
                --python) python=$2 ;;
            esac
            shift ;;
        --list) printf '%s\n' "${stages[@]}"; exit 0 ;;
        -h | --help) usage; exit 0 ;;
        -*) die "unknown option $1; --help lists them." ;;
        *) [ -z "$out" ] || die "two folders are named, $out and $1."; out=$1 ;;
    esac
    shift
done
[[ $total =~ ^[0-9]*$ ]] || die "--seconds $total is not a number."

chosen="," groups=","  # the stages, and the groups that contain them
for word in ${only//,/ }; do
    found=
    for row in "${stages[@]}"; do
        read -r name group limit <<< "$row"
        [[ $word == "$name" || $word == "$group" ]] || continue
        found=yes
        chosen+="$name,"
        [[ $groups == *",$group,"* ]] || groups+="$group,"
    done
    [ -n "$found" ] || die "unknown stage $word; --list names them."
done
command -v "$python" > /dev/null || die "$python does not exist; name a Python with --python."
lacking=$("$python" -c 'import importlib.util as find; print(*[name for name in ("torch", "numpy", "psutil", "typer", "ml_dtypes")
if not find.find_spec(name)])') || die "$python does not run; name another one with --python."
[ -z "$lacking" ] || die "$python lacks $lacking: install them for it, or name another one with --python."

out=$(mkdir -p "${out:=out/gpu}" && cd "$out" && pwd) || die "cannot write to $out."
[ -z "$models" ] || models=$(mkdir -p "$models" && cd "$models" && pwd) || die "cannot write to the folder of models."
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export HYPOTHESIS_STORAGE_DIRECTORY=$out/parts/hypothesis PYTHONDONTWRITEBYTECODE=1  # leaves the checkout clean
slower=1  # factor for the limit of each stage
[ ${#dry[@]} -eq 0 ] || { slower=4; export OMP_WAIT_POLICY=PASSIVE; }
if [ -z "$total" ]; then
    read -ra each <<< "${groups//,/ }"
    total=$((560 * slower * ${#each[@]}))
fi
rm -rf "$out/parts" "$out/stages" "$out/shards" "$out/stages.jsonl" "$out/log.txt" "$out/gpu.json" "$out/gpu.txt" \
    "$out/gpu_check.tgz"
mkdir -p "$out/stages"

made="" failed=0 running="" current="" began=0 reported=""
if [ -z "$models" ]; then
    room=$(df --output=avail -k /dev/shm 2> /dev/null | tail -n 1)
    [ "${room:-0}" -gt $((24 << 20)) ] && [ ${#dry[@]} -eq 0 ] && memory=/dev/shm || memory=${TMPDIR:-/tmp}
    models=$(mktemp -d -p "$memory") || die "no temporary folder could be made."
    made=$models
fi

# Put all results into one archive, which replaces the previous one.
pack() {
    local new
    new=$(mktemp) || return 0
    tar -czf "$new" -C "$out" --exclude=./gpu_check.tgz --exclude=./parts/hypothesis . && mv "$new" "$out/gpu_check.tgz"
}

report() {
    reported=yes
    "$python" -m benchmarks.gpu report --out "$out" "${dry[@]}" 2>&1 | tee "$out/gpu.txt" | tee -a "$out/log.txt"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
}

# On a signal, write the results so far: the archive first, then the table.
stop() {
    trap '' TERM INT HUP
    if [ -n "$running" ]; then
        kill -TERM "$running"
        sleep 1
        kill -KILL -- "-$running"
        note "$current" $((SECONDS - began)) 0 "stopped by a signal$(verdict "$current")"
    fi 2> /dev/null
    pack
    exit 1
}

finish() {
    [ -n "$reported" ] || [ ! -s "$out/stages.jsonl" ] || report
    [ ! -d "$out/stages" ] || pack
    [ -z "$made" ] || rm -rf "$made"
}
trap stop TERM INT HUP
trap finish EXIT

limit_of() {
    local row
    for row in "${stages[@]}"; do
        [[ $row == "$1 "* ]] && echo "${row##* }"
    done
}

# Print the verdict of a stage: its last line that begins with "verdict: ".
verdict() { sed -n 's/^verdict: /: /p' "$out/stages/$1.txt" 2> /dev/null | tail -n 1; }

# stage NAME COMMAND...: run a stage with its limit, print its result, keep its output.
stage() {
    local name=$1 limit=$(($(limit_of "$1") * slower)) code ended left=$((total - SECONDS)) tee
    shift
    [[ $chosen == *",$name,"* ]] || return 0
    if grep -qx "$name" "$out/skip" 2> /dev/null; then
        note "$name" 0 "$limit" "skipped: a requirement is missing"
        return 0
    fi
    if [ "$left" -lt 10 ]; then
        note "$name" 0 "$limit" "skipped: no time is left"
        failed=1
        return 0
    fi
    [ "$limit" -le "$left" ] || limit=$left
    echo "== $name (at most $limit s)"
    current=$name began=$SECONDS
    exec 3> >(exec tee -a "$out/log.txt" "$out/stages/$name.txt")
    tee=$!
    # in the background, so that this script handles a signal before the stage ends
    timeout -k 10 "$limit" "${@//@LIMIT/$limit}" >&3 2>&1 3>&- &
    running=$!
    exec 3>&-
    wait "$running"
    code=$?
    running=""
    wait "$tee"
    case $code in
        0) ended=ok ;;
        124 | 137) ended="stopped after $limit s" ;;
        *) ended="failed, exit code $code" ;;
    esac
    [ "$code" -eq 0 ] || failed=1
    note "$name" $((SECONDS - began)) "$limit" "$ended$(verdict "$name")"
    pack
}

note() {
    echo "== $1: $4, $2 s"
    printf '{"stage": "%s", "seconds": %d, "limit": %d, "ended": "%s"}\n' "$@" >> "$out/stages.jsonl"
}

part() { stage "$1" "$python" -m benchmarks.gpu part "$1" --out "$out" --models "$models" --seconds @LIMIT "${dry[@]}"; }

"$python" -m benchmarks.gpu missing --out "$out" --models "$models" "${dry[@]}" 2>&1 | tee -a "$out/log.txt"
[ "${PIPESTATUS[0]}" -eq 0 ] || die "nothing can be run here; see above."

stage precompile "$python" -m tests.gpu.precompile --seconds @LIMIT "${dry[@]}"
stage smoke "$python" -m tests.gpu.smoke --models "$models" "${dry[@]}"
stage law "$python" -m tests.gpu.run --law --out "$out/shards" --seconds @LIMIT "${dry[@]}"
stage tests "$python" -m tests.gpu.run --out "$out/shards" --seconds @LIMIT "${dry[@]}"
stage sanitize "$python" tests/gpu/sanitize.py --tool memcheck --seconds 35 "${dry[@]}"
for name in rates engine variants large torch-loop kernels pdl sweep rl transformers; do
    part "$name"
done
stage races "$python" tests/gpu/sanitize.py --tool racecheck --seconds 25 "${dry[@]}"

report
exit $failed
