#!/bin/sh
# Make the environment in which `make bench` runs varlen beside its peers, apart from varlen's own: torch first,
# so that its CPU build is taken where one is offered, then the peers. Quick when there is nothing to do.
set -eu
python=${1:?"usage: benchmarks/setup_peers.sh PYTHON FOLDER"}
venv=${2:?"usage: benchmarks/setup_peers.sh PYTHON FOLDER"}
cd "$(dirname "$0")"

stamp="$venv/peers-ready"
wanted=$(cat peers.txt peers-alone.txt setup_peers.sh | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$venv/bin/python" -c "" 2>/dev/null; then
    exit 0
fi
if [ -d "$venv" ] && [ -n "$(ls -A "$venv")" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
    echo "varlen: $venv holds something else than a Python environment; name another folder" >&2
    exit 1
fi

echo "varlen: making an environment for the peers in $venv; the first time this downloads about 500 MB" >&2
"$python" -m venv --clear "$venv"
install() {
    PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install --quiet --only-binary :all: "$@"
}
install torch==2.13.0
install -r peers.txt
install --no-deps -r peers-alone.txt
echo "$wanted" >"$stamp"
