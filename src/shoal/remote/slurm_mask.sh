# Daemons of the distribution's Slurm that must not run beside Shoal's. The packages stay.
#   mask|masked RECORD NAME...  masks their units, and records which; `masked` only looks whether that is done
#   unmask RECORD               gives back what was masked
set -eu
action=$1 record=$2
shift 2
units=/etc/systemd/system
case $action in
unmask)
    while read -r name; do
        [ "$(readlink "$units/$name.service")" != /dev/null ] || systemctl -q unmask "$name"
    done <"$record"
    rm -f "$record"
    ;;
*)
    for name in "$@"; do
        # One that is masked already stays so; an administrator's own unit there takes precedence.
        [ ! -e "$units/$name.service" ] && [ ! -L "$units/$name.service" ] || continue
        [ "$action" = mask ] || exit 1
        mkdir -p "${record%/*}"
        echo "$name" >>"$record"
        systemctl -q mask --now "$name"
    done
    ;;
esac
