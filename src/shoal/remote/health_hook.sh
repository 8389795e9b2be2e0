#!/bin/sh
# Written by shoal; changes here are lost.
# Slurm's HealthCheckProgram. It only reads what the health program of this node has found, and asks Slurm only when the
# node must be drained, or its own drain is over. A reason that others wrote, or that cannot be read, is not changed.
# slurmd also runs it when it starts. Then it asks once after each start of the host.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin  # the first two for Slurm of Shoal
export PATH
state=@STATE@
wanted='' own=''
[ ! -r $state/drain ] || read -r wanted < $state/drain
[ ! -r $state/drained ] || read -r own < $state/drained

record() {
    if [ -n "$1" ]; then printf '%s\n' "$1" > $state/drained; else rm -f $state/drained; fi
}

update() {
    timeout 10 scontrol update "nodename=$SLURMD_NODENAME" "$@"
}

change() {
    found=$(timeout 10 sinfo --all --noheader --Node --nodes="$SLURMD_NODENAME" --format='%T|%E') || return 0
    [ -n "$found" ] || return 0
    found=${found%%
*}
    reason=${found#*|}
    # From 24.11 on a node that was resumed keeps its reason until a job starts there.
    case $found in idle* | mixed* | allocated* | completing* | planned* | reserved*) reason=none ;; esac
    if [ -n "$own" ] && [ "$reason" != "$own" ]; then
        # A person, or Slurm, has decided otherwise since. What was found then is not acted on again.
        record "$wanted"
    elif [ -n "$own" ] && [ -n "$wanted" ]; then
        update "reason=$wanted" && record "$wanted"
    elif [ -n "$own" ]; then
        update state=resume && record ''
    elif [ "$reason" = none ]; then
        record "$wanted"
        update state=drain "reason=$wanted" || record ''
    fi
}

# Only out of its own drain, and when Slurm says that it is over: no job is there, and none can come.
reboot_if_drained() {
    own=''
    [ ! -r $state/drained ] || read -r own < $state/drained
    found=$(timeout 10 sinfo --all --noheader --Node --nodes="$SLURMD_NODENAME" --format='%T %E') || return 0
    [ -z "$own" ] || [ "${found%%
*}" != "drained $own" ] || systemctl reboot
}

# Slurm gives a health check a minute, and a job's ranks may answer later.
hung_job='import sys; sys.path.insert(0, "@DIRECTORY@"); from node_health.hung_job import main; main(*sys.argv[1:])'
follow_orders() {
    mv $state/orders $state/orders.read
    while read -r verb job text; do
        case $verb in
        notify) timeout 10 scontrol notify "$job" "$text" ;;
        cancel) timeout 10 scancel "$job" ;;
        reboot) [ "$job" != "$(cat /proc/sys/kernel/random/boot_id)" ] || reboot_if_drained ;;  # not twice
        hung) setsid -f timeout 300 python3 -I -S -B -c "$hung_job" "$job" "$text" < /dev/null > /dev/null 2>&1 ;;
        esac
    done < $state/orders.read
    rm -f $state/orders.read
}

# srun takes the lost connection to a host that was started again for the end of its output, and waits for its ranks.
end_lost_steps() {
    : > "$started"
    age=$(ps -o etimes= -p 1) && before=$(date -d "-$((age)) seconds" +%Y-%m-%dT%H:%M:%S) || return 0
    timeout 10 squeue --noheader --steps --nodelist="$SLURMD_NODENAME" --format='%i %S' | while read -r step time; do
        case $step in *.*[!0-9]*) continue ;; esac  # those of Slurm's own
        [ "$time" \< "$before" ] || continue
        timeout 10 scontrol notify "${step%.*}" "$SLURMD_NODENAME was started again: its ranks of step $step are gone"
        timeout 10 scancel "$step"
    done
}

started=/run/shoal-host-started
[ -e "$started" ] || end_lost_steps
[ "$wanted" = "$own" ] || change
[ ! -s $state/orders ] || follow_orders
program='@PROGRAM@'
[ -z "$program" ] || exec "$program"
