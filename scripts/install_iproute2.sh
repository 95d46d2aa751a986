#!/usr/bin/env bash
# install_iproute2.sh: `ip`, with which the scenario tests make networks of their own, unless it is there. Where it cannot
# be had those tests are skipped and say so; nothing else needs it.
set -euo pipefail

command -v ip >/dev/null && exit 0
if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iproute2 && exit 0
fi
echo "make setup: no iproute2; tests that cut networks will be skipped" >&2
