#!/usr/bin/env bash
# Make real hosts on this machine (namespaces, each with an sshd, pdsh) to try and break a cluster. Needs root.
#
#   scripts/playground.sh up 3 --slots 2          node-0, node-1, node-2, and a hostfile
#   scripts/playground.sh run -- llmscale launch --hostfile /var/tmp/llmscale-playground/hostfile -- --steps 50 ...
#   scripts/playground.sh off node-1              cut its power; `on` restores it
#   scripts/playground.sh cut node-2              unplug its network cable; `mend` plugs it in
#   scripts/playground.sh down                    remove everything
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/playground/main.py" "$@"
