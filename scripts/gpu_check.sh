#!/usr/bin/env bash
# Run everything that a machine with a GPU can show of this engine: three commands of at most 560 seconds each.
#
#   scripts/gpu_check.sh --only right out/gpu/right      does it run, and is it right?
#   scripts/gpu_check.sh --only speed out/gpu/speed      how fast is it, beside the roofline and a plain loop?
#   scripts/gpu_check.sh --only causes out/gpu/causes    where does the time go, and what would help?
#
#   scripts/gpu_check.sh [options] [OUT]      OUT: folder of the results, out/gpu if not given
#     --only A,B        run only these stages or groups of stages (right, speed, causes); all if not given
#     --seconds N       for all chosen stages together; 560 for each group if not given, four times as many in a dry run
#     --models FOLDER   keep the random models here (18 GB with the large one). Not given: a temporary folder, in memory
#                       (/dev/shm) if there is room, which is removed at the end
#     --dry-run         run every stage at toy size through Triton's interpreter, on a machine without a GPU
#     --python PROGRAM  python3 if not given
#     --list            print every stage with its group and its limit in seconds, and stop
#
# Nothing has to be installed but what `missing` asks for; packages in a folder of PYTHONPATH are found. The script first
# prints what is missing and what it leaves out for it. A stage that fails or reaches its limit does not stop the others.
# Exit code: 0 all is well, 1 a stage failed, 2 nothing could be run. Results: OUT/gpu.json, OUT/gpu.txt (the table),
# OUT/log.txt, OUT/stages/ (the output of each stage), OUT/shards/ (of each process of the tests), OUT/trace-*.json.gz,
# and all of it as OUT/gpu_check.tgz, which is written after every stage: it is there if the run is killed, too.
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

chosen="," groups=","  # of stages, and of the groups that they are in
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
command -v "$python" > /dev/null || die "there is no $python; name one with --python."
lacking=$("$python" -c 'import importlib.util as find; print(*[name for name in ("torch", "numpy", "psutil", "typer")
if not find.find_spec(name)])') || die "$python does not run; name another one with --python."
[ -z "$lacking" ] || die "$python lacks $lacking: install them for it, or name another one with --python."

out=$(mkdir -p "${out:=out/gpu}" && cd "$out" && pwd) || die "cannot write to $out."
[ -z "$models" ] || models=$(mkdir -p "$models" && cd "$models" && pwd) || die "cannot write to the folder of models."
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export HYPOTHESIS_STORAGE_DIRECTORY=$out/parts/hypothesis PYTHONDONTWRITEBYTECODE=1  # nothing is left in the checkout
slower=1  # times as long as each stage may take
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

# Put all results into one archive, which takes the place of the one before.
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

# Whoever stops this script wants what there is: the archive first, then the table.
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

# What a stage says of itself: its last line that begins with "verdict: ".
verdict() { sed -n 's/^verdict: /: /p' "$out/stages/$1.txt" 2> /dev/null | tail -n 1; }

# stage NAME COMMAND...: run it with its limit, say how it ended, keep its output.
stage() {
    local name=$1 limit=$(($(limit_of "$1") * slower)) code ended left=$((total - SECONDS)) tee
    shift
    [[ $chosen == *",$name,"* ]] || return 0
    if grep -qx "$name" "$out/skip" 2> /dev/null; then
        note "$name" 0 "$limit" "left out: something is missing"
        return 0
    fi
    if [ "$left" -lt 10 ]; then
        note "$name" 0 "$limit" "left out: no time is left"
        failed=1
        return 0
    fi
    [ "$limit" -le "$left" ] || limit=$left
    echo "== $name (at most $limit s)"
    current=$name began=$SECONDS
    exec 3> >(exec tee -a "$out/log.txt" "$out/stages/$name.txt")
    tee=$!
    # in the background: a signal to this script is answered at once, and not after the stage
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
[ "${PIPESTATUS[0]}" -eq 0 ] || die "nothing can be run here: see above."

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
