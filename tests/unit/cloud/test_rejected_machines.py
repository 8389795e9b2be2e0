"""Machines that cannot become nodes: what is not rented again, how often one is replaced, what a job's owner reads."""

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.support.cases import cases
from tests.unit.cloud.scene import CASES, Scene, choice, rented_set, scene, with_scene

from shoal.cloud.rental import REPLACED, OrderBlock
from shoal.cloud.service.context import UNFIT_IMAGE_PREFIX, UNFIT_TYPE_PREFIX
from shoal.cloud.service.provision import MAX_REPLACEMENTS, max_replacements

PLACES = tuple(choice(CASES["lambda"], region=region) for region in ("us-west-1", "us-east-1", "europe-central-1"))


async def given_up(it: Scene, job: str = "1") -> str:
    """Let hours pass: the job's last comment."""
    await it.passes(4 * 3600, every=30)
    assert it.slurm.job_by_id[job].state == "PENDING"
    assert it.machines() == []
    return str(it.slurm.job_by_id[job].comment)


@cases("nodes", 1, 4)
async def test_job_gets_at_most_two_replacements_of_bad_machines_and_its_owner_reads_the_cost(
    tmp_path: Path, nodes: int
) -> None:
    """On however many nodes Slurm tries it."""
    async with scene(tmp_path, "lambda", sets=(rented_set("burst", nodes, *PLACES),)) as it:
        it.fault("bad-gpu", -1)
        it.slurm.submit("1", 1)
        comment = await given_up(it)
        billed = it.market().bill()
        assert len(billed) == 1 + MAX_REPLACEMENTS
        assert comment.startswith(f"3 machines were rejected (${sum(one['usd'] for one in billed):.2f}): ")
        assert comment.endswith(
            "CUDA error 802: system not yet initialized; no more are rented for this job: "
            "solve that, then submit it again"
        )

        it.market().faults.clear()
        it.slurm.cancel("1")
        it.slurm.submit("2", 1)
        await it.until(lambda: it.slurm.job_by_id["2"].state == "RUNNING")


@with_scene("lambda", sets=(rented_set("burst", 2, *PLACES),))
async def test_nodes_of_a_job_that_gets_no_more_machines_are_left_to_others(it: Scene) -> None:
    it.fault("bad-gpu", 1 + MAX_REPLACEMENTS)
    it.slurm.submit("1", 1)
    await given_up(it)
    it.slurm.submit("2", 1)
    await it.until(lambda: it.slurm.job_by_id["2"].state == "COMPLETED", seconds=1800)
    assert it.slurm.job_by_id["1"].state != "COMPLETED"


@cases("nodes, most", (1, 2), (4, 2), (11, 2), (12, 3), (64, 16))
def test_replacements_grow_with_large_jobs(nodes: int, most: int) -> None:
    assert max_replacements(nodes) == most


@with_scene("lambda", sets=(rented_set("burst", 8, *PLACES),))
async def test_bad_machines_of_all_nodes_of_a_job_count_together(it: Scene) -> None:
    it.fault("bad-gpu", -1)
    it.slurm.submit("1", 4)
    comment = await given_up(it)
    assert len(it.market().bill()) == 4, "all are bad: none is replaced"
    assert comment.startswith("4 machines were rejected ($")


@with_scene("lambda", sets=(rented_set("burst", 1, *PLACES),))
async def test_job_that_starts_again_and_again_gets_new_replacements(it: Scene) -> None:
    job = it.slurm.submit("1", 1, seconds=1e6)
    for _ in range(MAX_REPLACEMENTS + 2):
        await it.until(lambda: job.state == "RUNNING")
        await it.passes(60)
        it.fault("bad-gpu", 1)
        it.market().kill(it.machines()[0].id)
        await it.until(lambda: job.state != "RUNNING")
    await it.until(lambda: job.state == "RUNNING")
    await it.step()
    assert len([one for one in it.rentals() if one.trouble == REPLACED]) == MAX_REPLACEMENTS + 2
    assert it.context.rejected_machines("1") == ("", 0)


@cases("end", "stop", "delete")
async def test_spot_machine_that_ends_while_it_boots_was_not_unfit(tmp_path: Path, end: str) -> None:
    """Google stops a machine that it takes away."""
    spot = tuple(choice(CASES["gcp"], type="a2-highgpu-1g", zone=f"us-central1-{zone}") for zone in "abc")
    async with scene(tmp_path, "gcp", sets=(rented_set("burst", 1, *spot),)) as it:
        job = it.slurm.submit("1", 1)
        for count in range(1, MAX_REPLACEMENTS + 3):
            await it.until(lambda: any(machine.phase == "pending" for machine in it.machines()))
            await it.step()
            [machine] = it.machines()
            getattr(it.market(), end)(machine.id)
            await it.until(lambda token=machine.id: token not in [one.id for one in it.ledger.live()])
            assert len(it.ledger.all()) >= count
        assert it.context.rejected_machines("1") == ("", 0)
        await it.until(lambda: job.state == "RUNNING")


@with_scene("gcp", sets=(rented_set("burst", 1, choice(CASES["gcp"], type="a2-highgpu-1g", market="on-demand")),))
async def test_stopped_on_demand_machine_was_unfit(it: Scene) -> None:
    it.slurm.submit("1", 1)
    await it.until(lambda: bool(it.machines()))
    it.market().stop(it.machines()[0].id)
    await it.until(lambda: it.context.rejected_machines("1")[1] == 1)


@cases("prefix", UNFIT_IMAGE_PREFIX, UNFIT_TYPE_PREFIX)
@with_scene("lambda", sets=(rented_set("burst", 1, *PLACES),))
async def test_image_or_type_that_does_not_fit_is_rented_once(it: Scene, prefix: str) -> None:
    it.joiner.judge = lambda machine: f"{prefix}Slurm newer than the controller's"
    it.slurm.submit("1", 1)
    comment = await given_up(it)
    assert len(it.market().bill()) == 1, "no other region is tried: its machines are the same"
    assert "Slurm newer than the controller's; nothing more of it is rented until `shoal up`" in comment
    [block] = it.ledger.blocks(it.clock.now())
    assert (block.account, block.place, block.until) == ("lambda", "", None)
    assert block.type == ("" if prefix == UNFIT_IMAGE_PREFIX else PLACES[0].type)


@with_scene("lambda", sets=(rented_set("burst", 1, *PLACES),))
async def test_image_that_does_not_fit_is_not_rented_again_after_a_restart_but_after_up(it: Scene) -> None:
    it.joiner.judge = lambda machine: f"{UNFIT_IMAGE_PREFIX}no cgroups"
    it.slurm.submit("1", 1)
    await given_up(it)
    it.service = it.restart()
    work = asyncio.create_task(it.service.run())  # as after a crash, or a reboot of the controller
    await asyncio.sleep(0)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await given_up(it)
    assert len(it.market().bill()) == 1
    it.unblock()
    it.joiner.judge = it.judge
    await it.until(lambda: it.slurm.job_by_id["1"].state == "RUNNING")


async def test_bad_machine_is_never_rented_again_where_its_provider_names_it(tmp_path: Path) -> None:
    case = CASES["vast"]
    async with scene(tmp_path, "vast", sets=(rented_set("burst", 1, choice(case)),)) as it:
        it.fault("bad-gpu", 1)
        it.slurm.submit("1", 1, seconds=1200)
        await it.until(lambda: bool(it.rentals("gone")))
        [bad] = it.rentals("gone")
        assert it.ledger.unfit_machines("vast") == {bad.unfit_machine} != {""}
        it.service = it.restart()
        await it.until(lambda: it.slurm.job_by_id["1"].state == "RUNNING")
        machines = [machine.order.marks["machine_id"] for machine in it.market().instances.values()]
        assert str(machines[0]) == bad.unfit_machine and machines[0] not in machines[1:]
        assert it.ledger.unfit_machines("vast") == {bad.unfit_machine}


@with_scene("vast", sets=(rented_set("burst", 1, choice(CASES["vast"])),))
async def test_machine_whose_image_does_not_fit_is_no_bad_machine(it: Scene) -> None:
    it.joiner.judge = lambda machine: f"{UNFIT_IMAGE_PREFIX}no cgroups"
    it.slurm.submit("1", 1)
    await given_up(it)
    assert it.ledger.unfit_machines("vast") == set()


async def test_image_that_does_not_fit_is_rented_for_no_other_nodeset(tmp_path: Path) -> None:
    other = choice(CASES["lambda"], image="lambda-stack-22-04")
    sets = (rented_set("burst", 1, *PLACES), rented_set("same", 1, PLACES[0]), rented_set("other", 1, other))
    async with scene(tmp_path, "lambda", sets=sets) as it:
        it.joiner.judge = lambda machine: f"{UNFIT_IMAGE_PREFIX}Slurm newer than the controller's"
        it.slurm.submit("1", 1)
        await given_up(it)
        images = [machine.order.image for machine in it.market().instances.values()]
        assert sorted(images) == ["lambda-stack-22-04", "lambda-stack-24-04"], "one of each, not one for each nodeset"


async def test_offer_that_cannot_join_is_never_rented(it: Scene) -> None:
    why = "lambda rents Ubuntu 24.04 with Slurm 23.11.4"
    it.context.unfit_offers = [OrderBlock("lambda", why=why, nodeset="burst")]
    it.slurm.submit("1", 1)
    assert await given_up(it) == why
    assert it.market().bill() == []


async def test_machine_is_ordered_with_the_image_of_its_offer(tmp_path: Path) -> None:
    case = CASES["runpod"]
    sets = (rented_set("burst", 1, choice(case, image="ubuntu:24.04")),)
    async with scene(tmp_path, "runpod", sets=sets) as it:
        it.slurm.submit("1", 1)
        await it.until(lambda: bool(it.machines()))
        assert [machine.order.image for machine in it.machines()] == ["ubuntu:24.04"]


@with_scene("runpod")
async def test_pod_without_an_address_is_released_after_three_minutes(it: Scene) -> None:
    provider = it.context.accounts["runpod"].provider
    provider.abilities = replace(provider.abilities, address_timeout_s=180)
    it.fault("late-address", seconds=1e6)
    it.slurm.submit("1", 1, seconds=600)
    await it.until(lambda: bool(it.rentals("gone")), seconds=400)
    [bad] = it.rentals("gone")
    assert bad.reason.endswith("of runpod has no address after 180 s")
    await it.until(lambda: it.slurm.job_by_id["1"].state == "RUNNING")


async def test_late_address_is_waited_for(it: Scene) -> None:
    it.fault("late-address", seconds=300)
    await it.run_job(seconds=600)
    assert len(it.market().bill()) == 1
