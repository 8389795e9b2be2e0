#!/bin/bash
# Written by shoal; changes here are lost.

ask() {
    [[ $1 =~ ^NodeName=([^ ]+).*\ NodeAddr=([^ ]+) ]] || return
    local node=${BASH_REMATCH[1]} address=${BASH_REMATCH[2]} port=@PORT@
    [[ $1 =~ \ Port=([0-9]+) ]] && port=${BASH_REMATCH[1]}
    # slurmd hangs up on what is no message. For one that is stopped the kernel takes the call, and nobody hangs up.
    timeout 10 bash -c 'exec 3<> "/dev/tcp/$1/$2" && printf "\377\377\377\377" >&3 && { read -r -N 1 -u 3 || :; }' \
        call "$address" "$port" 2> /dev/null || return
    echo "$node answers again"
    timeout 60 scontrol update nodename="$node" state=resume
}
# From 24.11 on a reason may stand behind one that Slurm has kept.
while sleep @INTERVAL_S@; do
    timeout 60 scontrol -o show nodes 2> /dev/null |
        grep -E ' State=DOWN\+NOT_RESPONDING .* Reason=(.* : )?@REASON@' |
        { while read -r line; do ask "$line" & done; wait; }
done
