"""What a run leaves for later: features and clusters on disk, and back."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
from etils import epath

from clusterjax import datatypes, files


def save_features(features: datatypes.GradientFeatures, folder: epath.PathLike) -> None:
    """Writes `values.npy` (memory-mapped on reading) and `features.npz`."""
    if jax.process_index() != 0:
        return
    folder = epath.Path(folder)
    values = np.asarray(features.values)
    _write_array(folder / "values.npy", values)
    _write_fields(folder / "features.npz", features, skip=("values",))


def load_features(folder: epath.PathLike) -> datatypes.GradientFeatures:
    """Reads what `save_features` wrote."""
    folder = epath.Path(folder)
    values = _read_array(folder / "values.npy")
    fields = _read_fields(folder / "features.npz")
    fields["rejects"] = tuple(datatypes.Reject(**r) for r in fields["rejects"])
    fields["source_names"] = tuple(fields["source_names"])
    return datatypes.GradientFeatures(values=values, **fields)


def save_clustering(clustering: datatypes.Clustering, folder: epath.PathLike) -> None:
    """Writes `clusters.npz`."""
    if jax.process_index() == 0:
        _write_fields(epath.Path(folder) / "clusters.npz", clustering)


def load_clustering(folder: epath.PathLike) -> datatypes.Clustering:
    """Reads what `save_clustering` wrote."""
    return datatypes.Clustering(**_read_fields(epath.Path(folder) / "clusters.npz"))


def _read_array(path: epath.Path) -> np.ndarray:
    """Memory-mapped where it is local."""
    if files.is_local(path):
        return np.load(path, mmap_mode="r")
    with path.open("rb") as file:
        return np.load(file)


def _write_array(path: epath.Path, values: np.ndarray) -> None:
    def write(temporary: epath.Path) -> None:
        with temporary.open("wb") as file:
            np.save(file, values)

    files.write_with(path, write)


def _write_fields(path: epath.Path, value: object, skip: tuple[str, ...] = ()) -> None:
    """Arrays as arrays, all other fields as one JSON text beside them."""
    arrays, others = {}, {}
    for field in dataclasses.fields(value):  # pyright: ignore[reportArgumentType]
        item = getattr(value, field.name)
        if field.name in skip:
            continue
        if isinstance(item, np.ndarray):
            arrays[field.name] = item
        elif isinstance(item, tuple) and item and dataclasses.is_dataclass(item[0]):
            others[field.name] = [dataclasses.asdict(part) for part in item]
        else:
            others[field.name] = item

    def write(temporary: epath.Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, _json=np.array(json.dumps(others)), **arrays)

    files.write_with(path, write)


def _read_fields(path: epath.Path) -> dict:
    with path.open("rb") as file, np.load(file) as stored:
        fields = {name: stored[name] for name in stored.files if name != "_json"}
        return fields | json.loads(str(stored["_json"]))
