# Runs srun for a person who watches: BYTES SRUN ARGUMENT...
# Standard input: variables, an empty line, so many bytes for srun's standard input; its end ends the job, so that a
# connection that breaks leaves none behind.
while IFS= read -r line && [ -n "$line" ]; do export "$line"; done
code=/dev/null
if [ "$1" -gt 0 ]; then
    code=$(mktemp) || exit 1
    trap 'rm -f "$code"' EXIT
    head -c "$1" > "$code"
fi
shift
exec 3<&0
"$@" < "$code" 2>&1 3<&- &
srun=$!
# No program of its own: that would outlive the shell, and hold the input of a job that has ended.
(while read -r line <&3; do :; done; kill -TERM "$srun") > /dev/null 2>&1 &
wait "$srun"
status=$?
kill "$!" 2> /dev/null
exit "$status"
