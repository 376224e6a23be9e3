#!/usr/bin/env bash
# Real hosts on this machine (namespaces, an sshd in each, pdsh), to try a cluster on and to break it. Needs root.
#
#   scripts/playground.sh up 3 --slots 2          node-0, node-1, node-2, and a hostfile
#   scripts/playground.sh run -- llmscale launch --hostfile /var/tmp/llmscale-playground/hostfile -- --steps 50 ...
#   scripts/playground.sh off node-1              cut its power; `on` switches it on again
#   scripts/playground.sh cut node-2              pull its network cable; `mend` plugs it in
#   scripts/playground.sh down                    nothing is left
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/playground/main.py" "$@"
