
set -u
while read -r kind where; do
    case $kind in automount | mount) ;; *) continue ;; esac
    unit=$(systemd-escape --path "$where")
    systemctl disable --now "$unit.automount" 2> /dev/null
    systemctl disable "$unit.mount" 2> /dev/null
    while umount --lazy --no-canonicalize "$where" 2> /dev/null; do :; done
    rm -f "/etc/systemd/system/$unit.automount" "/etc/systemd/system/$unit.mount"
done < "$1"
[ ! -d /run/systemd/system ] || systemctl daemon-reload
