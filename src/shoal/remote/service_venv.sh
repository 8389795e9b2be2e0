# service_venv.sh PLACE PACKAGE...: installs packages in a venv. Its mark comes last.
set -eu
place=$1
shift
rm -rf "$place"
mkdir -p "$(dirname "$place")"
python3 -m venv "$place"
"$place/bin/pip" install --disable-pip-version-check --no-input --no-cache-dir --quiet "$@"
touch "$place/.complete"
