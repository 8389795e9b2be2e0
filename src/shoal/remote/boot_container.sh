#!/bin/sh
# Written by shoal: this container ends if it does not become a node of its cluster.
(
    if [ -e @WATCHDOG@ ]; then # it was one, and has been started again without what runs the watchdog
        while :; do sleep 60; @WATCHDOG@; done
    fi
    sleep @SECONDS@
    until [ -e @WATCHDOG@ ]; do
        @POWEROFF@
        sleep @RETRY_S@
    done
) > /dev/null 2>&1 &
