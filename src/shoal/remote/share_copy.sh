#!/bin/sh
# Written by shoal; changes here are lost.
set -u
case ${1-} in in | out) ;; *) echo "usage: $0 in|out" >&2; exit 2 ;; esac
[ "$(id -u)" = 0 ] || exec sudo -n "$0" "$1"
exec 9> /run/shoal-stage.lock
flock 9
as="setpriv --reuid=@ACCOUNT@ --regid=@ACCOUNT@ --clear-groups --no-new-privs"
umask 0
copy() { $as rsync -rltO --update --chmod=ugo=rwX -e '@SSH@' "$@" < /dev/null; }
status=0
while read -r where server mode; do
    there=@SERVER_ACCOUNT@@$server:$where/
    case $1.$mode.$where in
        in.*./*) copy "$there" "$where/" || status=1 ;;
        out.rw./*) copy --exclude=__pycache__/ "$where/" "$there" || status=1 ;;
    esac
done < @LIST@
exit "$status"
