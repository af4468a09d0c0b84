#!/usr/bin/env bash
# Start and stop a Ray cluster by hand, over SSH, on machines that have turngate[ray] in the same folder:
#
#     deploy/ssh/cluster.sh start HEAD NODE …      prints the address for `turngate batch --ray`
#     deploy/ssh/cluster.sh add HEAD NODE …        add nodes to a running cluster, also while a batch runs
#     deploy/ssh/cluster.sh drain HEAD NODE        give a node no more rollouts; its running ones have an hour to end
#     deploy/ssh/cluster.sh stop HEAD NODE …
#
# HEAD and NODE are names for ssh, such as `gpu1` or `user@10.0.0.7`. Run it on HEAD, or from a machine that reaches all of them.
#
#     VENV             the Python environment on all machines; default: /opt/turngate
#     RAY_TOKEN_FILE   the cluster's token on this machine, made if it is missing; default: ~/.config/turngate/ray-token
#     TURNGATE_SLOTS   rollouts at the same time on each node; default: one per CPU
#     PORT             of Ray on HEAD; default: 6379
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//' >&2; exit 2; }
action=$1 head=$2
shift 2
VENV=${VENV:-/opt/turngate} PORT=${PORT:-6379}
token=${RAY_TOKEN_FILE:-$HOME/.config/turngate/ray-token}
if [ "$action" = start ] && [ ! -e "$token" ]; then
    (umask 077; mkdir -p "$(dirname "$token")"; openssl rand -hex 32 > "$token")
fi

# The token travels on stdin, not as an argument, which other users of a machine could read.
on() { # on MACHINE COMMAND
    local machine=$1; shift
    # shellcheck disable=SC2029  # the command is expanded here on purpose
    ssh -o BatchMode=yes "$machine" "umask 077; mkdir -p ~/.ray && cat > ~/.ray/auth_token && export RAY_AUTH_MODE=token && $*" < "$token"
}
slots=
[ -z "${TURNGATE_SLOTS:-}" ] || slots="--resources '{\"turngate_slots\": $TURNGATE_SLOTS}'"
start="$VENV/bin/ray start --disable-usage-stats $slots"
address() { ssh -o BatchMode=yes "$head" "hostname -I" | awk -v port="$PORT" '{print $1 ":" port}'; }

case $action in
start)
    on "$head" "$start --head --port $PORT --include-dashboard false --node-name ${head#*@}"
    for node in "$@"; do on "$node" "$start --address $(address) --node-name ${node#*@}"; done
    echo "turngate batch --ray $(address) …" ;;
add)
    for node in "$@"; do on "$node" "$start --address $(address) --node-name ${node#*@}"; done ;;
drain)
    find="import ray; ray.init(address='auto', logging_level='ERROR')"
    find="$find; print(next(node['NodeID'] for node in ray.nodes() if node['Alive'] and node['NodeName'] == '${1#*@}'))"
    id=$(on "$head" "$VENV/bin/python -c \"$find\"")
    on "$head" "$VENV/bin/ray drain-node --address $(address) --node-id $id --reason DRAIN_NODE_REASON_PREEMPTION \\
        --reason-message 'drained by hand' --deadline-remaining-seconds 3600" ;;
stop)
    for node in "$@" "$head"; do on "$node" "$VENV/bin/ray stop"; done ;;
*)
    echo "unknown action $action: use start, add, drain or stop" >&2; exit 2 ;;
esac
