# Slurm's programs in /usr/local, which is in the PATH of every user, of `ssh HOST sinfo` and of cron.
#   link|check PREFIX PATTERN...    links to the programs that match the patterns; a file of others is never replaced
#   remove PREFIXES HEADER FILE...  removes the links to all trees, the trees, and the units that begin with the header
set -u
action=$1 prefix=$2
shift 2
case $action in
remove)
    for link in /usr/local/bin/* /usr/local/sbin/*; do
        case $(readlink "$link") in "$prefix"*) rm -f "$link" ;; esac
    done
    rm -rf "$prefix"*
    header=$1
    shift
    for unit in "$@"; do
        ! grep -qsF "$header" "$unit" || rm -f "$unit"
    done
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
    ;;
*)
    for pattern in "$@"; do
        for program in "$prefix"/$pattern; do
            link=/usr/local/${program#"$prefix"/}
            [ "$(readlink "$link")" != "$program" ] || continue
            [ "$action" = link ] || exit 1
            if [ -e "$link" ] && ! [ -L "$link" ]; then
                printf '%s is there already, and is not from Shoal\nfix: move it away\n' "$link"
                exit 1
            fi
            mkdir -p "${link%/*}"
            ln -sfn "$program" "$link"
        done
    done
    ;;
esac
