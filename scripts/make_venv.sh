#!/usr/bin/env bash
# make_venv.sh PYTHON FOLDER: a virtual environment, once; Debian keeps the module for it in a package of its own.
set -euo pipefail
python=$1 folder=$2

[[ -x $folder/bin/pip ]] && exit 0
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
        echo "make setup: $python has no venv module; install it (Debian: apt-get install python3-venv)" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv
fi
"$python" -m venv "$folder"
