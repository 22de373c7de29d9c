# Prints the remedy and succeeds, if systemd refuses the units because of AssertPathIsMountPoint. Arguments: a unit.
unmounted() {
    ! mountpoint -q /sys/fs/bpf || return 1
    echo "$DPKG_MAINTSCRIPT_PACKAGE: systemd does not start $1: no file system is mounted at /sys/fs/bpf, where eBPF programs" >&2
    echo "$DPKG_MAINTSCRIPT_PACKAGE: and maps are pinned. To mount it:  mount -t bpf bpf /sys/fs/bpf" >&2
    echo "$DPKG_MAINTSCRIPT_PACKAGE: Then start the unit:               systemctl start $1" >&2
}
