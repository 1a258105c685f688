#!/bin/sh
# run.sh TOP -- builds and runs the consumer three ways: subproject, installed, copied folder. CC names the compiler.
set -eu

top=$(cd "$1" && pwd)
here=$top/tests/consumer
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
CC=${CC:-cc}
export CC
unset DESTDIR MESON_ARGS CFLAGS CPPFLAGS LDFLAGS

# Runs a command quietly; where it fails, says what it printed.
quiet() {
    "$@" >"$scratch/said" 2>&1 || {
        echo "consumer: failed: $*"
        cat "$scratch/said"
        exit 1
    }
}

host() {
    mkdir -p "$scratch/$1"
    cp "$here/meson.build" "$here/main.c" "$here/step.c" "$here/step.h" "$scratch/$1"
}

host subproject
cp -R "$here/subprojects" "$scratch/subproject"
mkdir "$scratch/subproject/subprojects/upipe"
(cd "$top" && cp -R meson.build meson_options.txt LICENSE upipe tests examples "$scratch/subproject/subprojects/upipe")
quiet meson setup "$scratch/subproject/build" "$scratch/subproject" --wrap-mode=nodownload
quiet meson compile -C "$scratch/subproject/build"
quiet "$scratch/subproject/build/consumer"
if meson introspect --tests "$scratch/subproject/build" | grep -q '"name": "layers"'; then
    echo "consumer: the subproject brought its tests along"
    exit 1
fi
echo "as a subproject: $(cat "$scratch/said")"

quiet meson setup "$scratch/library" "$top" --prefix="$scratch/prefix" -Dtests=disabled -Dexamples=disabled
quiet meson install -C "$scratch/library"
for header in $(cd "$top" && find upipe -name '*.h'); do
    quiet cmp "$top/$header" "$scratch/prefix/include/$header"
done
PKG_CONFIG_PATH=$scratch/prefix/share/pkgconfig
export PKG_CONFIG_PATH
host installed
quiet meson setup "$scratch/installed/build" "$scratch/installed"
quiet meson compile -C "$scratch/installed/build"
quiet "$scratch/installed/build/consumer"
echo "installed, Meson: $(cat "$scratch/said")"
# shellcheck disable=SC2046,SC2086 # lists of words
quiet $CC -std=c11 $(pkg-config --cflags upipe) "$here/main.c" "$here/step.c" -o "$scratch/plain" $(pkg-config --libs upipe)
quiet "$scratch/plain"
echo "installed, pkg-config: $(cat "$scratch/said")"

mkdir "$scratch/copied"
cp -R "$top/upipe" "$scratch/copied"
# shellcheck disable=SC2086 # a list of words
quiet $CC -std=c11 -I "$scratch/copied" "$here/main.c" "$here/step.c" -o "$scratch/copied/consumer" -lm -pthread
quiet "$scratch/copied/consumer"
echo "a copied folder: $(cat "$scratch/said")"
