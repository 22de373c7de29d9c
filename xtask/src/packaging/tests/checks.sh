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
finish() {
    word=ok
    [ "$failed" = 0 ] || word=FAILED
    echo "test result: $word. $passed passed; $failed failed; 0 ignored"
    exit "$failed"
}
