#!/bin/sh
# Written by shoal; changes here are lost.
# The Docker daemon of one user. Its containers' root is an id that has no rights on this node.
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
user=$1
place=@DAEMONS@/$user
bridge=docker$(id -u "$user")
# Not the user's own range of ids: with those (newuidmap) the user would reach the files of images from outside.
account=@ACCOUNT@$(id -u "$user")
mkdir -p -m 0700 @DAEMONS@ "$place"
rm -f "$place/pid"
# Two daemons that start at once would take the same ids and addresses.
exec 9> @DAEMONS@/lock
flock 9
id "$account" > /dev/null 2>&1 || useradd --system --no-create-home --home-dir / --shell /usr/sbin/nologin "$account"
touch /etc/subuid /etc/subgid
if ! grep -q "^$account:" /etc/subuid; then
    range=$(awk -F: '$2 + $3 > end { end = $2 + $3 } END { if (end < 100000) end = 100000; print end "-" end + 65535 }' \
        /etc/subuid /etc/subgid)
    usermod --add-subuids "$range" --add-subgids "$range" "$account"
fi
mountpoint -q @STORE@ || mount -o bind,nodev @STORE@ @STORE@
if ! ip -4 -o address show dev "$bridge" 2> /dev/null | grep -q .; then
    at=0
    while ip -4 -o address | grep -q " @NETWORK@\.$at\.1/"; do at=$((at + 1)); done
    ip link show "$bridge" > /dev/null 2>&1 || ip link add "$bridge" type bridge
    # A container could announce itself as the node's router.
    [ ! -e /proc/sys/net/ipv6 ] || echo 1 > "/proc/sys/net/ipv6/conf/$bridge/disable_ipv6"
    ip address add "@NETWORK@.$at.1/24" dev "$bridge"
    ip link set "$bridge" up
fi
# dockerd lets the node forward packets. What it was before comes back when Docker is removed.
[ -e @DAEMONS@/ip_forward ] || cat /proc/sys/net/ipv4/ip_forward > @DAEMONS@/ip_forward
# Several daemons would remove each other's rules.
nft -f - << END
table ip shoal-docker
delete table ip shoal-docker
table ip shoal-docker {
    chain postrouting {
        type nat hook postrouting priority srcnat;
        # Root in a container may use any port: with one below 1024 it would speak for the node to a server of NFS.
        ip saddr @NETWORK@.0.0/16 ip daddr != @NETWORK@.0.0/16 meta l4proto { tcp, udp } masquerade to :1024-65535
        ip saddr @NETWORK@.0.0/16 ip daddr != @NETWORK@.0.0/16 masquerade
    }
}
END
exec 9>&-
# Of the operator's settings, those that open nothing: another runtime would leave out what ours does.
python3 -I -S -c '
import json, os, sys
path = "/etc/docker/daemon.json"
settings = json.load(open(path)) if os.path.exists(path) else {}
kept = ("registry-mirrors", "insecure-registries", "dns", "dns-opts", "dns-search", "mtu")
json.dump({name: settings[name] for name in kept if name in settings}, sys.stdout)
' > "$place/daemon.json"
exec dockerd --config-file "$place/daemon.json" --host "unix://$place/docker.sock" --pidfile "$place/pid" \
    --data-root "@STORE@/$user" --exec-root "$place/exec" \
    --containerd /run/containerd/containerd.sock --containerd-namespace "shoal-$user" \
    --containerd-plugins-namespace "shoal-$user-plugins" --add-runtime shoal=@RUNTIME@ --default-runtime shoal \
    --userns-remap "$account" --iptables=false --bridge "$bridge" \
    --default-address-pool base=@NETWORK@.0.0/16,size=24 --exec-opt native.cgroupdriver=cgroupfs --shutdown-timeout 5
