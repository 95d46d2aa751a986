#!/usr/bin/env bash
# install_chromium.sh: a browser in which the tests look at the page that `etc-ctl report` writes, unless one is there. Where
# it cannot be had those tests are skipped and say so; nothing else needs it.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium && exit 0
fi
echo "make setup: no Chromium; tests that look at pages will be skipped" >&2
