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
# An upgrade from an archive with the next version.
NEXT='-o Dir::Etc::sourcelist=/packages/next.list -o Dir::Etc::sourceparts=- -o Dir::State::lists=/tmp/lists'
upgrade() { apt $NEXT update && apt $NEXT upgrade; }
versions() { dpkg-query -W -f '${db:Status-Abbrev}${Version}\n' holdfast-agent holdfast-sdp | sort -u; }
is() { [ "$1" = "$2" ] || { echo "$1 instead of $2"; return 1; }; }
fails() { ! "$@"; }
finish() {
    word=ok
    [ "$failed" = 0 ] || word=FAILED
    echo "test result: $word. $passed passed; $failed failed; 0 ignored"
    exit "$failed"
}
