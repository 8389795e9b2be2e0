# Unpacks the archive of Slurm, its input, beside its place and renames it, so that the place is complete or absent.
set -eu
prefix=$1 digest=$2
fresh=$(mktemp -d "${prefix%/*}/.unpack.XXXXXX")
trap 'rm -rf "$fresh"' EXIT
tar -xz -C "$fresh" --no-same-owner
tree=$fresh/${prefix##*/}
echo "$digest" >"$tree/.complete"
chmod 755 "$tree"
# Another build of the same number: running programs keep the files that they have open.
[ ! -e "$prefix" ] || mv "$prefix" "$fresh/old"
mv "$tree" "$prefix"
