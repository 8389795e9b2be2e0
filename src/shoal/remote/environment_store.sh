# Keeps environments in a directory of a host.
#
#   read_names DIRECTORY             the JSON of every name, one per line
#   write_name DIRECTORY NAME        makes a name stand for an environment, whose JSON comes by standard input
#   write_link LINK ID               makes LINK lead to the environment beside it
#   remove_name DIRECTORY NAME       forgets a name
#   inspect PATH USE ARCHIVE         what a node has of an environment; USE `yes`: a job is about to use it
#   unpack PATH ARCHIVE              unpacks a copy; ARCHIVE `-` is standard input
#   list DIRECTORY                   its environments: id, seconds since the last use, number of uses by processes
#   remove DIRECTORY ID...           removes environments
#   sweep DIRECTORY SOURCES IDS      removes caches and archives of all but these
query='import sys; print("%d.%d" % sys.version_info[:2])'

# Every directory and link on the way belongs to root or to this user: what somebody else put there instead does not.
check_path() {
    place=$1
    while [ "$place" != / ]; do
        owner=$(stat -c %u "$place")  # of a link, not of what it leads to
        [ "$owner" = 0 ] || [ "$owner" = "$(id -u)" ] || {
            echo "$place belongs to $(stat -c %U "$place"), who could change what jobs run from it" >&2
            exit 1
        }
        place=$(dirname "$place")
    done
}

read_names() {
    cd "$1/names" 2> /dev/null || exit 0
    check_path "$1/names"
    check_path "$(pwd -P)"
    cat ./*.json 2> /dev/null || true
}

write_name() {
    set -eu
    cat > "$1/names/.$2.new"
    chmod 644 "$1/names/.$2.new"
    mv -f "$1/names/.$2.new" "$1/names/$2.json"
}

# By a rename: there is no moment without the link.
write_link() {
    set -eu
    if [ -e "$1" ] && [ ! -L "$1" ]; then
        echo "$1 exists and is no link" >&2
        exit 1
    fi
    new=$(dirname "$1")/.$(basename "$1").link
    ln -sfn "$2" "$new"
    mv -fT "$new" "$1"
}

remove_name() {
    set -eu
    rm -f "$1/names/$2.json"
    [ ! -L "$1/$2" ] || rm -f "$1/$2"
}

inspect() {
    path=$1 touch=$2
    if [ ! -e "$path/@MARK@" ]; then
        echo env missing
    else
        [ "$touch" = no ] || touch -c "$path/@MARK@" 2> /dev/null
        if output=$("$path/bin/python" -I -S -c "$query" 2>&1); then echo env "$output"; else
            echo env broken
            echo why "$(echo "$output" | tail -n 1)"
        fi
    fi
    [ ! -e "$3" ] || echo archive
    [ "$touch" = yes ] || driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -n 1)
    [ -z "${driver:-}" ] || echo driver "$driver"
}

# Unpacks next to its path and renames it, after removing what a killed run left. Where this host has the Python at
# another path than the host that built it, the copy's links are changed.
unpack() {
    set -eu
    path=$1 archive=$2
    place=$(dirname "$path")
    new=$place/.$(basename "$path").new.$$
    mkdir -p "$place"
    rm -rf "$place/.$(basename "$path").new."*
    mkdir "$new"
    trap 'rm -rf "$new"' EXIT
    if [ "$archive" = - ]; then tar -x -f - -C "$new"; else tar -x -f "$archive" -C "$new"; fi
    cd "$new/$(basename "$path")"
    version=$(sed -n 's/^version\(_info\)\? = \([0-9]*\.[0-9]*\).*/\2/p' pyvenv.cfg)
    other=$(PATH=$PATH:/usr/local/bin:/opt/conda/bin command -v "python$version") || other=
    if ! has_version bin/python && has_version "$other"; then
        for link in bin/python*; do
            case $(readlink "$link") in /*) ln -sfn "$other" "$link" ;; esac
        done
        sed -i "s|^home = .*|home = $(dirname "$other")|" pyvenv.cfg
    fi
    rm -rf "$path"
    mv -T "$PWD" "$path"
}

has_version() { [ "$("$1" -I -S -c "$query" 2> /dev/null)" = "$version" ]; }

list() {
    for mark in "$1"/*/@MARK@; do
        path=${mark%/@MARK@}
        [ ! -L "$path" ] || continue  # a name
        stamp=$(stat -c %Y "$mark" 2> /dev/null) || continue  # removed meanwhile
        age=$(($(date +%s) - stamp))
        # By a variable: as an argument, this awk would match itself.
        busy=$(cat /proc/[0-9]*/maps /proc/[0-9]*/cmdline 2> /dev/null | tr '\0' '\n' |
            inside="$path/" awk 'index($0, ENVIRON["inside"]) { n++ } END { print n + 0 }')
        echo "${path##*/} $age $busy"
    done
}

# The mark first: what a killed run leaves does not count.
remove() {
    set -eu
    directory=$1
    shift
    for id in "$@"; do
        rm -f "$directory/$id/@MARK@"
        rm -rf "${directory:?}/$id" "$directory/archives/$id.tar"
    done
    find "$directory" -maxdepth 1 -xtype l -delete  # names that lead nowhere any more
}

sweep() {
    set -eu
    cd "$1/wheels" 2> /dev/null || exit 0
    exec 9> ../.lock
    flock -n 9 || exit 0  # a build uses them
    keep_only ../wheels "$2"
    keep_only ../archives "$3"
}

keep_only() {
    for path in "$1"/*; do
        name=${path##*/}
        case " $2 " in *" ${name%.tar} "*) continue ;; esac
        rm -rf "$path"
    done
}

"$@"
