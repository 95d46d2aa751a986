#!/usr/bin/env bash
# install_deploy_tools.sh: what the tests of deploy/ run beside etc-run: promtool, tini, and Slurm's daemons. Each may be
# missing: its tests are then skipped and say so. None of the services is started.
set -euo pipefail

have_all() { for tool in promtool tini slurmctld slurmd sbatch; do PATH=$PATH:/usr/sbin command -v "$tool" >/dev/null || return 1; done; }

have_all && exit 0
if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
    apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends prometheus tini slurmctld slurmd slurm-client && exit 0
fi
echo "no promtool, tini or Slurm from Debian's packages; some tests of deploy/ will be skipped" >&2
