# Deletes directories. What is mounted there is not the package's, also if it is a directory of the same file system.
delete() {
    for dir; do
        # A link is deleted, and what it leads to is not. Links above it count: mounts are listed by where they are.
        place=$(readlink -f -- "${dir%/*}") || continue
        place=$place/${dir##*/}
        case $place in
            *[!A-Za-z0-9/._-]*) continue ;;
        esac
        ! grep -qs "^[^ ]* [^ ]* [^ ]* [^ ]* $place[/ ]" /proc/self/mountinfo || continue
        rm -rf --preserve-root=all --one-file-system "$dir" || true
    done
}
