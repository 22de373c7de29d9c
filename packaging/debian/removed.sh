# What postrm does for both packages. Arguments: dpkg's, then lists of units, settings files, and directories.
removed() {
    case $1 in
        remove | purge) ;;
        *) return 0 ;;
    esac
    rm -f "/run/$DPKG_MAINTSCRIPT_PACKAGE.start"
    [ ! -d /run/systemd/system ] || systemctl --system daemon-reload || true
    [ "$1" = purge ] || return 0
    for unit in $2; do
        rm -f /etc/systemd/system/*/$unit
    done
    for name in $3; do
        rm -f "/etc/holdfast/$name" "/etc/holdfast/$name.new" "/var/lib/holdfast/settings/$name"
    done
    delete $4
    for dir in /etc/holdfast /var/lib/holdfast/settings /var/lib/holdfast /run/holdfast; do
        rmdir "$dir" 2> /dev/null || true
    done
}
