# Settings files are no conffiles: no upgrade asks about them, and none loses what an administrator wrote.
# One that is as a package wrote it is replaced. One that was changed, deleted or linked stays.
settings() {
    file=/etc/holdfast/$1 shipped=/usr/share/holdfast/$1 written=/var/lib/holdfast/settings/$1
    install -d -m 0755 /etc/holdfast
    if [ ! -L "$file" ] && { [ ! -e "$file" ] && [ ! -e "$written" ] || cmp -s "$written" "$file"; }; then
        install -m 0644 "$shipped" "$file.new"
        mv "$file.new" "$file"
    elif ! cmp -s "$shipped" "$file" && ! cmp -s "$shipped" "$written"; then
        echo "$file stays as it is; $shipped has the settings of this version" >&2
    fi
    install -d -m 0755 /var/lib/holdfast /var/lib/holdfast/settings && install -m 0644 "$shipped" "$written" || true
}
