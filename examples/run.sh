#!/bin/sh
# run.sh -- installs what is missing, builds, and compares UPipe with DeepSpeed-Ulysses over a book: one attention
# block, and the training of a small Llama.
set -u

top=$(cd "$(dirname "$0")/.." && pwd) || exit 1
. "$top/examples/common/install.sh"

# The attention block with every method.
every='--method ulysses --method upipe --method upipe-naive --method ring --method zigzag --method stripe
    --method double-ring --method allgather --method usp --method upipe-ring --method fpdt --method upipe-fpdt'

# The Llama that is trained with either method. What one of this size learns depends on the number of steps, so they are
# short; and one step over a longer sequence, whose memory is drawn.
model='--ranks 4 --layers 2 --model-dim 128 --head-dim 32 --kv-heads 4 --zero 3 --seed 1'
schedule='--heads 8 --tokens 256 --steps 1600 --lr 1.5e-3 --warmup 50 --sample 240 --temperature 0.5'
long='--heads 16 --tokens 4096 --steps 1 --sample 0'

# Llama3-8B with 5M tokens on 8 GPUs, the paper's longest sequence, whose memory is planned with everything sharded.
large='--layers 32 --model-dim 4096 --heads 32 --kv-heads 8 --ff-dim 14336 --vocab 128256 --untied --dtype bf16
    --ranks 8 --tokens 5242880 --activations offload --zero 3 --device cuda'

usage() {
    cat <<'END_OF_USAGE'
usage: sh examples/run.sh [--save-images] [--no-install]

Runs one attention block, forward and backward, over the bytes of Genesis and Exodus with DeepSpeed-Ulysses and with
UPipe on 4 ranks (threads of one process), at 16/16 and at 16/4 query/key-value heads. Each shape runs twice: over some
hundred tokens against a reference in double precision, the second shape with all other methods of context parallelism
too, and over 8,192 tokens, where the memory is drawn over time. Then trains a small Llama on the same bytes with either
method: the losses must be the same bits, and are drawn. The memory of a step is drawn by component, also that of
Llama3-8B over 5 million tokens beside what the paper measured, which is planned and not run.

The first line says how long it takes here: some two minutes on two cores, behind the installation. The first numbers
are there as soon as one program is built; the others are built meanwhile.

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
        echo "run.sh: '$option' is no option (sh examples/run.sh --help)" >&2
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

# Seconds of a core at a slowness of 100: programs that are not built yet; the runs. What ranks and compilers share.
building=45 running=150
[ ! -x "$build/examples/logits" ] || building=0
shared=$(cores)
[ "$shared" -le 4 ] || shared=4
echo "This takes about $(((building + running) * $(slowness) / 100 / shared)) s on this machine ($(cores) cores)" \
    "once what it needs is installed, if nothing else runs here."

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

# title LINE: a heading, with the seconds since the beginning
title() {
    printf '\n==== [%d s] %s ====\n\n' $(($(date +%s) - began)) "$1"
}

# Made anew where it was made somewhere else: Meson keeps absolute paths. The kernels ask for all optimizations themselves;
# for the rest they would double the time to compile.
if [ ! -f "$build/build.ninja" ] || [ "$(cat "$build/made_of" 2>/dev/null)" != "$top" ]; then
    rm -rf "$build"
    quietly configuring env CC="${CC:-gcc}" meson setup "$build" "$top" --buildtype=release -Doptimization=1 \
        -Dtests=disabled -Dexamples=enabled || die "meson setup failed"
    printf '%s\n' "$top" >"$build/made_of"
fi
rm -rf "$results"
mkdir -p "$results" || exit 1
title "building compare; the rest is built while that runs"
quietly building ninja -C "$build" examples/compare || die "the build failed"
# What runs further below, and what the pages call.
ninja -C "$build" examples/train examples/logits examples/upipe-plan >"$build/rest.log" 2>&1 &
rest=$!
pictures=
trap 'kill $rest $pictures 2>/dev/null; [ -z "${ticker:-}" ] || kill -9 $ticker 2>/dev/null' EXIT

# ---- runs ----

# comparison NAME FLAG...: prints the table, and keeps it
comparison() {
    name=$1
    shift
    quietly "comparing ($name)" "$build/examples/compare" --ranks 4 --heads 16 --head-dim 64 \
        --json "$results/$name.json" "$@" || die "compare failed ($name)"
    cp "$top/build/run.log" "$results/$name.txt" && cat "$results/$name.txt"
}

# draw SCRIPT ARGUMENT...: a picture, while something else runs
draw() {
    script=$1
    shift
    "$python" "$top/examples/$script" "$@" &
    pictures="$pictures $!"
}

title "16/16 query/key-value heads: 512 tokens, against a reference in double precision"
comparison checked_16_16 --kv-heads 16 --tokens 512 --check on
title "16/4 heads: every method, 1,024 tokens, against a reference in double precision"
# shellcheck disable=SC2086 # a list of flags
comparison methods_16_4 --kv-heads 4 --tokens 1024 --check on $every

quietly "building the rest" wait $rest || {
    cat "$build/rest.log" >&2
    die "the build failed"
}
rest= # its number may be another process's by now
echo "all is built in $build/examples; nothing is built or drawn beside what follows"

# shape LABEL KV_HEADS: the long run
shape() {
    title "16/$2 heads: 8,192 tokens"
    comparison "$1" --kv-heads "$2" --tokens 8192 --trace "$results/traces_$1"
}

shape 16_16 16
shape 16_4 4

# training METHOD: trains, and leaves what the methods must agree in, every digit, in METHOD.same
training() {
    title "training with $1, and one step over a longer sequence"
    # shellcheck disable=SC2086 # lists of flags
    "$build/examples/train" --method "$1" $model $schedule --json "$results/train_$1.json" >"$results/train_$1.txt" ||
        die "train failed ($1)"
    # shellcheck disable=SC2086 # lists of flags
    "$build/examples/train" --method "$1" $model $long --json "$results/step_$1.json" \
        --trace "$results/trace_step_$1.json" >"$results/step_$1.txt" || die "train failed ($1)"
    "$python" -c 'import json, sys
run = json.load(open(sys.argv[1]), parse_float=str)
for number in run["loss"] + run["grad_norm"]: print(number)' "$results/train_$1.json" >"$results/$1.same" ||
        die "train $1 left no lists of losses and norms"
    [ -s "$results/$1.same" ] || die "train $1 left empty lists"
    sed -n '/^sample, /,$p' "$results/train_$1.txt" >>"$results/$1.same"
}

training ulysses
sed -n '1,2p' "$results/train_ulysses.txt"
training upipe
cat "$results/train_upipe.txt"
cmp "$results/ulysses.same" "$results/upipe.same" || die "what the two methods have learnt is not the same bits"
printf '\nthe same bits: losses and gradient norms of all steps, and the sample, with both methods\n'
"$python" "$top/examples/train/plot_training.py" loss "$results/loss.png" "$results/train_ulysses.json" \
    "$results/train_upipe.json" || die "the losses could not be drawn"
for shape in 16_16 16_4; do
    draw compare/plot_memory.py "$results/$shape.json" "$results/traces_$shape" "$results/memory_$shape.png"
done
draw train/plot_training.py memory "$results/memory_step.png" "$results/step_ulysses.json" "$results/step_upipe.json"

# plan METHOD: what Llama3-8B would hold
plan() {
    title "the plan for Llama3-8B with $1"
    # shellcheck disable=SC2086 # a list of flags
    "$build/examples/train" --method "$1" $large --plan --json "$results/plan_$1.json" || die "train --plan failed ($1)"
}

plan ulysses
plan upipe
draw train/plot_training.py memory "$results/memory_llama3_8b.png" "$results/plan_ulysses.json" "$results/plan_upipe.json"
for picture in $pictures; do wait "$picture" || die "a picture could not be drawn"; done
pictures=

echo
for file in "$results"/memory_16_*.png; do echo "memory over time: $file"; done
echo "losses: $results/loss.png"
echo "memory of a step by component: $results/memory_step.png, and of Llama3-8B: $results/memory_llama3_8b.png"
echo "traces for https://ui.perfetto.dev: $results/traces_16_16, traces_16_4 and trace_step_*.json"
if [ $save_images = 1 ]; then
    mkdir -p "$top/docs/images" && cp "$results"/*.png "$top/docs/images/" || exit 1
    "$python" "$top/examples/compare/readme_table.py" "$results/16_16.json" "$results/16_4.json" "$top/README.md" || exit 1
    echo "copied to $top/docs/images; README's table is of the same run"
fi
echo "all in $(($(date +%s) - began)) s: every peak the planned one, and the same bits with both methods"
