#!/bin/sh
# Written by shoal; changes here are lost.
# pam_exec runs this on a host that is open for logins and computes: with another host's word alone, a user needs a job.
[ "$PAM_TYPE" = open_session ] || exit 0
case $SSH_AUTH_INFO_0 in hostbased*) ;; *) exit 0 ;; esac
jobs=$(timeout 20 squeue --noheader --user "$PAM_USER" --nodelist @NODE@ --states RUNNING --format %i) && [ -n "$jobs" ] && exit 0
echo "Access denied: you have no active jobs on this node"
exit 1
