"""`shoal check` reports what jobs would miss: a tracking server that is down, an environment that is not built."""

from tests.support.fake_clusters import context_of, raised
from tests.support.fake_world import LAB, lab

from shoal.hosts.api import Result
from shoal.tracking import login, mlflow
from shoal.verbs.check import check

SERVED = LAB + "tracking: {url: http://10.9.9.9:5000}\nenvironments: {torch: {requirements: reqs.txt}}\n"
TOLD = mlflow.address_file("http://10.9.9.9:5000", ours=False).encode()


async def test_silent_tracking_server_and_unbuilt_environment_are_reported() -> None:
    world = lab(SERVED)
    await raised(world, SERVED)
    answers = world.hosts["c1"].answers
    answers[("sh", "-c")] = b""  # no environment has a name there
    answers[login.ADDRESS_COMMAND] = Result(0, stdout=TOLD)
    answers[mlflow.health_command("http://10.9.9.9:5000", ours=False)] = Result(0, stdout=b"Connection refused\n")
    found = [(finding.level, str(finding)) for finding in await check(context_of(world, SERVED))]
    assert found == [
        (
            "error",
            "tracking: the tracking server does not answer: jobs keep their metrics in files until it does, found "
            "http://10.9.9.9:5000: Connection refused, start it, or correct `tracking.url`",
        ),
        ("info", "environments.torch: not built yet, run `shoal env build torch`"),
    ]
    answers[mlflow.health_command("http://10.9.9.9:5000", ours=False)] = Result(0, stdout=b"200\n")
    assert [finding.path for finding in await check(context_of(world, SERVED))] == ["environments.torch"]
