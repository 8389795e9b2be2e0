"""Every file that Slurm reads, for clusters of many kinds, as whole-file goldens."""

from slurm_clusters import CLUSTERS, files
from tests.goldens import HERE, assert_golden
from tests.support.cases import cases


@cases("name", *CLUSTERS)
def test_every_file_of_a_cluster_matches_its_golden(name: str) -> None:
    texts = files(CLUSTERS[name])
    for file, text in texts.items():
        assert_golden(f"slurm/{name}/{file}", text)
    assert set(texts) == {path.name for path in (HERE / "slurm" / name).iterdir()}
