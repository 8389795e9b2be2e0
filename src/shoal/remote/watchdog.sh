#!/bin/sh
# Written by shoal; changes here are lost.
now=$(date +%s)
mkdir -p @MARKS@
since() { cat "@MARKS@/$1" 2>/dev/null || echo "$now" | tee "@MARKS@/$1"; }
end() {
    echo "this machine is shut down: $1"
    @POWEROFF@
    exit 0
}
if [ @UNTIL@ -gt 0 ] && [ "$now" -ge @UNTIL@ ]; then end "its time is over"; fi
if state=$(timeout 30 scontrol show node @NODE@ -o 2>&1); then
    rm -f @MARKS@/silent
    case "$state" in
    *State=*POWERED_DOWN* | *State=*POWERING_DOWN*) ;;
    *State=*)
        rm -f @MARKS@/let-go
        exit 0
        ;;
    esac
elif echo "$state" | grep -q "not found"; then
    rm -f @MARKS@/silent
else
    [ $((now - $(since silent))) -lt @CONTROLLER_TIMEOUT_S@ ] || end "the controller does not answer"
    exit 0
fi
[ $((now - $(since let-go))) -lt @RELEASE_TIMEOUT_S@ ] || end "Slurm has let go of @NODE@"
