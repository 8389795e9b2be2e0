# Unpacks the archive of Slurm beside its place and renames it, so that the place is complete or absent.
set -eu
prefix=$1 archive=$2 digest=$3
echo "$digest  $archive" | sha256sum --check --quiet
fresh=$(mktemp -d "${prefix%/*}/.unpack.XXXXXX")
trap 'rm -rf "$fresh"' EXIT
tar -xzf "$archive" -C "$fresh" --no-same-owner
tree=$fresh/${prefix##*/}
echo "$digest" >"$tree/.complete"
chmod 755 "$tree"
# Another build of the same number: running programs keep the files that they have open.
[ ! -e "$prefix" ] || mv "$prefix" "$fresh/old"
mv "$tree" "$prefix"
rm -f "$archive"
