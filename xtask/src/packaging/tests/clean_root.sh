# In a clean root of Debian without a running systemd: the packages are installed, upgraded and purged.
# Arguments: the directories with the packages of one version and of the next.
. "$(dirname "$0")/checks.sh"

# Every file with its owner, mode and sum, without the records of dpkg and others.
contents() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /run -o -path /var/lib/dpkg -o -path /var/log \
        -o -path /var/cache -o -path /var/lib/systemd -o -path "$1" -o -path "$2" -o -path '/etc/*-' \) -prune -o -type f \
        -printf '%p %m %u %g ' -exec sha256sum {} \; | cut -d' ' -f1-5
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /run -o -path "$1" -o -path "$2" \) -prune -o ! -type f \
        -printf '%p %y %m %u %g %l\n'
}
is() { [ "$1" = "$2" ] || { echo "$1"; return 1; }; }
absent() { ! ls -d "$@"; }

contents "$1" "$2" | sort > /tmp/before
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
    check "$unit is valid" systemd-analyze verify "/usr/lib/systemd/system/$(echo "$unit" | sed 's/@[ab]/@/')"
done
# What does not exist is refused after the settings were read.
check 'agent.yaml is accepted' sh -c \
    'holdfast-agent run --config /etc/holdfast/agent.yaml --metrics-address off --policy-dir /nowhere 2>&1 | grep -q /nowhere'

echo 'kind: List' > /etc/holdfast/policies/own.yaml
echo '# changed' >> /etc/holdfast/sdp.yaml
check 'dpkg -i upgrades' dpkg -i "$2"/*.deb
check 'the version is the next one' sh -c 'dpkg-query -W holdfast-agent holdfast-sdp | grep -c +next | grep -qx 2'
check 'changed settings and policies stay' grep -q changed /etc/holdfast/sdp.yaml
check 'policies stay' ls /etc/holdfast/policies/own.yaml
check 'dpkg -r removes' dpkg -r holdfast-agent holdfast-sdp
check 'settings stay until purge' ls /etc/holdfast/sdp.yaml /etc/holdfast/policies/own.yaml
check 'dpkg -P purges' dpkg -P holdfast-agent holdfast-sdp
contents "$1" "$2" | sort > /tmp/after
check 'nothing is left' diff /tmp/before /tmp/after
finish
