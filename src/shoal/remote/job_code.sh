# Keeps the code of jobs in the jobs' directory of a host.
#
#   inspect ROOT CODE RUNTIME              which storage this is, and what is there already
#   inspect_directory ROOT                 the same of a directory for jobs whose code is elsewhere; who root is there
#   store PLACE BYTES                      a file from standard input
#   unpack PLACE                           an archive from standard input
#   clean_code ROOT NEWEST DAYS USED       removes archives that no job has used for long
#   clean_trees ROOT NEWEST DAYS USED      removes the files that were sent from the trees of ended jobs
set -eu

# Makes the directories. What is there is touched, under the lock that `clean_code` holds
# too: it has just been used, and stays. Root is going to write and delete in `code` and `lib`, and jobs run from there:
# each directory on the way is root's, and one that others may write to has the sticky bit, as /tmp has.
inspect() {
    root=$1 code=$2 lib=$3
    make_directory
    [ -d "$root/code" ] && [ -d "$root/lib" ] || mkdir -p "$root/code" "$root/lib"
    for place in "$root/code" "$root/lib"; do
        [ ! -L "$place" ] && is_ours "$place" || fail "$place is a link, or does not belong to root"
    done
    print_id
    [ ! -e "$root/.shared" ] || echo shared
    exec 9> "$root/code/.lock"
    flock 9
    [ ! -e "$root/code/$code.tar" ] || { touch "$root/code/$code.tar"; echo code; }
    [ ! -d "$root/lib/$lib" ] || { touch "$root/lib/$lib"; echo lib; }
    exec 9>&-
    find "$root" -maxdepth 2 -mtime +@KEEP_DAYS@ '(' -path "$root/code/*.tar" -printf 'code\n' -o \
        -path "$root/lib/*" -printf 'lib\n' -o -name tree.lock -printf 'tree\n' ')' 2> /dev/null |
        awk '++many[$0] > @KEEP_NEWEST@ { print "old"; exit }'
}

# Code does not run from here. Whichever host is first makes it: root of a client of NFS is `nobody` for the others, and
# over SSH everybody is one account.
inspect_directory() {
    root=$1 squashed=" $(id -u nobody) $(id -u shoal-share 2> /dev/null || true) "
    make_directory
    print_id
    new=$(mktemp "$root/.new.XXXXXX")
    stat -c %u "$new"
    rm -f "$new"
    [ ! -e "$root/.shared" ] || echo shared
}

make_directory() {
    top=$root made=
    while [ -n "$top" ] && [ ! -d "$top" ]; do top=${top%/*}; done  # as much of it as exists
    for place in "$top" "$(readlink -f "$top/")"; do
        while [ -n "$place" ]; do
            is_ours "$place" || fail "$place belongs to $(stat -c %U "$place"), who could replace the job's code"
            [ -z "$(find "$place" -maxdepth 0 -uid 0 -type d -perm /022 ! -perm -1000)" ] ||
                fail "others may write to $place, and so replace the job's code"
            place=${place%/*}
        done
    done
    # On a share, root of each host is somebody else, and only who makes the directory may set its mode.
    [ -d "$root" ] || { mkdir -p "${root%/*}" && mkdir -m 1777 "$root"; } 2> /dev/null || mkdir -p "$root"
    # Here it is one, and others could make what a job to come needs, and so block it.
    # Jobs of an operator who became root by sudo are that login's, and write there.
    [ "${SUDO_UID:-0}" != 0 ] && mode=1777 || mode=0755
    case $root in @JOBS@/*) chmod "$mode" "$root" ;; esac
}

print_id() {
    if [ ! -s "$root/.id" ]; then
        new=$(mktemp "$root/.new.XXXXXX")
        head -c 12 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$new"
        chmod 644 "$new"
        ln "$new" "$root/.id" 2> /dev/null || true
        rm -f "$new"
    fi
    [ -f "$root/.id" ] && [ ! -L "$root/.id" ] || fail "$root/.id is no file"
    read -r id < "$root/.id" || true  # there is no end of line in it
    echo "$id"
}

# Whether root has made this, or the operator who became root. Root of a client of NFS may be somebody else there.
is_ours() {
    owner=$(stat -c %u "$1")
    case ${squashed:-} in *" $owner "*) return 0 ;; esac
    [ "$owner" != 0 ] && [ "$owner" != "$(id -u)" ] && [ "$owner" != "${SUDO_UID:-0}" ] || return 0
    if [ -z "$made" ]; then
        new=$(mktemp "$top/.new.XXXXXX")
        made=$(stat -c %u "$new")
        rm -f "$new"
    fi
    [ "$owner" = "$made" ]
}

fail() {
    echo "$1" >&2
    exit 3
}

# The file has its name only once it is there whole.
store() {
    place=$1 bytes=$2
    new=$place.$$.$(hostname)
    trap 'rm -f "$new"' EXIT
    cat > "$new"
    [ "$(stat -c %s "$new")" = "$bytes" ] || { echo "only a part of it arrived" >&2; exit 4; }
    chmod 644 "$new"
    mv -f "$new" "$place"
}

# The directory has its name only once all of it is there.
unpack() {
    place=$1
    new=$place.$$.$(hostname)
    trap 'rm -rf "$new"' EXIT
    mkdir "$new"
    tar -x --no-same-owner -f - -C "$new"
    # Here once, for all jobs: their users may not write here, and would compile it at every start.
    python3 -I -m compileall -q -d "$place" --invalidation-mode unchecked-hash "$new" > /dev/null 2>&1 || true
    chmod -R a+rX "$new"
    mv -T "$new" "$place" 2> /dev/null || [ -d "$place" ]
}

# `inspect` has checked that the directories are root's.
clean_code() {
    root=$1 newest=$2 days=$3 used=" $4 "
    exec 9> "$root/code/.lock"
    flock 9
    for place in code lib; do
        cd "$root/$place"
        ls -t | tail -n "+$((newest + 1))" | while IFS= read -r name; do
            case $used in *" ${name%.tar} "*) continue ;; esac
            [ -z "$(find "$name" -maxdepth 0 -mtime "+$days")" ] || rm -rf "./$name"
        done
    done
}

# Files that were sent have a date of 1970: a script may have written its results and checkpoints between them. Runs as
# the user whose jobs they are.
clean_trees() {
    root=$1 newest=$2 days=$3 used=" $4 "
    cd "$root"
    ls -t ./*/tree.lock 2> /dev/null | tail -n "+$((newest + 1))" | while IFS=/ read -r _ job _; do
        case $used in *" $job "*) continue ;; esac
        [ -O "$job/tree.lock" ] && [ -n "$(find "$job/tree.lock" -mtime "+$days")" ] || continue
        find "$job/tree" -type f ! -newermt @@SENT_TIME@ -delete
        find "$job/tree" -depth -type d -empty -delete
        rm -f "$job/tree.lock"
    done
}

"$@"
