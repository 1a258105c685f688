# shellcheck shell=sh disable=SC2154 # the scripts set top
# install.sh -- what examples/run.sh and tests/run.sh share: how long a command may be silent, how fast this machine is, and
# what is missing here. They set $top, the tree.

began=$(date +%s)
install=yes # --no-install says no

trap '[ -z "${ticker:-}" ] || kill -9 $ticker 2>/dev/null' EXIT
trap 'exit 1' HUP INT TERM

# quietly WHAT COMMAND...: its output goes to build/run.log; says every nine seconds that it goes on
quietly() {
    what=$1
    shift
    mkdir -p "$top/build" || exit 1
    # a sleep that outlives its loop must not keep a reader of this output waiting
    (while sleep 9 >/dev/null 2>&1; do echo "[$(($(date +%s) - began)) s] $what"; done) &
    ticker=$!
    "$@" >"$top/build/run.log" 2>&1
    status=$?
    kill -9 $ticker 2>/dev/null # any other signal is lost where the loop has just begun and still has the traps above
    wait $ticker 2>/dev/null
    [ $status = 0 ] || cat "$top/build/run.log" >&2
    return $status
}

# slowness: what a loop of the shell takes here, in hundredths of the 0.125 s of one core of an Intel Xeon (family 6, model
# 207), where the seconds were measured that the scripts know; 100 where that cannot be told
slowness() {
    least=
    for _ in 1 2 3; do # what else runs here makes one longer, never shorter
        # shellcheck disable=SC2016 # for the shell that is timed
        user=$(sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done; times' 2>/dev/null)
        user=${user%%s *}s # the first word, 0m0.260000s
        user=${user#*m}
        hundredths=${user#*.}00
        hundredths=$((${user%%.*} * 100 + 1${hundredths%"${hundredths#??}"} - 100))
        [ -n "$least" ] && [ "$least" -le $hundredths ] || least=$hundredths
    done 2>/dev/null
    [ "${least:-0}" -gt 0 ] && echo $((least * 8)) || echo 100
}

# cores: those of this machine
cores() {
    nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1
}

# has NAME: whether it is here. Some are no programs: modules of any Python here, pip, and libraries.
has() {
    case $1 in
    matplotlib | numpy) python3 -c "import $1" || /usr/bin/python3 -c "import $1" ;;
    jansson | libcrypto | openblas) pkg-config --exists "$1" ;;
    pip) python3 -m pip --version ;;
    venv) python3 -m ensurepip --version ;;
    Python.h) test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ;;
    *) command -v "$1" ;;
    esac >/dev/null 2>&1
}

# missing LIST: of entries NAME:PACKAGE,PACKAGE those whose name is not here
missing() {
    for entry in $1; do
        has "${entry%%:*}" || printf '%s ' "$entry"
    done
}

names() {
    for entry in $1; do printf '%s ' "${entry%%:*}"; done
}

# install_missing LIST: shows what is missing and the line that installs it, asks a terminal, and runs the line
install_missing() {
    lacking=$(missing "$1")
    [ -n "$lacking" ] || return 0
    root=
    [ "$(id -u)" = 0 ] || root='sudo '
    line="${root}apt-get update -q; ${root}env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends"
    line="$line $(for entry in $lacking; do printf '%s ' "${entry#*:}"; done | tr ',' ' ')"
    printf 'missing: %s\nThis line installs it on Debian and Ubuntu:\n    %s\n' "$(names "$lacking")" "$line"
    command -v apt-get >/dev/null 2>&1 && { [ -z "$root" ] || command -v sudo >/dev/null 2>&1; } || return 0
    if [ $install = yes ] && [ -t 0 ] && [ -t 1 ]; then
        printf 'Run it now? [Y/n] '
        read -r answer || answer=no
        case $answer in
        '' | [yY]*) ;;
        *) install=no ;;
        esac
    fi
    [ $install = yes ] || return 0
    echo "installing with apt-get"
    quietly installing sh -c "$line" && echo "installed in $(($(date +%s) - began)) s"
}
