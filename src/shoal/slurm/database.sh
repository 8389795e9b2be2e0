#!/bin/bash
# Written by shoal; changes here are lost.
#
#   backup REASON    dump the accounting database, and keep the newest of each reason
#   list             the backups: name, bytes, seconds since the epoch; newest first
#   restore NAME     put one back; what is there now is backed up first, and nothing is dropped before NAME is loaded
set -euo pipefail
umask 077
database=@DATABASE@ backups=@BACKUPS@ keep=@KEEP@
mkdir -p -m 700 "$backups"

backup() {
  local name="$backups/$database-$(date -u +%Y%m%dT%H%M%SZ)-$1.sql.gz"
  rm -f "$backups"/*.part
  mariadb-dump --single-transaction --quick "$database" | gzip >"$name.part"
  sync "$name.part"
  mv "$name.part" "$name"
  find "$backups" -maxdepth 1 -name "$database-*-$1.sql.gz" -printf '%f\n' | sort -r | tail -n "+$((keep + 1))" |
    while read -r old; do rm -f "$backups/$old"; done
  echo "${name##*/}"
}

restore() {
  local file="$backups/$1" fresh="${database}_restore" table
  case "$1" in */* | "" | .*) echo "not a backup: $1" >&2; exit 2 ;; esac
  [ -f "$file" ] || { echo "there is no backup $1" >&2; exit 2; }
  gzip -t "$file"
  mariadb -e "DROP DATABASE IF EXISTS $fresh; CREATE DATABASE $fresh"
  gzip -dc "$file" | mariadb "$fresh"
  [ -n "$(mariadb -N -e "SHOW TABLES" "$fresh")" ] || { echo "$1 has no tables in it" >&2; exit 2; }
  # From here on slurmctld keeps what it has to say, and says it once slurmdbd is back.
  trap 'systemctl start slurmdbd' EXIT
  systemctl stop slurmdbd
  backup restore
  mariadb -e "DROP DATABASE IF EXISTS $database; CREATE DATABASE $database"
  mariadb -N -e "SHOW TABLES" "$fresh" | while read -r table; do
    echo "RENAME TABLE $fresh.\`$table\` TO $database.\`$table\`;"
  done | mariadb
  mariadb -e "DROP DATABASE $fresh"
}

exec 9>"$backups/.lock"
flock 9
case "${1:-}" in
  backup) backup "${2:-hand}" ;;
  list) find "$backups" -maxdepth 1 -name "$database-*.sql.gz" -printf '%f %s %T@\n' | sort -r ;;
  restore) restore "${2:-}" ;;
  *) echo "usage: $0 backup REASON | list | restore NAME" >&2; exit 2 ;;
esac
