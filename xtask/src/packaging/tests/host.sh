# On a host with systemd as process 1: units, an upgrade under load, the watchdog, and a purge. Arguments:
# the directories with the packages of one version and of the next, and traffic.py.
. "$(dirname "$0")/checks.sh"
# How many times slower than this a machine may be.
factor=${TIME_FACTOR:-1}
# Repeats a command until it succeeds.
await() {
    for _ in $(seq $((120 * factor))); do
        "$@" > /tmp/await 2>&1 && return 0
        sleep 0.25
    done
    cat /tmp/await
    return 1
}
property() { systemctl show --value -p "$1" "$2"; }
units='holdfast-agent.service holdfast-sdp@a.service holdfast-sdp@b.service'

# On a machine systemd does that at boot; systemd-nspawn does not.
mountpoint -q /sys/fs/bpf || { mkdir -p /sys/fs/bpf && mount -t bpf bpf /sys/fs/bpf; }

# A namespace behind an interface of the host, with the host's address there, and its own addresses.
behind() {
    namespace=$1 interface=$2 gateway=$3
    shift 3
    ip netns add "$namespace"
    ip link add "$interface" type veth peer name eth0 netns "$namespace"
    ip link set "$interface" up
    ip addr add "$gateway/24" dev "$interface"
    ip -n "$namespace" link set lo up
    ip -n "$namespace" link set eth0 up
    for address in "$@"; do
        ip -n "$namespace" addr add "$address/24" dev eth0
    done
    ip -n "$namespace" route add default via "$gateway"
}
# A container, and a world with a server that it may reach, and one that it may not.
behind pod lxc1 10.88.0.1 10.88.0.11
behind world up1 192.0.2.1 192.0.2.10 192.0.2.12
sysctl -q -w net.ipv4.ip_forward=1
for server in 10 12; do
    ip netns exec world python3 "$3" serve 192.0.2.$server &
done
reaches() { ip netns exec pod python3 -c "import socket; socket.create_connection(('$1', 80), 2 * $factor)"; }
check 'without Holdfast the container reaches every server' await reaches 192.0.2.12

check 'apt installs both packages from an archive' from first install holdfast-agent holdfast-sdp
for unit in $units; do
    check "$unit is active" await systemctl is-active "$unit"
    check "$unit is ready by its own report" sh -c "systemctl show -p StatusText $unit | grep -qE 'endpoints|serves'"
    check "$unit is enabled" systemctl is-enabled "$unit"
done
[ "$failed" = 0 ] || { journalctl --no-pager -n 100 -u 'holdfast-*'; finish; }
check 'the agent is ordered before containers' sh -c 'systemctl show -p Before holdfast-agent | grep docker.service | grep -q kubelet.service'
cat > /etc/holdfast/endpoints/pod.yaml << 'ENDPOINT'
netns: pod
ifname: eth0
labels: ["k8s:app=web", "k8s:io.kubernetes.pod.namespace=default"]
ENDPOINT
cat > /etc/holdfast/policies/web.yaml << 'POLICY'
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toCIDR: ["192.0.2.10/32"]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchPattern: "*.example.org"}]}
  - toFQDNs: [{matchPattern: "*.example.org"}]
    toPorts:
    - ports: [{port: "80", protocol: TCP}]
POLICY
closed() { ! reaches 192.0.2.12; }
check 'policy and endpoint of /etc/holdfast are in force' await closed
traffic=$3
load() { ip netns exec pod python3 "$traffic" load 192.0.2.10 "$@" > /tmp/load 2>&1; }
load 1
check 'a name is answered, and its address opens' grep -q 'connection alive' /tmp/load

pids() { for unit in $units; do property MainPID "$unit"; done; }
before=$(pids)
# Traffic while commands run. Arguments: what is to lose nothing.
begin() {
    rm -f /tmp/end
    load $((120 * factor)) /tmp/end &
    load=$!
    sleep $factor
}
end() {
    sleep $factor
    touch /tmp/end
    wait "$load"
    cat /tmp/load
    check "$1 lost no query" grep -q ' lost 0 ' /tmp/load
    check "$1 left the open connection alive" grep -q 'connection alive' /tmp/load
    check "the other server is closed after $1" closed
}
begin
check 'apt upgrade under load' from next upgrade
for unit in $units; do
    check "$unit is active after the upgrade" systemctl is-active "$unit"
done
changed=$(printf '%s\n' "$before" "$(pids)" | sort | uniq -d)
check 'each process is a new one' test -z "$changed"
end 'the upgrade by apt'

variant broken "$2"/holdfast-sdp_*.deb 9 'exit 1'
worked=$(dpkg-deb -f "$2"/holdfast-sdp_*.deb Version)
other=$(property MainPID holdfast-sdp@b)
state() { dpkg-query -W -f '${db:Status-Abbrev}' holdfast-sdp; }
serves_on() { is "$(property MainPID holdfast-sdp@b)" "$other" && systemctl is-active holdfast-sdp@b; }
begin
check 'dpkg -i of a version that does not start fails' fails dpkg -i /tmp/broken/*.deb
dpkg --configure holdfast-sdp > /tmp/said 2>&1
check 'another attempt to configure it fails' is "$?" 1
for text in 'holdfast-sdp@a.service did not' 'systemctl status holdfast-sdp@a' 'journalctl -u holdfast-sdp@a' "again: $worked"; do
    check "it says $text" sh -c 'grep -F -- "$0" /tmp/said || { cat /tmp/said; exit 1; }' "$text"
done
check 'dpkg shows that it is not configured' is "$(state)" 'iF '
check 'the other proxy is the one from before' serves_on
check 'dpkg -i goes back to the version that worked' dpkg -i "$2"/holdfast-sdp_*.deb
for unit in $units; do
    check "$unit is active after that" systemctl is-active "$unit"
done
variant broken "$2"/holdfast-agent_*.deb 9 'exit 1'
check 'dpkg -i of an agent that does not start fails' fails dpkg -i /tmp/broken/holdfast-agent_*.deb
check 'policy stays in force without it' closed
check 'dpkg -i goes back to the agent that worked' dpkg -i "$2"/holdfast-agent_*.deb
check 'that agent is active' systemctl is-active holdfast-agent
end 'a version that does not start'

for unit in holdfast-agent.service holdfast-sdp@.service; do
    mkdir -p "/run/systemd/system/$unit.d"
    printf '[Service]\nWatchdogSec=%s\n' $((3 * factor)) > "/run/systemd/system/$unit.d/test.conf"
done
systemctl daemon-reload
check 'all units restart' systemctl restart $units
before=$(pids)
kill -STOP $before
another() {
    [ "$(property NRestarts "$1")" -ge 1 ] && systemctl is-active "$1" && ! echo "$before" | grep -qx "$(property MainPID "$1")"
}
for unit in $units; do
    check "$unit is started again when it hangs" await another "$unit"
done
load 2
check 'names are answered after that' grep -q ' lost 0 ' /tmp/load
check 'the other server is closed after that' closed

rm -rf /run/systemd/system/holdfast-*
systemctl daemon-reload
check 'netpol run starts in the place of the agent' systemctl start holdfast-netpol.service
check 'it reports that policies are in force' await sh -c 'systemctl show -p StatusText holdfast-netpol | grep -q "are in force"'
check 'the agent has ended' fails systemctl is-active holdfast-agent.service
check 'the agent starts in the place of netpol run' systemctl start holdfast-agent.service
check 'netpol run has ended' fails systemctl is-active holdfast-netpol.service
rm -rf /var/lib/holdfast/netpol
mkdir -p /srv/others /var/lib/holdfast/netpol
echo own > /srv/others/file
mount --bind /srv/others /var/lib/holdfast/netpol
check 'apt purges' apt purge holdfast-agent holdfast-sdp
check 'what was mounted in the place of its state stays' ls /srv/others/file
umount /var/lib/holdfast/netpol
rmdir --parents --ignore-fail-on-non-empty /var/lib/holdfast/netpol
check 'the container is open' await reaches 192.0.2.12
check 'no unit is left' sh -c "! systemctl list-units --all --plain --no-legend 'holdfast-*' | grep -v not-found"
check 'no file is left' sh -c '! find /etc/holdfast /var/lib/holdfast /run/holdfast /sys/fs/bpf -mindepth 0 -name "*holdfast*" -o -name "hf_*" -o -name "cilium_*" 2> /dev/null | grep .'
check 'no user is left' sh -c '! id holdfast-sdp'
check 'no table is left' is "$(nft list tables)" ''
check 'no rule is left' sh -c '! ip rule | grep 2004'
[ "$failed" = 0 ] || journalctl --no-pager -n 200 -u 'holdfast-*'
finish
