#!/bin/sh
# Written by shoal: this container ends if it does not become a node of its cluster.
(
    sleep @SECONDS@
    [ -e @WATCHDOG@ ] || @POWEROFF@
) > /dev/null 2>&1 &
