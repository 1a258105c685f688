#!/bin/sh
# run.sh -- installs what is missing, builds, and compares UPipe with DeepSpeed-Ulysses over a book.
set -u

usage() {
    cat <<'END_OF_USAGE'
usage: sh examples/run.sh [--save-images]

Runs one attention block, forward and backward, over the bytes of Genesis and Exodus with DeepSpeed-Ulysses and with
UPipe on 4 ranks (threads of one process), at 16/16 and at 16/4 query/key-value heads. Each shape runs twice: over
2,048 tokens against a reference in double precision, and over 8,192 tokens, where the memory is drawn over time.

Results are left in build/run/results: numbers as JSON, traces for https://ui.perfetto.dev, pictures as PNG. On Debian
and Ubuntu missing programs are installed with apt-get (through sudo if you are not root).

  --save-images   also copy the pictures to docs/images
  --help          this text
END_OF_USAGE
}

save_images=0
for option in "$@"; do
    case $option in
    --save-images) save_images=1 ;;
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

top=$(cd "$(dirname "$0")/.." && pwd) || exit 1
build=$top/build/run
results=$build/results
began=$(date +%s)

die() {
    echo "run.sh: $*" >&2
    exit 1
}

# ---- programs ----

# A Python that has the plotting library: Debian's, where another one comes first in PATH without it.
find_python() {
    for python in python3 /usr/bin/python3; do
        "$python" -c 'import matplotlib' >/dev/null 2>&1 && return 0
    done
    return 1
}

packages=
for entry in gcc:gcc,libc6-dev meson:meson ninja:ninja-build python3:python3; do
    command -v "${entry%%:*}" >/dev/null 2>&1 || packages="$packages $(echo "${entry#*:}" | tr ',' ' ')"
done
find_python || packages="$packages python3-matplotlib"
if [ -n "$packages" ]; then
    root=
    [ "$(id -u)" = 0 ] || root=sudo
    command -v apt-get >/dev/null 2>&1 || die "missing, and no apt-get to install them with:$packages"
    [ -z "$root" ] || command -v sudo >/dev/null 2>&1 || die "missing, and no sudo to install them with:$packages"
    echo "installing with apt-get:$packages"
    $root apt-get update -q >/dev/null || die "apt-get update failed"
    # shellcheck disable=SC2086 # a list of words
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $packages >/dev/null ||
        die "apt-get could not install:$packages"
    find_python || die "no python3 here can import matplotlib"
fi

# ---- build ----

mkdir -p "$top/build" || exit 1
# Made anew where it was made somewhere else: Meson keeps absolute paths.
if [ ! -f "$build/build.ninja" ] || [ "$(cat "$build/made_of" 2>/dev/null)" != "$top" ]; then
    rm -rf "$build"
    CC=${CC:-gcc} meson setup "$build" "$top" --buildtype=release -Dtests=disabled -Dexamples=enabled \
        >"$top/build/run.log" 2>&1 || {
        cat "$top/build/run.log" >&2
        die "meson setup failed"
    }
    printf '%s\n' "$top" >"$build/made_of"
fi
meson compile -C "$build" >"$top/build/run.log" 2>&1 || {
    cat "$top/build/run.log" >&2
    die "the build failed"
}
echo "built in $(($(date +%s) - began)) s: $build/examples/compare"

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
    "$build/examples/compare" --ranks 4 --heads 16 --head-dim 64 --json "$results/$name.json" "$@" \
        >"$results/$name.txt" || die "compare failed ($name)"
    cat "$results/$name.txt"
}

# shape LABEL KV_HEADS: the checked run, the long run and its picture
shape() {
    title "$1: 2,048 tokens, against a reference in double precision"
    comparison "checked_$1" --kv-heads "$2" --tokens 2048 --check on
    title "$1: 8,192 tokens"
    comparison "$1" --kv-heads "$2" --tokens 8192 --trace "$results/traces_$1"
    "$python" "$top/examples/plot_memory.py" "$results/$1.json" "$results/traces_$1" "$results/memory_$1.png" ||
        die "the memory of $1 could not be drawn"
}

shape 16_16 16
shape 16_4 4

echo
for file in "$results"/memory_*.png; do echo "memory over time: $file"; done
echo "traces for https://ui.perfetto.dev: $results/traces_16_16 and traces_16_4"
if [ $save_images = 1 ]; then
    mkdir -p "$top/docs/images" && cp "$results"/memory_*.png "$top/docs/images/" || exit 1
    echo "copied to $top/docs/images"
fi
echo "all in $(($(date +%s) - began)) s"
