"""``python -m support.nodes N``: a Ray cluster of several nodes on this machine, until its input ends.

The first node has the controller and the ingress; each of the others has room for one replica (the resource ``engine``).
Every file of Ray lies in the folder that ``RAY_TMPDIR`` names.
"""

import sys

from ray.cluster_utils import Cluster

MIB = 1 << 20


def main() -> None:
    n = int(sys.argv[1])
    common = {"num_gpus": 0, "object_store_memory": 80 * MIB, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "num_cpus": 2})
    for _ in range(n):
        cluster.add_node(**common, num_cpus=1, resources={"engine": 1})
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
