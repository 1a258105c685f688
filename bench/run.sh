#!/bin/sh
# run.sh -- a Python with what a benchmark needs, and then the benchmark
set -u

top=$(cd "$(dirname "$0")/.." && pwd) || exit 1
build=$top/build/bench
venv=$build/venv

# Everyone's large arrays in huge pages, where the system has them for who asks: glibc does then, and so does PyTorch's
# allocator.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
export THP_MEM_ALLOC_ENABLE="${THP_MEM_ALLOC_ENABLE:-1}"

commands() {
    for name in attn masks gemm ops block methods latent linear states accuracy step paper measured; do
        [ ! -f "$top/bench/$name.py" ] || printf ' %s' "$name"
    done
}

usage() {
    cat <<END_OF_USAGE
usage: sh bench/run.sh COMMAND [--quick] [--peers LIST] [--json FILE] [FLAG...]

Measures the CPU kernels, methods of context parallelism, and a training step, on this machine. COMMAND is one of
   $(commands)
Each compiles with \$CC (gcc) what it measures, \$CFLAGS after its own flags, validates it in double precision, and prints
rates or times and their ratios to those of its peers in the same run; numbers are left as JSON lines, and a chart
beside them.
COMMAND --help lists its flags. bench/compare.py compares two files of numbers.

What peers need comes from PyPI into build/bench/venv, which may be deleted at any time (PyTorch with what it links to
is some 6 GB). A peer that cannot be installed is left out, and that is said. --peers none installs nothing where
a Python with NumPy is there.
END_OF_USAGE
}

die() {
    echo "run.sh: $*" >&2
    exit 1
}

refuse() {
    echo "run.sh: $* (sh bench/run.sh --help lists the commands)" >&2
    exit 2
}

[ $# -gt 0 ] || refuse "no command"
case $1 in
--help | -h)
    usage
    exit 0
    ;;
esac
command=$1
shift
case " $(commands) " in
*" $command "*) ;;
*) refuse "there is no command $command" ;;
esac
script=$top/bench/$command.py
command -v python3 >/dev/null 2>&1 || die "there is no python3"
for option in "$@"; do
    case $option in
    --help | -h) exec python3 "$script" --help ;;
    esac
done
# Wrong usage ends here, before anything is installed.
needs=$(python3 "$script" --needs "$@") || exit

# install WORD...: packages into the environment, or the sources of one (NAME:source) into build/bench/NAME. Those that
# came once are not asked for again.
install() {
    for package in "$@"; do
        stamp=$venv/installed-$package
        [ ! -e "$stamp" ] || continue
        echo "run.sh: installing $package into build/bench" >&2
        case $package in
        *:source)
            name=${package%:source}
            rm -rf "${build:?}/$name"
            "$venv/bin/pip" download -q --no-deps --no-binary :all: -d "$build/$name" "$name" >&2 || return 1
            tar -xzf "$build/$name"/*.tar.gz -C "$build/$name" --strip-components=1 || return 1
            ;;
        *) "$venv/bin/pip" install -q "$package" >&2 || return 1 ;;
        esac
        : >"$stamp"
    done
}

# start FLAG...: the benchmark, with a Python that is here and has NumPy: Debian's, where another one without it comes
# first in PATH. Returns if there is none.
start() {
    for modules in 'numpy, matplotlib' numpy; do
        for python in "$venv/bin/python" python3 /usr/bin/python3; do
            ! "$python" -c "import $modules" >/dev/null 2>&1 || exec "$python" "$script" "$@"
        done
    done
}

[ -n "$needs" ] || start "$@"
mkdir -p "$build" || exit 1
# Made anew where it is incomplete or the tree has moved: it keeps absolute paths.
if ! "$venv/bin/pip" --version >/dev/null 2>&1; then
    rm -rf "$venv"
    python3 -m venv "$venv" >&2 || die "python3 -m venv failed (Debian and Ubuntu: python3-venv)"
fi
if ! install numpy matplotlib; then
    echo "run.sh: NumPy could not be installed from PyPI: going on with a Python that is here" >&2
    start "$@"
    die "no python3 here has NumPy"
fi
for package in $needs; do
    install "$package" || echo "run.sh: $package could not be installed: what needs it is left out" >&2
done
exec "$venv/bin/python" "$script" "$@"
