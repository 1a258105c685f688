#!/bin/sh
# run.sh -- installs what is missing and runs the tests (run.py). Ends with a line "N passed, N failed".
set -u

top=$(cd "$(dirname "$0")/.." && pwd) || exit 1
. "$top/examples/common/install.sh"

usage() {
    cat <<'END_OF_USAGE'
usage: sh tests/run.sh [--full | --all] [--only NAME...] [--list] [--no-install]

Without an option: every primitive, method and program, the CUDA kernels on the emulator, MPI, and the sanitizers on what
matters most; ten to fifteen minutes on two cores, with what it installs and builds. A first line says how long it takes here.
Builds are kept in build/. The last line is the verdict, "N passed, N failed"; the exit status is zero if nothing failed and
something ran.

On Debian and Ubuntu missing programs are installed with apt-get (through sudo if you are not root). A terminal is asked
first, with the line that does it. After a no the tests that need a missing program are left out; if all of them need
it, the run ends with status 1.

  --full          all suites: other compilers and instructions, valgrind, the sanitizers on everything, planted bugs,
                  real weights, two versions of PyTorch, more random draws; up to 80 minutes
  --all           the same with every planted bug and ten times the draws; hours
  --only NAME...  these alone: suites (unit), tests (ring), builds (asan), tests of a build (asan/ring), functions of a
                  test (gcc/train:lora,adapter)
  --list          the tests that these options choose, with the seconds that each took last, and no run
  --no-install    the same as a no: says what is missing and the line that installs it, and installs nothing
  --help          this text

UPIPE_SEED says where random draws start, UPIPE_DRAWS their exact number; without it each test draws for some seconds,
and says how far it came (docs/testing.md). Published weights are fetched into UPIPE_CACHE (build/cache), and the full run
installs PyTorch from PyPI in build/torch, twice 5.3 GB.
END_OF_USAGE
}

full=0
for option in "$@"; do
    shift
    case $option in
    --full | --all) full=1 ;;
    --no-install)
        install=no
        continue
        ;;
    --only | --list) ;;
    --help | -h)
        usage
        exit 0
        ;;
    --quick)
        echo "--quick is gone: sh tests/run.sh without options is the ordinary run" >&2
        exit 2
        ;;
    -*)
        echo "run.sh: '$option' is no option (sh tests/run.sh --help)" >&2
        exit 2
        ;;
    esac
    set -- "$@" "$option"
done

# program:packages. The first list must be there; what only the others need is left out, and said, without it.
required='gcc:gcc,libc6-dev g++:g++ meson:meson ninja:ninja-build pkg-config:pkg-config python3:python3 numpy:python3-numpy jansson:libjansson-dev'
wanted='mpirun:openmpi-bin,libopenmpi-dev cmake:cmake libcrypto:libssl-dev'
if [ $full = 1 ]; then
    wanted="$wanted mpirun.mpich:mpich,libmpich-dev clang:clang,libclang-rt-dev valgrind:valgrind,libc6-dbg openblas:libopenblas-dev pip:python3-pip venv:python3-venv Python.h:python3-dev"
    # A machine of that kind runs NEON anyway.
    [ "$(uname -m)" = aarch64 ] ||
        wanted="$wanted aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu,libc6-dev-arm64-cross qemu-aarch64:qemu-user"
fi

install_missing "$required $wanted"
lacking=$(missing "$required")
if [ -n "$lacking" ]; then
    echo "all tests need: $(names "$lacking")" >&2
    echo "0 passed, 1 failed"
    exit 1
fi
lacking=$(missing "$wanted")
[ -z "$lacking" ] || echo "left out, as the programs are missing: $(names "$lacking")"

UPIPE_INSTALL=$install UPIPE_RUN_BEGAN=$began UPIPE_SLOWNESS=$(slowness) exec python3 "$top/tests/run.py" "$@"
