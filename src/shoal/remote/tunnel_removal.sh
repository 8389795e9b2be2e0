
while read -r node; do
    case $node in \#*) continue ;; esac
    systemctl disable --now "shoal-tunnel@$node" 2> /dev/null
    rm -f "${1%/*}/$node.conf" "${1%/*}/$node.known_hosts"
done < "$1"
