#!/bin/sh
# Written by shoal; changes here are lost.
grep -qx '@BEGIN@' @HOSTS@ || {
    echo '@BEGIN@'
    cat @KEPT@
    echo '@END@'
} >> @HOSTS@
exec sed -i -E -f /dev/stdin @HOSTS@ << 'END'
@RULE@END
