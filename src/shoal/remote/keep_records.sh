# Puts an accounting database aside that a new slurmdbd cannot read, as another database of the same server.
set -eu
database=$1 kept=$2
! systemctl -q is-active slurmdbd || systemctl stop slurmdbd
tables=$(mariadb -N -B -e "SELECT table_name FROM information_schema.tables WHERE table_schema = '$database'")
[ -n "$tables" ] || exit 0
mariadb -e "CREATE DATABASE IF NOT EXISTS $kept"
for table in $tables; do
    mariadb -e "RENAME TABLE \`$database\`.\`$table\` TO \`$kept\`.\`$table\`"
done
