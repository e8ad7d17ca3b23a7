"""K-means on gradient features: seeding, Lloyd's iterations, floor and capacity."""

from clusterjax.clustering.capacity import assign_with_capacity
from clusterjax.clustering.pipeline import apply_capacity, apply_floor, fit
from clusterjax.clustering.solver import kmeans

__all__ = ["apply_capacity", "apply_floor", "assign_with_capacity", "fit", "kmeans"]
