#!/bin/bash
# Written by shoal; changes here are lost.
#
# slurmctld runs this before it starts a job (PrologSlurmctld), and looks when it ends whether the job's nodes are there.
# By itself it looks only every 30 s. So this ends as soon as they are: shoal-elastic.service says so, through a pipe.
# Where that does not come, it looks by itself now and then. It never fails: the job would go back into the queue.
starts=@STARTS@

asleep() {
  case $(sinfo -h -N -n "$SLURM_JOB_NODELIST" -o %t) in *[~#%!]*) ;; *) return 1 ;; esac
}

waits() {
  squeue -h -t CONFIGURING -o %A | grep -qx "$SLURM_JOB_ID"
}

asleep || exit 0
pipe=$SLURM_JOB_ID.$$
cd "$starts" && mkfifo -m 600 ".$pipe" && exec 3<>".$pipe" && mv ".$pipe" "$pipe" || exit 0
until read -r -t @LOOK@ -u 3 || ! asleep || ! waits; do :; done
rm -f "$pipe"
exit 0
