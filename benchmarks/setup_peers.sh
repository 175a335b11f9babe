#!/bin/sh
# Make .venv-peers, the environment in which `make bench` runs varlen beside its peers; again only after the
# lists of versions have changed. PYTHON names the interpreter to use.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-peers
lists="benchmarks/peers.txt benchmarks/peers-alone.txt benchmarks/setup_peers.sh"
made_of=$(cat $lists | cksum)
if [ -f "$venv/made-of" ] && [ "$(cat "$venv/made-of")" = "$made_of" ]; then
    exit 0
fi
"${PYTHON:-python3}" -m venv --clear "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check install --quiet"
echo "installing torch (CPU build where offered), then the peers: a few minutes"
$pip torch==2.13.0
$pip -r benchmarks/peers.txt
$pip --no-deps -r benchmarks/peers-alone.txt
echo "$made_of" > "$venv/made-of"
