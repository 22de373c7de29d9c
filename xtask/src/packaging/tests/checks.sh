# Checks, counted as the test harness of Rust prints them.
set -u
passed=0
failed=0
check() {
    name=$1
    shift
    if output=$("$@" 2>&1); then
        echo "test $name ... ok"
        passed=$((passed + 1))
    else
        echo "$output"
        echo "test $name ... FAILED"
        failed=$((failed + 1))
    fi
}
# As an administrator's script would call it: nobody answers a question.
apt() { DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Dpkg::Use-Pty=0 "$@" < /dev/null; }
# apt with an archive that has one version. Arguments: first or next, and a command.
from() {
    archive="-o Dir::Etc::sourcelist=/packages/$1.list -o Dir::Etc::sourceparts=- -o Dir::State::lists=/tmp/lists.$1"
    mkdir -p "/tmp/lists.$1/partial"
    shift
    apt $archive update && apt $archive --no-install-recommends "$@"
}
versions() { dpkg-query -W -f '${db:Status-Abbrev}${Version}\n' holdfast-agent holdfast-sdp | sort -u; }
is() { [ "$1" = "$2" ] || { echo "$1 instead of $2"; return 1; }; }
fails() { ! "$@"; }
# A copy of a package in /tmp/NAME with another version and programs. Arguments: name, package, version, and a script.
variant() {
    dpkg-deb -R "$2" /tmp/variant
    sed -i "s/^Version: .*/Version: $3/" /tmp/variant/DEBIAN/control
    for program in /tmp/variant/usr/bin/*; do
        printf '#!/bin/sh\n%s\n' "$4" > "$program"
    done
    mkdir -p "/tmp/$1"
    dpkg-deb -Znone --root-owner-group -b /tmp/variant "/tmp/$1" > /dev/null
    rm -r /tmp/variant
}
finish() {
    word=ok
    [ "$failed" = 0 ] || word=FAILED
    echo "test result: $word. $passed passed; $failed failed; 0 ignored"
    exit "$failed"
}
