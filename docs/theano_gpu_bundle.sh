#!/usr/bin/env bash
# Pack Theano 1.0.5 with pygpu for a Debian 12 machine (x86-64) with NVIDIA GPUs and CUDA 12 or 13, or install both there.
#
#   bash theano_gpu_bundle.sh pack FOLDER      on a Debian 12 machine with a network: fetch all that is needed
#   bash theano_gpu_bundle.sh install FOLDER   on the GPU machine, without a network: make FOLDER/env of it
#   . FOLDER/env/gpu.sh                        in each shell there; then `python my_script.py`
#
# Needed on both: Python 3.11 with venv, apt-get and dpkg; on the GPU machine g++, CUDA and NCCL. No root.
set -euo pipefail

fail() { echo "theano_gpu_bundle.sh: $1" >&2; exit 1; }

# Debian's: libgpuarray with its headers, and pygpu, which is built for Python 3.11.
DEBS=(libgpuarray3 libgpuarray-dev python3-pygpu)
# NumPy 1.23 is the newest that Theano knows; Mako makes pygpu's kernels; the last line is what Synkhronos needs on GPUs.
# Synkhronos itself comes from the folder above this one.
PACKAGES=("numpy==1.23.5" "scipy<1.12" "Theano==1.0.5" "Lasagne==0.1" "setuptools<60" wheel mako six pytest hypothesis
    threadpoolctl tqdm cloudpickle
    nccl4py cuda-core cuda-bindings cuda-pathfinder nvidia-ml-py)

pack() {
    mkdir -p "$1/debs" "$1/wheels"
    (cd "$1/debs" && apt-get -qq download "${DEBS[@]}") || fail "apt-get could not fetch ${DEBS[*]}: run apt-get update"
    local pip
    pip=$(mktemp -d)
    python3.11 -m venv "$pip"
    # Theano and Lasagne may come as sources: wheels are made of them here, where there is a compiler.
    local quiet=(-q --disable-pip-version-check)
    "$pip/bin/pip" wheel "${quiet[@]}" -w "$1/wheels" "${PACKAGES[@]}" &&
        "$pip/bin/pip" wheel "${quiet[@]}" --no-deps -w "$1/wheels" "$(dirname "${BASH_SOURCE[0]}")/.." ||
        fail "pip could not fetch the packages; its messages are above"
    rm -rf "$pip"
    cp "${BASH_SOURCE[0]}" "$1/"
    du -sh "$1"
}

# The newest library of a name on this machine.
newest() {
    { ldconfig -p | sed -n 's/.*=> //p' | grep "/$1" || true
      find /usr /opt -name "$1*" -path '*lib*' 2>/dev/null || true; } | sort -V | tail -n 1
}

install() {
    [ -d "$1/debs" ] && [ -d "$1/wheels" ] || fail "$1 holds no debs and wheels: run pack first"
    local env=$1/env site name found
    python3.11 -m venv --clear "$env"
    "$env/bin/pip" install -q --disable-pip-version-check --no-index --no-deps "$1"/wheels/*.whl
    for deb in "$1"/debs/*.deb; do dpkg -x "$deb" "$env/debian"; done
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    ln -sfn "$env/debian/usr/lib/python3/dist-packages/pygpu" "$site/pygpu"
    mkdir -p "$env/cuda"
    # libgpuarray opens the first two by these very names; the packages for NCCL look for the third.
    for name in libnvrtc.so libcublas.so libnccl.so.2; do
        found=$(newest "$name")
        if [ -z "$found" ]; then
            echo "theano_gpu_bundle.sh: no $name under /usr and /opt: link it into $env/cuda before GPUs are used" >&2
            continue
        fi
        ln -sfn "$found" "$env/cuda/$name"
        # What lies beside it, such as libnvrtc-builtins and libcublasLt, is found by the full name.
        for beside in "$(dirname "$found")/${name%%.so*}"*.so.*; do ln -sfn "$beside" "$env/cuda/"; done
    done
    cat > "$env/gpu.sh" <<ACTIVATE
. "$env/bin/activate"
export LD_LIBRARY_PATH="$env/cuda:$env/debian/usr/lib/x86_64-linux-gnu:$env/debian/usr/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
export CPATH="$env/debian/usr/include\${CPATH:+:\$CPATH}" LIBRARY_PATH="$env/debian/usr/lib/x86_64-linux-gnu:$env/debian/usr/lib"
export THEANO_FLAGS="\${THEANO_FLAGS:-blas.ldflags=,device=cpu,force_device=True,floatX=float32,dnn.enabled=False}"
ACTIVATE
    # Its library is found, and it is the one that this Python and this NumPy can load.
    (. "$env/gpu.sh" && python -c 'import pygpu, theano; print("pygpu", pygpu.__version__, "and Theano", theano.__version__)')
}

[ $# -eq 2 ] || fail "expected pack FOLDER or install FOLDER"
command -v python3.11 > /dev/null || fail "python3.11 was not found"
mkdir -p "$2"
folder=$(cd "$2" && pwd)
case $1 in
    pack) pack "$folder" ;;
    install) install "$folder" ;;
    *) fail "expected pack or install, got $1" ;;
esac
