#!/bin/sh
# Written by shoal; changes here are lost.
# The Docker daemon of one user. Its containers' root is an id of the user's own that has no rights on this node.
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
user=$1
place=@DAEMONS@/$user
bridge=docker$(id -u "$user")
mkdir -p -m 0700 @DAEMONS@ "$place"
rm -f "$place/pid"
# Two daemons that start at once would take the same addresses.
exec 9> @DAEMONS@/lock
flock 9
if ! ip -4 -o address show dev "$bridge" 2> /dev/null | grep -q .; then
    at=0
    while ip -4 -o address | grep -q " @NETWORK@\.$at\.1/"; do at=$((at + 1)); done
    ip link show "$bridge" > /dev/null 2>&1 || ip link add "$bridge" type bridge
    ip address add "@NETWORK@.$at.1/24" dev "$bridge"
    ip link set "$bridge" up
fi
# Several daemons would remove each other's rules.
nft -f - << END
table ip shoal-docker
delete table ip shoal-docker
table ip shoal-docker {
    chain postrouting {
        type nat hook postrouting priority srcnat;
        ip saddr @NETWORK@.0.0/16 ip daddr != @NETWORK@.0.0/16 masquerade
    }
}
END
exec 9>&-
exec dockerd --host "unix://$place/docker.sock" --data-root "@STORE@/$user" --exec-root "$place/exec" \
    --pidfile "$place/pid" --containerd /run/containerd/containerd.sock --containerd-namespace "shoal-$user" \
    --containerd-plugins-namespace "shoal-$user-plugins" --userns-remap "$user" --iptables=false --bridge "$bridge" \
    --default-address-pool base=@NETWORK@.0.0/16,size=24 --exec-opt native.cgroupdriver=cgroupfs --shutdown-timeout 5
