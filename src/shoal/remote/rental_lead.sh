# rental_lead.sh SINCE SUPERSEDED: this host's rental service leads from now on, or from later than it did before, and
# than the service that superseded it.
now=$(date +%s)
for before in $(cat "$1" 2>/dev/null) $(sed -n 's/^since //p' "$2" 2>/dev/null); do
    [ "$now" -gt "$before" ] || now=$((before + 1))
done
echo "$now" > "$1" && rm -f "$2"
