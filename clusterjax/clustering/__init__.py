"""K-means on gradient features: seeding, Lloyd's iterations, floor and capacity."""

from clusterjax.clustering.capacity import assign_with_capacity
from clusterjax.clustering.matching import match_centroids
from clusterjax.clustering.minibatch import mini_batch_kmeans
from clusterjax.clustering.num_clusters import KChoice, choose_k, silhouette
from clusterjax.clustering.pipeline import apply_capacity, apply_floor, fit
from clusterjax.clustering.solver import kmeans

__all__ = [
    "KChoice",
    "apply_capacity",
    "apply_floor",
    "assign_with_capacity",
    "choose_k",
    "fit",
    "kmeans",
    "match_centroids",
    "mini_batch_kmeans",
    "silhouette",
]
