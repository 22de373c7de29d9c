# In a clean root of Debian without a running systemd: the packages are installed, upgraded and purged.
# Arguments: the directories with the packages of one version and of the next.
. "$(dirname "$0")/checks.sh"
first=$(dpkg-deb -f "$1"/holdfast-agent_*.deb Version)
next=$(dpkg-deb -f "$2"/holdfast-agent_*.deb Version)

# Every file with its owner, mode and sum, without the records of dpkg and others.
contents() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /run -o -path /var/lib/dpkg -o -path /var/lib/apt \
        -o -path /var/log -o -path /var/cache -o -path /var/lib/systemd -o -path /packages -o -path '/etc/*-' \) -prune -o -type f \
        -printf '%p %m %u %g\n' -exec sha256sum {} +
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /run -o -path /var/lib/apt -o -path /packages \) -prune \
        -o ! -type f -printf '%p %y %m %u %g %l\n'
}
absent() { ! ls -d "$@"; }

# The root has neither systemd nor other packages that they depend on.
check 'systemd is not there' fails dpkg -s systemd
check 'apt install installs both packages with their dependencies' apt --no-install-recommends install "$1"/*.deb
check 'no dependency is left open' apt-get check
check 'apt purge removes both packages' apt purge holdfast-agent holdfast-sdp
apt --no-install-recommends install bash-completion man-db passwd systemd > /dev/null

contents | sort > /tmp/before
check 'dpkg -i installs both packages' dpkg -i "$1"/*.deb
for program in holdfast-agent holdfast-sdp; do
    check "$program --version" sh -c "$program --version | grep -q '^$program [0-9]'"
    check "man page of $program" sh -c "man -w $program | grep -q man1/$program.1.gz"
    check "dpkg -V $program" is "$(dpkg -V $program)" ''
    check "completions of $program" ls /usr/share/bash-completion/completions/$program \
        /usr/share/zsh/vendor-completions/_$program /usr/share/fish/vendor_completions.d/$program.fish
    check "licences and SBOM of $program" ls /usr/share/doc/$program/copyright /usr/share/doc/$program/third-party.txt \
        /usr/share/sbom/$program.spdx.json
    check "libraries of $program" sh -c "! ldd /usr/bin/$program | grep 'not found'"
done
check 'man page of a subcommand' sh -c 'man holdfast-agent-endpoint-add | grep -q -- --netns'
check 'the user of the proxies' is "$(id -u holdfast-sdp):$(id -g holdfast-sdp)" 10094:10094
for unit in holdfast-agent.service holdfast-sdp@a.service holdfast-sdp@b.service; do
    check "$unit is enabled" systemctl is-enabled "$unit"
done
check 'holdfast-netpol.service is not enabled' is "$(systemctl is-enabled holdfast-netpol.service)" disabled
for unit in holdfast-agent.service holdfast-netpol.service holdfast-sdp@.service; do
    check "$unit is valid" is "$(systemd-analyze verify "/usr/lib/systemd/system/$unit" 2>&1)" ''
done
# What does not exist is refused after the settings were read.
check 'agent.yaml is accepted' sh -c \
    'holdfast-agent run --config /etc/holdfast/agent.yaml --metrics-address off --policy-dir /nowhere 2>&1 | grep -q /nowhere'
check 'the hook of podman is installed' test -s /usr/share/containers/oci/hooks.d/holdfast.json
check 'netpol.yaml is accepted' sh -c \
    'holdfast-agent netpol run --config /etc/holdfast/netpol.yaml --policy-dir /nowhere 2>&1 | grep -q /nowhere'

echo 'kind: List' > /etc/holdfast/policies/own.yaml
echo '# changed' >> /etc/holdfast/sdp.yaml
cp /etc/holdfast/netpol.yaml /srv/own.yaml
ln -sf /srv/own.yaml /etc/holdfast/netpol.yaml
check 'apt upgrade asks nothing' from next upgrade
check 'the version is the next one' is "$(versions)" "ii $next"
check 'changed settings stay' is "$(tail -n 1 /etc/holdfast/sdp.yaml)" '# changed'
check 'settings that are a link stay' sh -c 'test -L /etc/holdfast/netpol.yaml && ! grep -q "of the next version" /srv/own.yaml'
check 'unchanged settings are those of the next version' cmp /etc/holdfast/agent.yaml /usr/share/holdfast/agent.yaml
check 'policies stay' ls /etc/holdfast/policies/own.yaml
rm /etc/holdfast/agent.yaml
check 'dpkg -i goes back to the first version' dpkg -i "$1"/*.deb
check 'the version is the first one' is "$(versions)" "ii $first"
check 'deleted settings stay away' absent /etc/holdfast/agent.yaml
check 'dpkg -r removes' dpkg -r holdfast-agent holdfast-sdp
check 'settings stay until purge' ls /etc/holdfast/sdp.yaml /etc/holdfast/policies/own.yaml
check 'dpkg -P purges' dpkg -P holdfast-agent holdfast-sdp
rm /srv/own.yaml
contents | sort > /tmp/after
check 'nothing is left' diff /tmp/before /tmp/after

# Ends dpkg, and the script that it runs, before a line of the script.
die='kill -9 $PPID $$'
# Each place of a script at which a command may begin. Arguments: a script.
places() {
    for line in $(seq 2 "$(wc -l < "$1")"); do
        sed "${line}i$die" "$1" | sh -n 2> /dev/null && echo "$line"
    done
}
# Is interrupted at each place of a script of the installed version, or of the next one that is unpacked.
# Arguments: package, script, and the command that runs it.
interrupted() {
    script=/var/lib/dpkg/info/$1.$2
    cp "$script" /tmp/script
    count=0
    for line in $(places /tmp/script); do
        sed "${line}i$die" /tmp/script > "$script"
        ${@:3} > /dev/null 2>&1
        [ ! -e "$script" ] || cp /tmp/script "$script"
        # dpkg asks for the package again if it was about to replace it.
        dpkg --configure -a > /dev/null 2>&1 || ${@:3} > /dev/null || { echo "$2 line $line"; return 1; }
        count=$((count + 1))
    done
    echo "$count"
    [ "$count" -gt 3 ]
}
upgraded() {
    dpkg -i "$1"/*.deb > /dev/null 2>&1 && is "$(versions)" "ii $2" && cmp /etc/holdfast/agent.yaml /usr/share/holdfast/agent.yaml &&
        cmp /etc/holdfast/sdp.yaml /usr/share/holdfast/sdp.yaml
}
# What the scripts do does not depend on the programs: small ones are unpacked faster.
for package in holdfast-agent holdfast-sdp; do
    variant 0 "$1/${package}"_*.deb "$first" true
    variant 1 "$2/${package}"_*.deb "$next" true
done
check 'the proxy is installed without the agent' dpkg -i /tmp/0/holdfast-sdp_*.deb
check 'it has its settings' cmp /etc/holdfast/sdp.yaml /usr/share/holdfast/sdp.yaml
for package in holdfast-agent holdfast-sdp; do
    dpkg -i /tmp/0/*.deb > /dev/null 2>&1
    dpkg --unpack "/tmp/1/${package}"_*.deb > /dev/null 2>&1
    check "$package survives an end within postinst" interrupted "$package" postinst sh -c \
        "dpkg --unpack /tmp/1/${package}_*.deb; dpkg --configure $package"
    check "$package survives an end within prerm of an upgrade" interrupted "$package" prerm dpkg -i "/tmp/0/${package}"_*.deb
    check "$package survives an end within postrm of an upgrade" interrupted "$package" postrm dpkg -i "/tmp/1/${package}"_*.deb
    check "$package is complete after that" upgraded "$2" "$next"
done
check 'an archive that is cut is refused' fails sh -c "head -c 3000000 $1/holdfast-agent_*.deb > /tmp/cut.deb && dpkg -i /tmp/cut.deb"
check 'the version before it works' sh -c 'dpkg --configure -a && dpkg -V holdfast-agent && holdfast-agent --version'

# What others have on the host.
mkdir -p /srv/policies
echo 'kind: List' > /srv/policies/own.yaml
mount --bind /srv/policies /etc/holdfast/policies
check 'dpkg -P purges around a file system that is mounted' dpkg -P holdfast-agent holdfast-sdp
check 'its files stay' ls /srv/policies/own.yaml
umount /etc/holdfast/policies
rm -r /srv/policies /etc/holdfast
mkdir -p /srv/state/agent /srv/others
echo own > /srv/others/file
ln -s /srv/state /var/lib/holdfast
mount --bind /srv/others /srv/state/agent
check 'dpkg -i installs with a link in the place of its state' dpkg -i /tmp/0/*.deb
check 'dpkg -P purges around what is mounted behind the link' dpkg -P holdfast-agent holdfast-sdp
check 'its files stay as well' ls /srv/others/file
umount /srv/state/agent
rm -r /srv/state /srv/others /var/lib/holdfast
contents | sort > /tmp/after
check 'nothing else is left' diff /tmp/before /tmp/after
useradd -u 10094 other
check 'dpkg -i installs beside a user with their number' dpkg -i "$1"/*.deb
check 'the proxies are not started as that user' fails systemctl is-enabled holdfast-sdp@a
check 'dpkg -P purges' dpkg -P holdfast-agent holdfast-sdp
check 'that user stays' id other
userdel other
useradd -u 10095 holdfast-sdp
check 'dpkg -i installs beside a user with their name' dpkg -i /tmp/0/*.deb
check 'dpkg -P purges' dpkg -P holdfast-agent holdfast-sdp
check 'the user with their name stays' id holdfast-sdp
userdel holdfast-sdp

mkdir -p /var/lib/holdfast
mount -t tmpfs -o size=64k full /var/lib/holdfast
dd if=/dev/zero of=/var/lib/holdfast/full bs=64k count=1 2> /dev/null
check 'dpkg -i installs without room for state' dpkg -i "$1"/*.deb
check 'dpkg -i upgrades without room for state' dpkg -i "$2"/*.deb
check 'dpkg -P purges without room for state' dpkg -P holdfast-agent holdfast-sdp
umount /var/lib/holdfast
rmdir /var/lib/holdfast
umask 077
check 'dpkg -i installs with a strict umask' dpkg -i "$1"/*.deb
check 'others may read settings' is "$(stat -c %a /etc/holdfast /etc/holdfast/agent.yaml /usr/bin/holdfast-agent | tr '\n' ' ')" '755 644 755 '
finish
