# Both programs start, and a pod is put under policy. Ends with a status other than 0 if not.
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
holdfast-sdp --agent-address unix:///run/holdfast/sdp.sock --name a > /tmp/sdp.log 2>&1 &
await holdfast-sdp status || failed=1
holdfast-sdp status
bpftool prog list | grep -E ' name (from_pod|to_pod|steer|to_proxy|closed) '
grep -hE 'WARN|ERROR' /tmp/agent.log /tmp/sdp.log
if [ "$failed" != 0 ]; then
    tail -n 40 /tmp/agent.log /tmp/sdp.log
fi
exit "$failed"
