#!/usr/bin/env bash
# Everything that a machine with a GPU can tell of this engine, in one command and under ten minutes.
#
#   scripts/gpu_check.sh [options] [OUT]      OUT: folder of the results, out/gpu if not given
#     --dry-run         on a machine without a GPU: every stage at toy size through Triton's interpreter, on the CPU
#     --only A,B        these stages only: tests, sanitize, rates, engine, variants, large, torch-loop, transformers,
#                       races; bench stands for those from rates to transformers
#     --seconds N       for all stages together; 560 if not given, four times as many in a dry run
#     --models FOLDER   of the random models (18 GB with the large one); a folder that is removed at the end if not given
#     --python PROGRAM  python3 if not given
#
# Nothing has to be installed but what `missing` asks for. Prints first what is missing and what is left out for it. A
# stage that fails, or takes longer than it may, does not stop the others. Exit code: 0 all is well, 1 a stage failed,
# 2 nothing could be run. Results: OUT/gpu.json, OUT/gpu.txt (the table), OUT/log.txt, OUT/trace-*.json.gz.
set -uo pipefail

usage() { sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"; }
die() { echo "gpu_check: $*" >&2; exit 2; }

dry=() only="tests,sanitize,bench,races" total="" models="" python=python3 out=""
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
        -h | --help) usage; exit 0 ;;
        -*) die "unknown option $1; --help lists them." ;;
        *) [ -z "$out" ] || die "two folders are named, $out and $1."; out=$1 ;;
    esac
    shift
done
[[ $total =~ ^[0-9]*$ ]] || die "--seconds $total is not a number."
bench=(rates engine variants large torch-loop transformers)
only=",${only/bench/$(IFS=,; echo "${bench[*]}")},"
for name in ${only//,/ }; do
    [[ " tests sanitize races ${bench[*]} " == *" $name "* ]] || die "unknown stage $name; --help lists them."
done
command -v "$python" > /dev/null || die "there is no $python; name one with --python."
lacking=$("$python" -c 'import importlib.util as find; print(*[name for name in ("torch", "numpy", "psutil", "typer")
if not find.find_spec(name)])') || die "$python does not run; name another one with --python."
[ -z "$lacking" ] || die "$python lacks $lacking: install them for it, or name another one with --python."

out=$(mkdir -p "${out:=out/gpu}" && cd "$out" && pwd) || die "cannot write to $out."
[ -z "$models" ] || models=$(mkdir -p "$models" && cd "$models" && pwd) || die "cannot write to the folder of models."
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=src:. PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export HYPOTHESIS_STORAGE_DIRECTORY=$out/parts/hypothesis PYTHONDONTWRITEBYTECODE=1  # nothing is left in the checkout
slower=1  # times as long as each stage may take
[ ${#dry[@]} -eq 0 ] || { slower=4; export TRITON_INTERPRET=1 OMP_WAIT_POLICY=PASSIVE; }
[ -n "$total" ] || total=$((560 * slower))
if [ -z "$models" ]; then
    models=$(mktemp -d) || die "no temporary folder could be made."
    trap 'rm -rf "$models"' EXIT
fi
rm -rf "$out/parts" "$out/stages.jsonl" "$out/log.txt" "$out/gpu.json" "$out/gpu.txt"
failed=0

# stage NAME SECONDS COMMAND...: run it with a limit, tell how it ended, keep its output in the log.
stage() {
    local name=$1 limit=$(($2 * slower)) began=$SECONDS code ended left=$((total - SECONDS))
    shift 2
    [[ $only == *",$name,"* ]] || return 0
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
    timeout -k 10 "$limit" "${@//@LIMIT/$limit}" 2>&1 | tee -a "$out/log.txt"
    code=${PIPESTATUS[0]}
    case $code in
        0) ended=ok ;;
        124 | 137) ended="stopped after $limit s" ;;
        *) ended="failed, exit code $code" ;;
    esac
    [ "$code" -eq 0 ] || failed=1
    note "$name" $((SECONDS - began)) "$limit" "$ended"
}

note() {
    echo "== $1: $4, $2 s"
    printf '{"stage": "%s", "seconds": %d, "limit": %d, "ended": "%s"}\n' "$@" >> "$out/stages.jsonl"
}

part() { stage "$1" "$2" "$python" -m benchmarks.gpu part "$1" --out "$out" --models "$models" --seconds @LIMIT "${dry[@]}"; }

"$python" -m benchmarks.gpu missing --out "$out" --models "$models" "${dry[@]}" 2>&1 | tee -a "$out/log.txt"
[ "${PIPESTATUS[0]}" -eq 0 ] || die "nothing can be run here: see above."

sanitizer=(compute-sanitizer --report-api-errors no --error-exitcode 9)
races=("${sanitizer[@]}" --tool racecheck)
[ ${#dry[@]} -eq 0 ] || sanitizer=() races=()
stage tests 170 "$python" -m tests.gpu.run "${dry[@]}"
stage sanitize 75 "${sanitizer[@]}" "$python" tests/gpu/sanitize.py --seconds 40 "${dry[@]}"
part rates 30
part engine 150
part variants 100
part large 110
part torch-loop 60
part transformers 90
stage races 60 "${races[@]}" "$python" tests/gpu/sanitize.py --seconds 20 "${dry[@]}"

"$python" -m benchmarks.gpu report --out "$out" "${dry[@]}" 2>&1 | tee "$out/gpu.txt" | tee -a "$out/log.txt"
[ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
exit $failed
