"""``python -m scale.nodes N FOLDER``: a Ray cluster of several nodes on this machine, until its input ends.

The first node has the controller and the ingress; each of the others has room for one replica (the resource ``engine``).
"""

import sys

from ray.cluster_utils import Cluster

MIB = 1 << 20


def main() -> None:
    n, folder = int(sys.argv[1]), sys.argv[2]
    common = {"num_gpus": 0, "object_store_memory": 80 * MIB, "include_dashboard": False}
    head = {**common, "num_cpus": 2, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(n):
        cluster.add_node(**common, num_cpus=1, resources={"engine": 1})
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
