#!/bin/bash
# Written by shoal; changes here are lost.
#
#   backup REASON    dump the accounting database, and keep the newest of each reason
#   list             the backups: name, bytes, seconds since the epoch; newest first
#   restore NAME     put one back; what is there now is backed up first, and stays until NAME takes its place at once
set -euo pipefail
umask 077
cluster=@CLUSTER@ database=@DATABASE@ backups=@BACKUPS@ keep=@KEEP@
fresh="${database}_restore" former="${database}_former"
mkdir -p -m 700 "$backups"

refuse() {
  echo "$*" >&2
  exit 2
}

backup() {
  local name="$backups/$database-$(date -u +%Y%m%dT%H%M%SZ)-$1.sql.gz"
  rm -f "$backups"/*.part
  mariadb-dump --single-transaction --quick "$database" | gzip >"$name.part" || { rm -f "$name.part"; return 1; }
  sync "$name.part"
  mv "$name.part" "$name"
  find "$backups" -maxdepth 1 -name "$database-*-$1.sql.gz" -printf '%f\n' | sort -r | tail -n "+$((keep + 1))" |
    while read -r old; do rm -f "$backups/$old"; done
  echo "${name##*/}"
}

restore() {
  local file="$backups/$1"
  case "$1" in */* | "" | .*) refuse "not a backup: $1" ;; esac
  [ -f "$file" ] || refuse "there is no backup $1"
  gzip -t "$file"
  gzip -dc "$file" | tail -n 1 | grep -q '^-- Dump completed' || refuse "$1 breaks off before its end"
  trap 'drop "$fresh"' EXIT
  drop "$fresh" && mariadb -e "CREATE DATABASE $fresh"
  gzip -dc "$file" | mariadb "$fresh"
  tables "$fresh" | grep -xF "${cluster}_job_table" >/dev/null || refuse "$1 has no records of the cluster $cluster"
  # From here on slurmctld keeps what it has to say, and says it once slurmdbd is back.
  trap 'systemctl start slurmdbd; drop "$fresh"' EXIT
  systemctl stop slurmdbd
  backup restore
  drop "$former" && mariadb -e "CREATE DATABASE $former"
  # One statement is done whole, or not at all.
  { moves "$database" "$former"; moves "$fresh" "$database"; } | paste -s -d , | sed 's/^/RENAME TABLE /' | mariadb
  drop "$former"
}

drop() { mariadb -e "DROP DATABASE IF EXISTS $1"; }

tables() { mariadb -N -e "SHOW TABLES" "$1"; }

moves() { tables "$1" | sed "s/.*/$1.\`&\` TO $2.\`&\`/"; }

exec 9>"$backups/.lock"
flock 9
case "${1:-}" in
  backup) backup "${2:-hand}" ;;
  list) find "$backups" -maxdepth 1 -name "$database-*.sql.gz" -printf '%f %s %T@\n' | sort -r ;;
  restore) restore "${2:-}" ;;
  *) refuse "usage: $0 backup REASON | list | restore NAME" ;;
esac
