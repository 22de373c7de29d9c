# Leaves a guest to a root of Debian in memory, whose systemd becomes process 1. Argument: the root's archive.
set -e
mkdir -p /mnt/host
mount -t tmpfs -o size=75% host /mnt/host
tar --extract --file "$1" --directory /mnt/host
modules=lib/modules/$HOLDFAST_KERNEL
mkdir -p "/mnt/host/$modules"
mount --bind "/$modules" "/mnt/host/$modules"
# That systemd mounts its own.
umount /sys/fs/bpf /sys/fs/cgroup
umount --lazy /tmp
echo 'exec switch_root /mnt/host /sbin/init' > /run/guest/next
