"""The commands and examples that the documents show, and how each command is run by a test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOY_README = ROOT / "examples/toy/README.md"
TRAINING = ROOT / "docs/training.md"
DOCUMENTS = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", TOY_README),
    *sorted((ROOT / "docs").glob("*.md")),
]

LENT = "as it stands, on hosts called as in the README, by test_the_readme_builds_a_cluster"
DEMO = "as it stands, by test_the_demo_shows_a_training_and_a_status"
COLLECT = "with --collect-only behind it, on some of the files, by test_arguments_go_to_pytest"
CHOOSE = "what they choose and how they run it, by tests/unit/test_suite.py"
TOY = "as it stands, on the demo's cluster, by test_the_toys_readme_trains_on_the_demos_cluster of the matrix"
PAGE = "as it stands, on nodes that have torch, by test_the_commands_of_the_page_on_training_run_its_script"
ALONE = "as it stands, with the page's script, by test_every_command_that_needs_no_cluster_runs_the_changed_script"
PROVE = "by test_prove.py, with fewer ranks outside the matrix; on two nodes with --export PYTHONPATH= for torch"
ENVIRONMENTS = "as it stands, by test_the_commands_of_the_environments_page_run"
OWN_ENVIRONMENT = "as it stands, by the user of test_environments.py"
TUNNEL = "with --json and the password, by check_the_page_opens_through_ssh in tests/e2e/tracking_checks.py"
BOOKS = "as it stands, on a cluster with accounting, by test_the_commands_of_the_pages_run_as_they_stand"
TAILNET = "as it stands, on hosts in a tailnet, by test_the_commands_of_the_page_run_as_they_stand"
SITES = "as it stands, on two sites joined by WireGuard, by test_the_command_of_the_page_spans_the_sites"
MONEY = "as it stands, with simulated clouds, by test_the_commands_of_the_page_on_budgets_run_as_they_stand"
TRIAL = "at a simulated Amazon, with --yes, by hand (-m matrix), by test_provider_trial.py"
CHECK = "by scripts/test beside the tests; test_whole_run_has_the_checks_and_all_daily_tests holds it to that"
LAB = "as it stands, by the first user of test_lab.py"
STEPS = "with the number of the user's job, by check_commands_inside_jobs in tests/e2e/user_command_checks.py"
VALIDATE = "by a user, with a PYTHONPATH in place of --env, by hand (-m matrix), by tests/e2e/test_validate.py"
DOCTOR = "with the file of its cluster, by tests/e2e/test_doctor.py"
JOB_ENGINES = "with another image, by hand (-m matrix), by tests/e2e/test_job_engines.py"
JOB_IMAGES = "with an image of its own, by tests/e2e/test_image_jobs.py, or by hand by test_image_matrix.py"
RENTED_IMAGE = "with an image and a directory of its own, by tests/e2e/test_rented_nodes.py"
MPI_IMAGE = "from Debian 12, by hand (-m matrix), by tests/e2e/test_image_matrix.py"
PODMAN = "with podman in place of docker and another port, by hand (-m matrix), by tests/e2e/test_engine_hosts.py"
ONCE = "once for a machine, by hand; test_engine.py has the errors that name it"
REBUILD = "with the hosts of its cluster, by hand (-m matrix), by tests/e2e/test_rebuild.py"
MLFLOW_MOVE = "by test_mlflow.py, which stops the service and starts it again"
ITSELF = "it is what runs this test; test_ci_runs_the_checks_and_the_tests holds CI to it"

COMMANDS = {
    "docker build -t shoal-node examples/node-image": PODMAN,
    'export SHOAL_AUTHORIZED_KEY="$(cat ~/.ssh/id_ed25519.pub)"': PODMAN,
    "docker run -d --name shoal-node --restart always -p 2222:22 -e SHOAL_AUTHORIZED_KEY shoal-node": PODMAN,
    "sudo apt-get install --no-install-recommends podman uidmap slirp4netns netavark iptables runc mmdebstrap": ONCE,
    "sudo sh -c 'mkdir -p /sys/fs/cgroup/systemd/ann && chown -R ann /sys/fs/cgroup/systemd/ann'": ONCE,
    "shoal join alice@desktop": LAB,
    "shoal exec --job 17 -- nvidia-smi -L": STEPS,
    "shoal ssh --job 17": STEPS,
    "shoal check": LENT,
    "shoal plan": LENT,
    "shoal up": LENT,
    "shoal status": LENT,
    "shoal validate --quick": VALIDATE,
    "shoal validate --env torch": VALIDATE,
    "shoal validate --since 7d": VALIDATE,
    "shoal run --partition cloud --image train --directory /data/jobs train.py": RENTED_IMAGE,
    "shoal doctor": DOCTOR,
    "shoal doctor --fix": DOCTOR,
    "shoal ssh desktop srun -N2 hostname": LENT,
    "python3 -m venv ~/shoal && ~/shoal/bin/pip install .": LENT,
    "~/shoal/bin/shoal init --hosts desktop,gpu01,gpu02": LENT,
    "~/shoal/bin/shoal up": LENT,
    "scripts/demo": DEMO,
    "../../scripts/environment": TOY,
    "shoal run --job job.yaml --wait": TOY,
    "shoal run --job job.yaml --wait train.py --parallel fsdp": TOY,
    "shoal run --job job.yaml --wait --launcher torchrun": TOY,
    "shoal jobs": TOY,
    "shoal run -N2 --wait train.py": PAGE,
    "shoal run -N2 --wait --launcher torchrun train.py": PAGE,
    "shoal run -N2 --wait --launcher spawn train.py": PAGE,
    "torchrun --nproc-per-node 2 train.py": ALONE,
    "python -m shoal.train.multiprocess --nprocs 2 train.py": ALONE,
    "python train.py": ALONE,
    "shoal prove train.py -n 4": PROVE,
    "shoal prove train.py -n 4 -N2 -f shoal.yaml --launcher srun,pmix": PROVE,
    "shoal env build torch": ENVIRONMENTS,
    "shoal env list": ENVIRONMENTS,
    "shoal run --env torch -N2 --wait train.py": ENVIRONMENTS,
    "shoal env clean": ENVIRONMENTS,
    "shoal env build mine --requirements requirements.txt": OWN_ENVIRONMENT,
    "shoal run --env mine -N2 --wait train.py": OWN_ENVIRONMENT,
    "shoal env remove mine": OWN_ENVIRONMENT,
    "shoal image pull docker.io/library/python:3.12 --name python": JOB_IMAGES,
    "shoal run -N2 --image python --mount /data:/data:ro train.py": JOB_IMAGES,
    "shoal image build train requirements.txt --from python": JOB_IMAGES,
    "shoal image build train .": JOB_IMAGES,
    "shoal image build mini /shared/mini": "with another directory, by bench/containers",
    "shoal image build mpi examples/mpi-image --from trixie": MPI_IMAGE,
    "srun -N2 --mpi=pmix $(shoal image bundle mpi)/run all_reduce": MPI_IMAGE,
    "shoal image push train registry.example.org/lab/train:3": JOB_IMAGES,
    "shoal image push train": JOB_IMAGES,
    "shoal image pull controller:5001/ann/train": JOB_IMAGES,
    "shoal image login registry.example.org --user ann --password file:~/.registry-password": JOB_IMAGES,
    "shoal image logout registry.example.org": JOB_IMAGES,
    "ssh-keygen -q -t ed25519 -N '' -f /data/host_key": JOB_IMAGES,
    "srun -w gpu01 $(shoal image bundle train --mount /data:/data --home on)/run /usr/sbin/sshd -D -f /dev/null -p 2222"
    " -h /data/host_key -o UsePAM=no -o StrictModes=no -o PidFile=none": JOB_IMAGES,
    "srun podman run --rm debian cat /etc/os-release": JOB_ENGINES,
    "srun sh -c 'docker build -t train . && docker run --rm train'": JOB_ENGINES,
    "shoal image list": JOB_IMAGES,
    "shoal image prune": JOB_IMAGES,
    "srun -N2 -C images --container=$(shoal image bundle python --mount /data:/data) python3 /data/a.py": JOB_IMAGES,
    "srun --pty -C images --container=$(shoal image bundle python --home on) bash": JOB_IMAGES,
    "shoal ui mlflow": TUNNEL,
    "shoal usage --by user": BOOKS,
    "shoal usage --by nodeset --since 7d": BOOKS,
    "shoal jobs --all": BOOKS,
    "shoal restore": BOOKS,
    "shoal restore latest --yes": BOOKS,
    "shoal keys rotate munge": BOOKS,
    "shoal keys rotate all": BOOKS,
    "shoal keys rotate tailscale": TAILNET,
    "shoal bench links": TAILNET,
    "shoal bench links --hosts gpu01,gpu02 --seconds 2": TAILNET,
    "shoal run -N3 --switches 2 --wait train.py": SITES,
    "shoal offers --gpu H100 --count 8": MONEY,
    "shoal cost": MONEY,
    "shoal cost --month 2026-10": MONEY,
    "shoal reap --yes": MONEY,
    "shoal try lambda --max-cost 1": TRIAL,
    "shoal node drain NODES": REBUILD,
    "shoal exec -w OLD -- scancel --state=PENDING": REBUILD,
    "shoal exec -w OLD -- systemctl stop shoal-elastic": REBUILD,
    "shoal reap": REBUILD,
    "shoal exec -w OLD -- systemctl stop shoal-mlflow": MLFLOW_MOVE,
    "shoal exec -w OLD -- /usr/local/lib/shoal/accounting-database backup move": REBUILD,
    "shoal ssh OLD sudo tar -C / -c PATHS > saved.tar && tar -tf saved.tar > saved.txt": REBUILD,
    "shoal down": REBUILD,
    "shoal node resume NODES": REBUILD,
    "shoal exec -w NEW -- systemctl stop shoal-elastic": REBUILD,
    "shoal exec -w NEW -- systemctl stop shoal-mlflow": MLFLOW_MOVE,
    "shoal exec -w NEW -- sh -c 'rm -f /var/lib/shoal/elastic/ledger.db*'": REBUILD,
    "shoal ssh NEW sudo tar -C / -x < saved.tar && shoal up": REBUILD,
    "shoal restore NAME": REBUILD,
    "scripts/check": CHECK,
    "scripts/test": ITSELF,
    "scripts/test tests/unit": COLLECT,
    "scripts/test --changed": CHOOSE,
    "scripts/matrix --for 60m": CHOOSE,
}
"""Every command in the documents, and how it is run. One that is not here fails a test."""


def commands(document: Path) -> list[list[str]]:
    """The commands of a document, block by block, without their comments."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", document.read_text(), re.DOTALL):
        lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
        found.append([re.sub(r"\s+# .*", "", line).strip() for line in lines])
    return found


def blocks(document: Path, kind: str) -> list[str]:
    """The blocks of a document that are fenced as `kind`."""
    return re.findall(rf"```{kind}\n(.*?)```", document.read_text(), re.DOTALL)


def plain_script() -> str:
    """The DDP script of the page on training."""
    [script] = blocks(TRAINING, "python")
    return script


def changed_script() -> str:
    """The plain script with the page's changes in it. What the page says is unchanged must be so."""
    [diff] = blocks(TRAINING, "diff")
    kept = "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("+"))
    assert kept == plain_script()
    return "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("-"))


def examples(document: Path) -> list[str]:
    """The YAML of a document."""
    return re.findall(r"```yaml\n(.*?)```", document.read_text(), re.DOTALL)
