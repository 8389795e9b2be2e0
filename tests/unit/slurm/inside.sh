#!/bin/sh
# Starts a real munged, slurmctld and slurmd on rendered configuration and runs a script against them. Runs inside
# namespaces of its own (see real_slurm.py): whatever it mounts, starts or writes is gone when it ends.
set -e
image=$1 conf=$2 script=$3
mount -t tmpfs none /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay none -o "lowerdir=$image,upperdir=/mnt/upper,workdir=/mnt/work" /mnt/root
root=/mnt/root
mount -t proc none $root/proc
mount -t tmpfs none $root/dev
for device in "null 1 3" "zero 1 5" "random 1 8" "urandom 1 9" "nvidia0 1 3" "nvidia1 1 3"; do
    set -- $device
    mknod -m 666 $root/dev/$1 c $2 $3
done
mkdir -p $root/dev/shm $root/run/munge $root/var/lib/slurm/slurmctld $root/var/lib/slurm/slurmd
hostname ctl
echo "10.77.0.1 ctl n1" >>$root/etc/hosts
ip link set lo up
# Slurm's commands refuse to resolve anything while there is no address but the loopback's.
ip link add net0 type dummy 2>/dev/null || ip link add net0 type veth peer name net1
ip address add 10.77.0.1/24 dev net0
ip -6 address add fd7a:115c::1/64 dev net0 nodad 2>/dev/null || true
ip link set net0 up
cp "$conf"/*.conf $root/etc/slurm/
cp "$script" $root/script
# What Slurm asks of nodes that come and go is written down. slurmctld does without where there are no such programs.
programs=$root/usr/local/lib/shoal/elastic
mkdir -p $programs
install -m 666 /dev/null $root/tmp/asked
for name in resume suspend resume-fail; do
    printf '#!/bin/sh\necho "%s $1" >>/tmp/asked\n' $name >$programs/$name
    chmod 755 $programs/$name
done
ln -s /bin/true $programs/start
mkdir -p $root/out
if [ -n "$OUT" ]; then mount --bind "$OUT" $root/out; fi
cat >$root/start <<'END'
set -e
chown munge:munge /run/munge
chmod 755 /run/munge
head -c 1024 /dev/urandom >/etc/munge/munge.key
chown munge:munge /etc/munge/munge.key
chmod 400 /etc/munge/munge.key
munged --force --syslog
chown -R slurm:slurm /var/lib/slurm/slurmctld /var/log/slurm
slurmctld -D >/var/log/ctld.out 2>&1 &
tries=0
until scontrol ping 2>/dev/null | grep -q "is UP"; do
    tries=$((tries + 1))
    if [ $tries -gt 600 ] || ! kill -0 $! 2>/dev/null; then
        tail -50 /var/log/ctld.out >&2
        exit 3
    fi
    sleep 0.1
done
if [ -z "$NO_SLURMD" ]; then
    slurmd -D --conf-server 10.77.0.1:6817 -N n1 >/var/log/slurmd.out 2>&1 &
    tries=0
    until sinfo -h -n n1 -o %T 2>/dev/null | grep -qx "idle"; do
        tries=$((tries + 1))
        if [ $tries -gt 600 ] || ! kill -0 $! 2>/dev/null; then
            cat /var/log/slurmd.out /var/log/slurm/slurmctld.log >&2
            exit 4
        fi
        sleep 0.1
    done
fi
. /script
END
exec chroot $root /bin/sh /start
