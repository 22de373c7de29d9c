# Both programs start, and a pod under policy reaches the server that it may reach, and no other. Ends
# with a status other than 0 if not.
set -u
uname -r
mkdir -p /tmp/policies
ip netns add pod
ip link add lxc1 type veth peer name eth0 netns pod
ip link set lxc1 up
ip addr add 10.88.0.1/32 dev lo
ip route add 10.88.0.11/32 dev lxc1
ip -n pod addr add 10.88.0.11/32 dev eth0
ip -n pod link set eth0 up
ip -n pod route add default dev eth0
ip -n pod neigh add 10.88.0.1 lladdr "$(cat /sys/class/net/lxc1/address)" dev eth0
for server in 10 12; do
    ip -n pod neigh add "192.0.2.$server" lladdr "$(cat /sys/class/net/lxc1/address)" dev eth0
done
ip netns add world
ip link add up1 type veth peer name eth0 netns world
ip addr add 192.0.2.1/24 dev up1
ip link set up1 up
ip -n world addr add 192.0.2.10/24 dev eth0
ip -n world addr add 192.0.2.12/24 dev eth0
ip -n world link set eth0 up
ip netns exec world nft -f - << 'RULES'
table ip seen {
    counter allowed { }
    counter denied { }
    chain input {
        type filter hook prerouting priority 0
        ip saddr 10.88.0.11 ip daddr 192.0.2.10 counter name allowed
        ip saddr 10.88.0.11 ip daddr 192.0.2.12 counter name denied
    }
}
RULES
sysctl -q -w net.ipv4.ip_forward=1
cat > /tmp/policies/web.yaml << 'POLICY'
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toCIDR: ["192.0.2.10/32"]
POLICY

# Repeats a command until it succeeds, for 60 seconds at most.
await() {
    for _ in $(seq 120); do
        "$@" > /tmp/await 2>&1 && return 0
        sleep 0.5
    done
    echo "not within 60 s: $*"
    cat /tmp/await
    return 1
}

failed=0
holdfast-agent run --policy-dir /tmp/policies --state-dir /tmp/state > /tmp/agent.log 2>&1 &
await holdfast-agent status || failed=1
holdfast-agent endpoint add --netns pod --ifname eth0 --labels k8s:app=web || failed=1
holdfast-agent status || failed=1

# One packet to each server; the allowed one has arrived.
sent() {
    ip netns exec pod bash -c 'for server in 12 10; do echo x > /dev/udp/192.0.2.$server/9; done'
    ip netns exec world nft list counter ip seen allowed | grep -q 'packets [1-9]'
}
await sent || failed=1
ip netns exec world nft list counters | tee /tmp/seen
grep -A1 'counter denied' /tmp/seen | grep -q 'packets 0 ' || { echo 'a forbidden packet arrived'; failed=1; }
holdfast-sdp --agent-address unix:///run/holdfast/sdp.sock --state-dir /tmp/state --name a > /tmp/sdp.log 2>&1 &
await holdfast-sdp status || failed=1
holdfast-sdp status
bpftool prog list | grep -E ' name (from_pod|to_pod|steer|to_proxy|closed) '
grep -hE 'WARN|ERROR' /tmp/agent.log /tmp/sdp.log
if [ "$failed" != 0 ]; then
    tail -n 40 /tmp/agent.log /tmp/sdp.log
fi
exit "$failed"
