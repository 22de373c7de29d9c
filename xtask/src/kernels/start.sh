# Second part of a guest's start. Its root is the machine's, under a file system in memory.
set -u
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /disk
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 disk /disk
mkdir -p /run/netns /lib/modules/{version}
mount --bind {modules} /lib/modules/{version}
export PATH={programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOLDFAST_BIN_DIR={programs} HOLDFAST_DISK=/disk
export HOME=/root TERM=dumb NO_COLOR=1 HOLDFAST_KERNEL={version} HOLDFAST_TIME_FACTOR={factor}
ulimit -n 20000
modprobe -a tun br_netfilter
ip link set lo up
stty raw -echo -F /dev/ttyS1
bash /run/guest/script {args} > /dev/ttyS1 2>&1 < /dev/null
status=$?
# The script may leave the guest to another system, which then reports the status.
[ "$status" = 0 ] && [ -e /run/guest/next ] && exec bash /run/guest/next
echo "guest: status $status" > /dev/ttyS1
sync
echo o > /proc/sysrq-trigger
sleep 60
