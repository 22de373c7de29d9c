#!/bin/busybox sh
# First part of a guest's start: the machine's root, read-only, under a file system in memory.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module"; done < /modules/order
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 root /lower
mount -t tmpfs -o size=60% memory /memory
mkdir /memory/upper /memory/work
mount -t overlay -o lowerdir=/lower,upperdir=/memory/upper,workdir=/memory/work overlay /system
mount -t tmpfs run /system/run
mkdir /system/run/guest
cp /start /script /system/run/guest/
exec switch_root /system /bin/bash /run/guest/start
