# Slurm's programs in /usr/local, which is in the PATH of every user, of `ssh HOST sinfo` and of cron.
#   add|added PREFIX PATTERN...     links to the programs that match the patterns, where there is none to any tree
#   link|check PREFIX PATTERN...    links to the programs of this tree; a file of others is never replaced
#   tidy|tidied PREFIXES KEEP       removes other trees than KEEP, once nothing runs from them, and the links to them
#   remove PREFIXES HEADER FILE...  removes the links to all trees, the trees, and the units that begin with the header
# `added`, `check` and `tidied` only look whether there is nothing to do.
set -u
action=$1 prefix=$2
shift 2

# A slurmstepd loads plugins while its job runs and when it ends; srun does so as well.
is_used() {
    grep -qsF " $1/" /proc/[0-9]*/maps
}

links() {
    find /usr/local/bin /usr/local/sbin -maxdepth 1 -lname "$prefix*" ! -lname "${1:-/dev/null}/*" 2>/dev/null
}

case $action in
remove)
    links '' | xargs -r rm -f
    rm -rf "$prefix"*
    header=$1
    shift
    for unit in "$@"; do
        ! grep -qsF "$header" "$unit" || rm -f "$unit"
    done
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
    ;;
tidy | tidied)
    if [ "$action" = tidy ]; then
        links "$1" | xargs -r rm -f
    elif [ -n "$(links "$1")" ]; then
        exit 1
    fi
    for tree in "$prefix"*/; do
        tree=${tree%/}
        [ -d "$tree" ] && [ "$tree" != "$1" ] && ! is_used "$tree" || continue
        [ "$action" = tidy ] || exit 1
        rm -rf "$tree"
    done
    ;;
*)
    for pattern in "$@"; do
        for program in "$prefix"/$pattern; do
            link=/usr/local/${program#"$prefix"/}
            case $action in
            add | added) ! { [ -L "$link" ] && [ -e "$link" ]; } || continue ;;
            *) ! { [ -L "$link" ] && [ "$link" -ef "$program" ]; } || continue ;;
            esac
            case $action in added | check) exit 1 ;; esac
            if [ -e "$link" ] && ! [ -L "$link" ]; then
                printf '%s is there already, and is not from Shoal\nfix: move it away\n' "$link"
                exit 1
            fi
            [ -d "${link%/*}" ] || mkdir -p "${link%/*}"
            ln -sfn "$program" "$link"
        done
    done
    ;;
esac
