#!/bin/sh
# Written by shoal: this machine shuts itself down if it does not become a node of its cluster.
cat > @UNITS@/@UNIT@.service <<'end'
[Unit]
Description=Shuts this rented machine down, which was to become a node and did not
ConditionPathExists=!@WATCHDOG@

[Service]
Type=oneshot
ExecStart=@POWEROFF@
end
cat > @UNITS@/@UNIT@.timer <<'end'
[Unit]
Description=Waits for this rented machine to become a node

[Timer]
OnBootSec=@SECONDS@

[Install]
WantedBy=timers.target
end
@SYSTEMCTL@ daemon-reload
@SYSTEMCTL@ enable --no-reload @UNIT@.timer
@SYSTEMCTL@ start --no-block @UNIT@.timer
