#!/bin/sh
# run.sh TOP -- builds and runs the consumer in every way: Meson's subproject, installed (Meson, pkg-config, CMake), CMake's
# add_subdirectory, FetchContent and install, a copied folder. The version is the same in all of them. CC names the compiler.
set -eu

top=$(cd "$1" && pwd)
here=$top/tests/consumer
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
CC=${CC:-cc}
CMAKE_GENERATOR=Ninja # as Meson's: a machine need not have make
export CC CMAKE_GENERATOR
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
    cp "$here/meson.build" "$here/CMakeLists.txt" "$here/main.c" "$here/step.c" "$here/step.h" "$scratch/$1"
}

host subproject
cp -R "$here/subprojects" "$scratch/subproject"
mkdir "$scratch/subproject/subprojects/upipe"
(cd "$top" && cp -R meson.build meson_options.txt LICENSE cmake upipe tests examples "$scratch/subproject/subprojects/upipe")
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
for file in $(cd "$top" && find upipe -type f); do
    quiet cmp "$top/$file" "$scratch/prefix/include/$file"
done
PKG_CONFIG_PATH=$scratch/prefix/share/pkgconfig
export PKG_CONFIG_PATH
host installed
quiet meson setup "$scratch/installed/build" "$scratch/installed"
quiet meson compile -C "$scratch/installed/build"
quiet "$scratch/installed/build/consumer"
echo "installed, Meson: $(cat "$scratch/said")"
version=$(pkg-config --modversion upipe)
# shellcheck disable=SC2046,SC2086 # lists of words
quiet $CC -std=c11 "-DPACKAGE_VERSION=\"$version\"" $(pkg-config --cflags upipe) "$here/main.c" "$here/step.c" -o "$scratch/plain" $(pkg-config --libs upipe)
quiet "$scratch/plain"
echo "installed, pkg-config: $(cat "$scratch/said")"

# with_cmake NAME WORDS FLAG...: the consumer with CMake
with_cmake() {
    name=$1 words=$2
    shift 2
    host "$name"
    quiet cmake -S "$scratch/$name" -B "$scratch/$name/build" "$@"
    quiet cmake --build "$scratch/$name/build"
    quiet "$scratch/$name/build/consumer"
    echo "$words: $(cat "$scratch/said")"
}

if command -v cmake >/dev/null 2>&1; then
    with_cmake found "installed by Meson, find_package" "-DCMAKE_PREFIX_PATH=$scratch/prefix"
    with_cmake subdirectory "add_subdirectory" "-DUPIPE=$top"
    tar -cf "$scratch/upipe.tar" -C "$top" CMakeLists.txt LICENSE cmake upipe
    with_cmake fetched "FetchContent" "-DUPIPE=$scratch/upipe.tar"
    quiet cmake -S "$top" -B "$scratch/cmake"
    quiet cmake --install "$scratch/cmake" --prefix "$scratch/moved"
    mv "$scratch/moved" "$scratch/installed by cmake"
    with_cmake found_again "installed by CMake and moved, find_package" "-DCMAKE_PREFIX_PATH=$scratch/installed by cmake"
    host other
    sed -i.bak 's/upipe 0\.1 /upipe 0.9 /' "$scratch/other/CMakeLists.txt"
    if cmake -S "$scratch/other" -B "$scratch/other/build" "-DCMAKE_PREFIX_PATH=$scratch/prefix" >"$scratch/said" 2>&1; then
        echo "consumer: find_package took another version than it asked for"
        exit 1
    fi
else
    echo "left out: CMake, which is not installed"
fi

mkdir "$scratch/copied"
cp -R "$top/upipe" "$scratch/copied"
# shellcheck disable=SC2086 # a list of words
quiet $CC -std=c11 -I "$scratch/copied" "$here/main.c" "$here/step.c" -o "$scratch/copied/consumer" -lm -pthread
quiet "$scratch/copied/consumer"
echo "a copied folder: $(cat "$scratch/said")"

for place in CITATION.cff:"^version: $version\$" CHANGELOG.md:"^## $version"; do
    grep -q "${place#*:}" "$top/${place%%:*}" || {
        echo "consumer: ${place%%:*} does not name version $version"
        exit 1
    }
done
