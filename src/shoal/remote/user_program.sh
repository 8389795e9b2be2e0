# user_program.sh PLACE ARCHIVE fits|other PROGRAM REQUIREMENT...: installs Shoal for users. Its mark comes last.
# Without a package index, a host that needs one gets no Shoal, and a file that says why.
set -eu
place=$1 archive=$2 kind=$3 program=$4
shift 4
failed="$(dirname "$place")/failed"
umask 022
rm -rf "$place" "$failed"
mkdir -p "$place"
tar -xzf "$archive" -C "$place" --no-same-owner
# Also writes bytecode: users cannot, and each command would compile what it loads.
try() { /usr/bin/python3 -I "$place/load.py" > "$place/.try" 2>&1; }
if [ "$kind" != fits ] || ! try; then
    rm -rf "$place/packages"
    if ! { /usr/bin/python3 -m venv "$place/venv" \
        && "$place/venv/bin/pip" install --disable-pip-version-check --no-input --no-cache-dir --quiet --retries 1 \
            --timeout 20 --target "$place/packages" "$@"; } > "$place/.try" 2>&1 || ! try; then
        tail -n 1 "$place/.try" > "$failed"
        rm -rf "$place"
        exit 0
    fi
    rm -rf "$place/venv"
fi
# The tree that commands still run from stays until the next change.
for old in "$(dirname "$place")"/shoal-*; do
    [ "$old" = "$place" ] || grep -qsF "$old/" "$program" || rm -rf "$old"
done
for old in "$(dirname "$place")"/*.tgz; do
    [ "$old" = "$archive" ] || rm -f "$old"
done
touch "$place/.complete"
