#!/bin/sh
# run.sh -- installs what is missing, builds and runs every test. Ends with a line "N passed, N failed".
set -u

usage() {
    cat <<'END'
usage: sh tests/run.sh [--quick]

Builds upipe's tests under build/ with gcc, with clang, for other vector instructions, and with the sanitizers, and runs
them; what is for 64-bit ARM and the CUDA backend's on emulators, and with nvcc, if it is here, everything is compiled
and linked for devices. On Debian and Ubuntu missing programs are installed with apt-get (through sudo if you are not
root). The last line is the verdict, "N passed, N failed"; the exit status is zero if nothing failed and something ran.

  --quick   one build with gcc and its tests: no clang, no other instructions, no sanitizers, no valgrind
  --help    this text

UPIPE_DRAWS is the number of random cases of the property tests (sanitizers, valgrind, the emulated processor and plain C
take UPIPE_DRAWS_SLOW, 100), UPIPE_SEED where they start. UPIPE_FUZZ_SECONDS is how long files are fuzzed (2; 60 under
AddressSanitizer). Published weights are fetched into UPIPE_CACHE (build/cache).
END
}

quick=0
for option in "$@"; do
    case $option in
    --quick) quick=1 ;;
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
build=$top/build
draws_slow=${UPIPE_DRAWS_SLOW:-100}
began=$(date +%s)
passed=0
failed=0
skipped=0

# ---- programs ----

# program:packages. The first list must be there; what only the second needs is left out, and said, without it.
required='gcc:gcc,libc6-dev g++:g++ meson:meson ninja:ninja-build pkg-config:pkg-config python3:python3 numpy:python3-numpy jansson:libjansson-dev'
wanted='clang:clang clang-format:clang-format valgrind:valgrind,libc6-dbg openblas:libopenblas-dev pip:python3-pip mpirun:openmpi-bin,libopenmpi-dev'
# A machine of that kind runs NEON anyway.
[ "$(uname -m)" = aarch64 ] ||
    wanted="$wanted aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu,libc6-dev-arm64-cross qemu-aarch64:qemu-user"

# Some are no programs: NumPy in any Python here, which checks what programs dump, pip, and two libraries.
has() {
    case $1 in
    numpy) python3 -c 'import numpy' 2>/dev/null || /usr/bin/python3 -c 'import numpy' 2>/dev/null ;;
    openblas | jansson) pkg-config --exists "$1" 2>/dev/null ;;
    pip) python3 -m pip --version >/dev/null 2>&1 ;;
    *) command -v "$1" >/dev/null 2>&1 ;;
    esac
}

# The entries of a list that are not there.
missing() {
    for entry in $1; do
        has "${entry%%:*}" || printf '%s ' "$entry"
    done
}

names() {
    for entry in $1; do printf '%s ' "${entry%%:*}"; done
}

install_missing() {
    lacking=$(missing "$1")
    [ -n "$lacking" ] || return 0
    root=
    [ "$(id -u)" = 0 ] || root=sudo
    if ! command -v apt-get >/dev/null 2>&1 || { [ -n "$root" ] && ! command -v sudo >/dev/null 2>&1; }; then
        return 0
    fi
    packages=$(for entry in $lacking; do printf '%s,' "${entry#*:}"; done | tr ',' ' ')
    echo "installing with apt-get: $packages"
    # shellcheck disable=SC2086 # lists of words
    $root apt-get update -q >/dev/null
    # shellcheck disable=SC2086
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $packages >/dev/null
}

if [ $quick = 1 ]; then install_missing "$required"; else install_missing "$required $wanted"; fi
lacking=$(missing "$required")
if [ -n "$lacking" ]; then
    echo "missing programs: $(names "$lacking")" >&2
    echo "0 passed, 1 failed"
    exit 1
fi
lacking=$(missing "$wanted")
[ -z "$lacking" ] || [ $quick = 1 ] || echo "left out, as the programs are missing: $(names "$lacking")"

# ---- builds and runs ----

fail() {
    echo "FAILED: $*"
    failed=$((failed + 1))
}

# prepare NAME COMPILER OPTION...: build/NAME, made anew where it was made of something else or somewhere else. Builds
# $targets, or all.
targets=
prepare() {
    name=$1 compiler=$2
    shift 2
    dir=$build/$name
    made_of="$top; $($compiler --version | head -n 1); meson $(meson --version); $*; ${CFLAGS-}; ${LDFLAGS-}"
    if [ ! -f "$dir/build.ninja" ] || [ "$(cat "$dir/made_of" 2>/dev/null)" != "$made_of" ]; then
        rm -rf "$dir"
        CC=$compiler meson setup "$dir" "$top" "$@" >"$build/$name.log" 2>&1 || {
            cat "$build/$name.log"
            fail "meson setup of $name"
            return 1
        }
        printf '%s\n' "$made_of" >"$dir/made_of"
    fi
    start=$(date +%s)
    # shellcheck disable=SC2086 # a list of words
    meson compile -C "$dir" $targets >"$build/$name.log" 2>&1 || {
        cat "$build/$name.log"
        fail "build of $name"
        return 1
    }
    echo "$name: built in $(($(date +%s) - start)) s"
}

count() {
    cat "$1"/meson-logs/testlog*.json 2>/dev/null | grep -c "$2"
}

# suites BUILD "SUITE..." OPTION...: runs suites side by side and adds up their verdicts.
suites() {
    name=$1 parts=$2
    shift 2
    dir=$build/$name
    rm -f "$dir"/meson-logs/testlog*
    start=$(date +%s)
    # shellcheck disable=SC2046 # a list of words
    meson test -C "$dir" --no-rebuild --print-errorlogs $(printf -- '--suite %s ' $parts) "$@" \
        >"$build/$name-tests.log" 2>&1
    status=$?
    ok=$(count "$dir" '"result": "OK"')
    skip=$(count "$dir" '"result": "SKIP"')
    bad=$(($(count "$dir" '"result": "') - ok - skip))
    [ $status = 0 ] || [ $bad != 0 ] || bad=1
    [ $bad = 0 ] || cat "$build/$name-tests.log"
    cat "$dir"/meson-logs/testlog*.txt 2>/dev/null | grep '^left out:' | sort -u
    passed=$((passed + ok)) skipped=$((skipped + skip)) failed=$((failed + bad))
    echo "$name, $parts: $ok passed, $bad failed, $skip skipped in $(($(date +%s) - start)) s"
}

# Can programs of this sanitizer start here at all? Some kernels lay out memory as gcc's runtime does not expect.
runs_with() {
    scratch=$(mktemp -d) || return 1
    echo 'int main(void) { return 0; }' >"$scratch/empty.c"
    gcc "$1" "$scratch/empty.c" -o "$scratch/empty" 2>/dev/null && $2 "$scratch/empty" 2>/dev/null
    status=$?
    rm -rf "$scratch"
    return $status
}

mkdir -p "$build" || exit 1
if prepare gcc gcc -Dcuda=disabled; then
    suites gcc 'compile unit property programs weights simt fake net'
    [ $quick = 1 ] || suites gcc 'mutants bench'
fi

if [ $quick = 0 ]; then
    # gcc took the widest vectors that this machine has. Where these are AVX-512's, AVX2 is clang's.
    simd=auto
    ! grep -q avx512f /proc/cpuinfo 2>/dev/null || simd=avx2
    targets=host_programs
    if command -v clang >/dev/null 2>&1 && prepare clang clang -Dcuda=disabled -Dsimd=$simd; then
        suites clang 'unit programs'
    fi
    # The kernels without vector instructions of their own, and the product by a BLAS through the same table entry.
    targets='test_simd_lanes test_attn test_attn_masks test_gemm test_rows test_train_ops test_tile test_layer'
    if prepare portable gcc -Dcuda=disabled -Dsimd=portable; then suites portable kernels; fi
    targets='test_gemm compare train logits'
    if has openblas && prepare cblas gcc -Dcuda=disabled -Dcblas=enabled; then suites cblas products; fi
    targets=
    # Kernels for devices: compiled for all of them, linked, and run where there is one (bench/gpu.py measures).
    if ! command -v nvcc >/dev/null 2>&1 && [ ! -x /usr/local/cuda/bin/nvcc ]; then
        echo "left out: the build for CUDA devices, as nvcc is missing"
    else
        targets=device_programs
        if prepare cuda gcc -Dcuda=enabled; then suites cuda device; fi
        targets=
    fi
    # What slows programs down takes fewer random cases.
    UPIPE_DRAWS=$draws_slow
    export UPIPE_DRAWS
    # The kernels without vectors, and with those of another processor.
    targets='test_simd_lanes test_attn test_gemm test_rows test_train_ops'
    if prepare scalar gcc -Dcuda=disabled -Dexamples=disabled -Dsimd=scalar; then suites scalar lanes; fi
    if command -v aarch64-linux-gnu-gcc >/dev/null 2>&1 && command -v qemu-aarch64 >/dev/null 2>&1 &&
        prepare neon gcc --cross-file "$top/tests/aarch64.txt" -Dcuda=disabled -Dmpi=disabled -Dexamples=disabled; then
        suites neon lanes --timeout-multiplier 4
    fi
    targets=
    # valgrind knows AVX2, but not AVX-512.
    checked=gcc
    [ $simd = auto ] || checked=clang
    if ! valgrind --quiet true >/dev/null 2>&1; then
        echo "left out: valgrind, as it does not start here"
    elif [ -f "$build/$checked/build.ninja" ]; then
        suites $checked memcheck --setup valgrind
    else
        echo "left out: valgrind, as there is no build for it"
    fi

    # Warnings are the plain builds' business: instrumented code draws false ones.
    slow='-Dcuda=disabled -Dwerror=false -Doptimization=1'
    UPIPE_FUZZ_SECONDS=${UPIPE_FUZZ_SECONDS:-60}
    export UPIPE_FUZZ_SECONDS
    # shellcheck disable=SC2086 # a list of words
    if ! runs_with -fsanitize=address,undefined ''; then
        echo "left out: AddressSanitizer, as its programs do not start here"
    elif prepare asan gcc $slow -Db_sanitize=address,undefined -Dc_args=-fno-sanitize-recover=all; then
        suites asan 'unit property programs simt fake' --timeout-multiplier 4
    fi
    wrapper=
    runs_with -fsanitize=thread '' || wrapper='setarch -R'
    # shellcheck disable=SC2086
    if ! runs_with -fsanitize=thread "$wrapper"; then
        echo "left out: ThreadSanitizer, as its programs do not start here"
    else
        targets='test_comm test_a2a test_attn test_gemm test_rows test_train_ops test_fpdt test_side_stream'
        targets="$targets test_property test_checkpoint test_llama"
        if prepare tsan gcc $slow -Dexamples=disabled -Db_sanitize=thread; then
            suites tsan threads --timeout-multiplier 4 ${wrapper:+--wrapper "$wrapper"}
        fi
    fi
fi

[ $skipped = 0 ] || echo "$skipped skipped"
echo "all in $(($(date +%s) - began)) s"
echo "$passed passed, $failed failed"
[ $failed = 0 ] && [ $passed != 0 ]
