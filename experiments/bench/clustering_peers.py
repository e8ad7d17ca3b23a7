"""Named peers of `experiments.bench.clustering`, each call in a process of its own.

Needs NumPy and the peer only (scikit-learn or faiss-cpu), not clusterjax:

    python clustering_peers.py PEER DATA.npy K SEED [STARTS.npy ITERATIONS]

Prints one line of JSON: wall and processor seconds of the fit, and the inertia; for
PEER `versions` those of the peers.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time

import numpy as np


def sklearn(values, clusters, seed, starts, iterations):
    """10 restarts with the defaults, or one run from given starts."""
    from sklearn import cluster

    if starts is None:
        model = cluster.KMeans(clusters, n_init=10, random_state=seed)  # pyright: ignore[reportArgumentType]
    else:
        model = cluster.KMeans(
            clusters,
            init=starts,
            n_init=1,  # pyright: ignore[reportArgumentType]
            max_iter=iterations,
            tol=0,  # pyright: ignore[reportArgumentType]
        )
    return lambda: model.fit(values).cluster_centers_


def faiss(values, clusters, seed, starts, iterations):
    """10 redos × 25 iterations on all rows."""
    import faiss

    def fit():
        model = faiss.Kmeans(
            values.shape[1],
            clusters,
            niter=25,
            nredo=10,
            seed=seed + 1,
            max_points_per_centroid=len(values),
        )
        model.train(values)
        return model.centroids

    return fit


def inertia(values, centers) -> float:
    """Sum of squared distances to the nearest centre."""
    total = 0.0
    for start in range(0, len(values), 8192):
        part = values[start : start + 8192]
        square = (part**2).sum(1)[:, None] + (centers**2).sum(1)[None]
        total += float(np.maximum(square - 2 * part @ centers.T, 0).min(1).sum())
    return total


def main() -> None:
    if sys.argv[1] == "versions":
        names = ("scikit-learn", "faiss-cpu")
        print(json.dumps({name: importlib.metadata.version(name) for name in names}))
        return
    peer, path, clusters, seed = sys.argv[1:5]
    values = np.load(path)
    starts, iterations = None, 0
    if len(sys.argv) > 5:
        starts, iterations = np.load(sys.argv[5]), int(sys.argv[6])
    fits = {"sklearn": sklearn, "faiss": faiss}
    fit = fits[peer](values, int(clusters), int(seed), starts, iterations)
    wall, processor = time.perf_counter(), time.process_time()
    centers = np.asarray(fit())
    result = {
        "wall": time.perf_counter() - wall,
        "processor": time.process_time() - processor,
        "inertia": inertia(values, centers),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
