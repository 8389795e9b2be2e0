"""Hosts whose shape differs from the one in the file."""

from dataclasses import replace

from tests.support.cases import cases
from tests.support.fake_world import spec_of

from shoal.plan.model import describe_shape, shape_findings
from shoal.spec.member import Shape
from shoal.spec.members import members

TEXT = """
cluster: reef
controller: {provider: sandbox}
login: {provider: sandbox, count: 1}
nodesets: {fish: {provider: sandbox, count: 3, gpus: 2}}
"""
MEMBERS = members(spec_of(TEXT))
AS_ASKED = {member.name: member.shape for member in MEMBERS}


def test_hosts_with_another_shape_are_grouped_with_the_fix() -> None:
    assert shape_findings(MEMBERS, AS_ASKED) == [] and shape_findings(MEMBERS, {}) == []
    made = {name: replace(shape, gpus=1) if "fish" in name else shape for name, shape in AS_ASKED.items()}
    made["controller"] = replace(made["controller"], image="debian13", site="b")
    made["login1"] = replace(made["login1"], memory_mb=4096)
    assert [str(finding) for finding in shape_findings(MEMBERS, made)] == [
        "controller: was made with image debian13, site b; the file now says image debian12, site a, "
        "`shoal down` and `shoal up` remake it",
        "login1: was made with 4096 MB of memory; the file now says memory without a limit, "
        "take it out of the file and run `shoal up`, then put it back and run `shoal up` to remake it",
        "fish[1-3]: was made with 1 GPU; the file now says 2 GPUs, "
        "`shoal node remove` it, put it back into the file and run `shoal up` to remake it",
    ]


@cases("field", "image", "cpus", "memory_mb", "disk_mb", "gpus", "site", "cgroups")
def test_change_of_any_field_is_detected(field: str) -> None:
    other = Shape("sid", 7, 777, 7777, 7, "z", cgroups=True)
    made = {**AS_ASKED, "fish1": replace(AS_ASKED["fish1"], **{field: getattr(other, field)})}
    [finding] = shape_findings(MEMBERS, made)
    assert finding.host == "fish1"
    assert describe_shape(Shape()) == "debian12"
    assert describe_shape(Shape("sid", 2, 2048, gpus=1, site="b")) == "sid, 2 CPUs, 2048 MB, 1 simulated GPU, site b"
