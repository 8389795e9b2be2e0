"""The tailnet in `shoal status`."""

import json

from tests.support.fake_world import spec_of
from tests.support.screens import screen_text
from tests.unit.network.test_tailscale_status import STATUS

from shoal.cli.cluster_screens import tailnet_lines
from shoal.hosts.api import Result
from shoal.network.tailscale import STATUS_COMMAND, Tailnet
from shoal.slurm.state import NodeState
from shoal.verbs.context import Context
from shoal.verbs.health import TailnetMember, TailnetView, tailnet_members, tailnet_view
from shoal_simulators.fake_host import FakeHost

REEF = """
cluster: reef
network: tailscale
controller: {host: c1}
login: {hosts: [n3]}
nodesets: {lab: {hosts: [n1, n2, n9]}}
"""
CONTEXT = Context(spec_of(REEF))
NODES = [NodeState(name, (), address=address) for name, address in (("n1", "100.64.0.2"), ("n2", "100.64.0.3"))]
EXPIRES_SOON_S = 1801303200.0 - 3 * 86400


def shown(view: TailnetView) -> str:
    return screen_text(lambda console: [console.print(line, highlight=False) for line in tailnet_lines(view)])


async def test_members_have_their_connection_and_an_expiring_key_is_reported() -> None:
    host = FakeHost("c1", {STATUS_COMMAND: json.dumps(STATUS).encode()})
    view = tailnet_members(CONTEXT, await tailnet_view(CONTEXT, host), NODES, now=EXPIRES_SOON_S)
    assert view == TailnetView(
        "Running",
        "",
        (
            TailnetMember("c1", "fd7a:115c:a1e0::1", "direct", days=3),
            TailnetMember("n3", "100.64.0.4", "idle"),
            TailnetMember("n1", "100.64.0.2", "direct"),
            TailnetMember("n2", "100.64.0.3", "relayed", "fra"),
            TailnetMember("n9"),
        ),
    )
    assert shown(view) == (
        "tailnet: c1,n1 direct; n3 idle (no packets lately); n2 relayed by fra, slowly; n9 not in the tailnet\n"
        "the key of c1 expires in 3 days: run `shoal keys rotate tailscale`\n"
    )


async def test_logged_out_or_silent_controller_is_reported() -> None:
    out = FakeHost("c1", {STATUS_COMMAND: json.dumps({"BackendState": "NeedsLogin"}).encode()})
    view = tailnet_members(CONTEXT, await tailnet_view(CONTEXT, out), NODES)
    assert view is not None
    assert shown(view) == "tailnet: NeedsLogin; `shoal up` joins the controller again\n"
    silent = FakeHost("c1", {STATUS_COMMAND: Result(1, stderr=b"failed to connect to local tailscaled\n")})
    assert await tailnet_view(CONTEXT, silent) == Tailnet(problem="failed to connect to local tailscaled")


async def test_other_networks_are_not_queried() -> None:
    lan = Context(spec_of(REEF.replace("network: tailscale\n", "")))
    host = FakeHost("c1", {})
    assert await tailnet_view(lan, host) is None and host.calls == []
    assert tailnet_members(lan, None, NODES) is None
