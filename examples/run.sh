#!/bin/sh
# run.sh -- installs what is missing, builds, and compares UPipe with DeepSpeed-Ulysses over a book: one attention
# block, and the training of a small Llama.
set -u

top=$(cd "$(dirname "$0")/.." && pwd) || exit 1
. "$top/examples/common/install.sh"

# The attention block with every method.
every='--method ulysses --method upipe --method upipe-naive --method ring --method zigzag --method stripe
    --method double-ring --method allgather --method usp --method upipe-ring --method fpdt --method upipe-fpdt'

# The Llama that is trained with either method.
model='--layers 2 --model-dim 128 --heads 16 --kv-heads 4 --head-dim 32'
schedule='--ranks 4 --tokens 4096 --batch 1 --steps 40 --lr 2e-3 --warmup 8 --zero 3 --seed 1 --sample 120'

# Llama3-8B with 5M tokens on 8 GPUs, the paper's longest sequence, whose memory is planned with everything sharded.
large='--layers 32 --model-dim 4096 --heads 32 --kv-heads 8 --ff-dim 14336 --vocab 128256 --untied --dtype bf16
    --ranks 8 --tokens 5242880 --activations offload --zero 3 --device cuda'

usage() {
    cat <<'END_OF_USAGE'
usage: sh examples/run.sh [--save-images] [--no-install]

Runs one attention block, forward and backward, over the bytes of Genesis and Exodus with DeepSpeed-Ulysses and with
UPipe on 4 ranks (threads of one process), at 16/16 and at 16/4 query/key-value heads. Each shape runs twice: over
2,048 tokens against a reference in double precision, and over 8,192 tokens, where the memory is drawn over time. The
second shape also runs with the other methods of context parallelism, over 2,048 tokens. Then trains a small Llama on
the same bytes with either method: the losses must be the same bits, and are drawn, as is the memory of a step by
component, also that of Llama3-8B over 5 million tokens beside what the paper measured, which is planned and not run.

Results are left in build/run/results: numbers as JSON, traces for https://ui.perfetto.dev, pictures as PNG. On Debian
and Ubuntu missing programs are installed with apt-get (through sudo if you are not root). A terminal is asked first,
with the line that does it. After a no the run ends with status 1.

  --save-images   also copy the pictures to docs/images, and the numbers into README's table
  --no-install    the same as a no: says what is missing and the line that installs it, and installs nothing
  --help          this text
END_OF_USAGE
}

save_images=0
for option in "$@"; do
    case $option in
    --save-images) save_images=1 ;;
    --no-install) install=no ;;
    --help | -h)
        usage
        exit 0
        ;;
    *)
        usage >&2
        exit 2
        ;;
    esac
done

build=$top/build/run
results=$build/results

die() {
    echo "run.sh: $*" >&2
    exit 1
}

# ---- programs ----

# train reads and writes JSON with jansson.
required='gcc:gcc,libc6-dev meson:meson ninja:ninja-build python3:python3 matplotlib:python3-matplotlib
    pkg-config:pkg-config jansson:libjansson-dev'
install_missing "$required"
lacking=$(missing "$required")
[ -z "$lacking" ] || die "this run needs: $(names "$lacking")"
# Debian's Python, where another one without the plotting library comes first in PATH.
python=python3
"$python" -c 'import matplotlib' >/dev/null 2>&1 || python=/usr/bin/python3

# ---- build ----

# Made anew where it was made somewhere else: Meson keeps absolute paths.
if [ ! -f "$build/build.ninja" ] || [ "$(cat "$build/made_of" 2>/dev/null)" != "$top" ]; then
    rm -rf "$build"
    quietly configuring env CC="${CC:-gcc}" meson setup "$build" "$top" --buildtype=release -Dtests=disabled \
        -Dexamples=enabled || die "meson setup failed"
    printf '%s\n' "$top" >"$build/made_of"
fi
# What runs below, and what the pages call.
quietly building meson compile -C "$build" compare train logits upipe-plan || die "the build failed"
echo "built in $(($(date +%s) - began)) s: $build/examples/compare and train"

# ---- runs ----

rm -rf "$results"
mkdir -p "$results" || exit 1

# title LINE: a heading
title() {
    printf '\n==== %s ====\n\n' "$1"
}

# comparison NAME FLAG...: prints the table, and keeps it
comparison() {
    name=$1
    shift
    quietly "comparing ($name)" "$build/examples/compare" --ranks 4 --heads 16 --head-dim 64 \
        --json "$results/$name.json" "$@" || die "compare failed ($name)"
    cp "$top/build/run.log" "$results/$name.txt" && cat "$results/$name.txt"
}

# shape LABEL KV_HEADS: the checked run, the long run and its picture
shape() {
    title "$1: 2,048 tokens, against a reference in double precision"
    comparison "checked_$1" --kv-heads "$2" --tokens 2048 --check on
    title "$1: 8,192 tokens"
    comparison "$1" --kv-heads "$2" --tokens 8192 --trace "$results/traces_$1"
    "$python" "$top/examples/compare/plot_memory.py" "$results/$1.json" "$results/traces_$1" "$results/memory_$1.png" ||
        die "the memory of $1 could not be drawn"
}

shape 16_16 16
shape 16_4 4

title "16_4: every method, 2,048 tokens, against a reference in double precision"
# shellcheck disable=SC2086 # a list of flags
comparison methods_16_4 --kv-heads 4 --tokens 2048 --check on $every

# training METHOD: trains, and leaves the losses alone, every digit of them, in METHOD.losses
training() {
    title "training with $1"
    # shellcheck disable=SC2086 # lists of flags
    quietly "training with $1" "$build/examples/train" --method "$1" $model $schedule --json "$results/train_$1.json" \
        --trace "$results/trace_train_$1.json" || die "train failed ($1)"
    cp "$top/build/run.log" "$results/train_$1.txt" && cat "$results/train_$1.txt"
    "$python" -c 'import json, sys
for loss in json.load(open(sys.argv[1]), parse_float=str)["loss"]: print(loss)' \
        "$results/train_$1.json" >"$results/train_$1.losses" || die "train $1 left no list of losses"
    [ -s "$results/train_$1.losses" ] || die "train $1 left an empty list of losses"
}

training ulysses
training upipe
cmp "$results/train_ulysses.losses" "$results/train_upipe.losses" ||
    die "the losses of the two methods are not the same bits"
printf '\nthe same bits: all %d losses of the two methods\n' "$(wc -l <"$results/train_upipe.losses")"
"$python" "$top/examples/train/plot_training.py" loss "$results/loss.png" "$results/train_ulysses.json" \
    "$results/train_upipe.json" || die "the losses could not be drawn"
"$python" "$top/examples/train/plot_training.py" memory "$results/memory_step.png" "$results/train_ulysses.json" \
    "$results/train_upipe.json" || die "the memory of a step could not be drawn"

# plan METHOD: what Llama3-8B would hold
plan() {
    title "the plan for Llama3-8B with $1"
    # shellcheck disable=SC2086 # a list of flags
    "$build/examples/train" --method "$1" $large --plan --json "$results/plan_$1.json" || die "train --plan failed ($1)"
}

plan ulysses
plan upipe
"$python" "$top/examples/train/plot_training.py" memory "$results/memory_llama3_8b.png" "$results/plan_ulysses.json" \
    "$results/plan_upipe.json" || die "the memory of Llama3-8B could not be drawn"

echo
for file in "$results"/memory_16_*.png; do echo "memory over time: $file"; done
echo "losses: $results/loss.png"
echo "memory of a step by component: $results/memory_step.png, and of Llama3-8B: $results/memory_llama3_8b.png"
echo "traces for https://ui.perfetto.dev: $results/traces_16_16, traces_16_4 and trace_train_*.json"
if [ $save_images = 1 ]; then
    mkdir -p "$top/docs/images" && cp "$results"/*.png "$top/docs/images/" || exit 1
    "$python" "$top/examples/compare/readme_table.py" "$results/16_16.json" "$results/16_4.json" "$top/README.md" || exit 1
    echo "copied to $top/docs/images; README's table is of the same run"
fi
echo "all in $(($(date +%s) - began)) s"
