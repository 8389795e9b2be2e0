#!/bin/sh
# Written by shoal; changes here are lost.
note=/run/shoal-tunnel
case $SSH_ORIGINAL_COMMAND in
clear)
    old=$(cat "$note" 2> /dev/null) || exit 0
    case $(cat "/proc/$old/comm" 2> /dev/null) in sshd*) kill "$old" ;; esac
    while [ -e "/proc/$old" ] && ! grep -q "^State:.Z" "/proc/$old/status"; do sleep 0.1; done
    rm -f "$note"
    ;;
hold)
    echo "$PPID" > "$note"
    while kill -0 "$PPID" 2> /dev/null; do sleep 5; done
    ;;
esac
