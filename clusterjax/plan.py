"""The selection plan: which examples are kept, in which cluster, with which share.

A plan is made once, saved, and used unchanged on any mesh (METHOD §3–4). On disk it is
a directory of `plan.parquet` (one row for each candidate, kept or not), `plan.json`
(shares, quotas, settings, fingerprints, checksum) and `centroids.npy`.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from clusterjax import errors, files

FORMAT = "clusterjax-plan"
FORMAT_VERSION = 1

PRUNED, RULE, MUST_KEEP, SOURCE_MINIMUM = range(4)
KEPT_BY_NAMES = ("pruned", "rule", "must_keep", "source_minimum")


@dataclasses.dataclass(frozen=True)
class SelectionPlan:
    """Candidates (rows with a feature), what became of them, and cluster shares.

    Candidate arrays have length n; kept arrays (properties) have length M and repeat an
    example `copies` times (more than once only with oversampling).

    Attributes:
      candidate_id: int64 [n], rows of the corpus, ascending.
      candidate_uid: str [n], stable ids.
      candidate_cluster: int32 [n].
      copies: int32 [n], 0 = pruned, 1 = kept.
      kept_by: int8 [n], index into `KEPT_BY_NAMES`.
      num_labels: int32 [n], label tokens.
      user_weight: float32 [n].
      source_id: int32 [n], index into `source_names`.
      distance: float32 [n], squared distance to the own centroid, NaN if unknown.
      norm: float32 [n], raw gradient norm, NaN if unknown.
      loss: float32 [n], mean loss, NaN if unknown.
      cluster_size: int64 [K], n_c, candidates of each cluster.
      cluster_share: float64 [K], π_c; sums to 1.
      quota: int64 [K], q_c, kept entries of each cluster.
      source_names: names of the sources.
      centroids: float32 [K, D], or [0, 0] when there are none.
      method: `cluster`, `full`, `random`, … (config key `selection.method`).
      weighting: `share`, `sqrt`, `uniform` or `none`.
      normalise: `token` or `example`.
      num_corpus: N, examples of the corpus.
      fingerprints: of data, features, clustering, model and config.
      settings: the selection settings that made the plan.
      notes: what the planner had to change or leave out, for people.
      herded_order: int64 [M] kept entries in herded order, or [0].
      herded_for: the settings that `herded_order` was made for.
    """

    candidate_id: np.ndarray
    candidate_uid: np.ndarray
    candidate_cluster: np.ndarray
    copies: np.ndarray
    kept_by: np.ndarray
    num_labels: np.ndarray
    user_weight: np.ndarray
    source_id: np.ndarray
    distance: np.ndarray
    norm: np.ndarray
    loss: np.ndarray
    cluster_size: np.ndarray
    cluster_share: np.ndarray
    quota: np.ndarray
    source_names: tuple[str, ...]
    centroids: np.ndarray
    method: str
    weighting: str
    normalise: str
    num_corpus: int
    fingerprints: dict[str, str]
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()
    herded_order: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.int64)
    )
    herded_for: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def entry(self) -> np.ndarray:
        """int64 [M], the candidate of each kept entry."""
        return np.repeat(np.arange(len(self.candidate_id)), self.copies)

    @functools.cached_property
    def example_id(self) -> np.ndarray:
        """int64 [M], rows of the corpus that are kept, ascending."""
        return self.candidate_id[self.entry]

    @functools.cached_property
    def uid(self) -> np.ndarray:
        """str [M]."""
        return self.candidate_uid[self.entry]

    @functools.cached_property
    def cluster_id(self) -> np.ndarray:
        """int32 [M]."""
        return self.candidate_cluster[self.entry]

    @functools.cached_property
    def copy_number(self) -> np.ndarray:
        """int64 [M], 0 for the first entry of an example, 1 for its first repeat, …"""
        first = np.cumsum(self.copies) - self.copies
        return np.arange(self.num_kept) - np.repeat(first, self.copies)

    @property
    def pruned_id(self) -> np.ndarray:
        """int64, candidates that are not kept."""
        return self.candidate_id[self.copies == 0]

    @property
    def corpus_fingerprint(self) -> str:
        """Fingerprint of the corpus that the plan was made from."""
        return self.fingerprints.get("data", "")

    @property
    def num_kept(self) -> int:
        """M."""
        return int(self.copies.sum())

    @property
    def num_clusters(self) -> int:
        """K."""
        return len(self.quota)

    @functools.cached_property
    def static_weight(self) -> np.ndarray:
        """float64 [M], w_i = M·π_c/q_c times the user's weight over its cluster mean.

        The best that one number per example can do in another trainer. It does not
        follow the step: see docs/plan.md for what it cannot carry.
        """
        if self.weighting == "none":
            weight = self.user_weight[self.entry].astype(np.float64)
            return weight / weight.mean()
        user = self.user_weight[self.entry].astype(np.float64)
        total = np.bincount(self.cluster_id, user, minlength=self.num_clusters)
        return (
            self.num_kept
            * self.cluster_share[self.cluster_id]
            * (user / total[self.cluster_id])
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides a schedule."""
        return files.hash_arrays(
            self.candidate_id,
            self.copies,
            self.candidate_cluster,
            self.user_weight,
            self.cluster_share,
            self.herded_order,
            f"{self.weighting}/{self.normalise}/{self.fingerprints.get('data', '')}",
        )

    def save(self, directory: epath.PathLike) -> None:
        """Writes the plan, every file whole or not at all.

        `plan.json` is written last and holds the checksums of the others, so `load`
        recognises a directory in which old and new files are mixed.
        """
        directory = epath.Path(directory)
        table = _serialise(self._table())
        centroids = _serialise_array(self.centroids)
        manifest = self._manifest()
        manifest["checksums"] = {
            "plan.parquet": files.hash_arrays(table),
            "centroids.npy": files.hash_arrays(centroids),
        }
        files.write_bytes(directory / "plan.parquet", table)
        files.write_bytes(directory / "centroids.npy", centroids)
        files.write_json(directory / "plan.json", manifest)

    @staticmethod
    def exists(directory: epath.PathLike) -> bool:
        """Whether `directory` holds a plan (its manifest is written last)."""
        return (epath.Path(directory) / "plan.json").exists()

    @classmethod
    def load(cls, directory: epath.PathLike) -> SelectionPlan:
        """Reads a plan that `save` wrote, and checks it.

        Raises:
          errors.PlanError: a file is missing, damaged or of another format.
        """
        directory = epath.Path(directory)
        manifest = _read_manifest(directory)
        parts = {
            name: _read_checked(directory / name, checksum)
            for name, checksum in manifest["checksums"].items()
        }
        # Without threads: Arrow's, at work on a Python object, could end the process
        # with an abort when it exits right after.
        source = pa.BufferReader(parts["plan.parquet"])
        table = pq.ParquetFile(source).read(use_threads=False)
        column = {name: table.column(name).to_numpy() for name in table.column_names}
        order = column.pop("herded_position")[column["copies"] > 0]
        uid = column.pop("uid").astype(str)
        plan = cls(
            candidate_uid=uid,
            candidate_id=column.pop("example_id"),
            candidate_cluster=column.pop("cluster_id"),
            centroids=np.load(io.BytesIO(parts["centroids.npy"])),
            herded_order=_order_of_positions(order, manifest["herded_for"]),
            cluster_size=np.array(manifest["cluster_size"], np.int64),
            cluster_share=np.array(
                [float.fromhex(share) for share in manifest["cluster_share_hex"]]
            ),
            quota=np.array(manifest["quota"], np.int64),
            source_names=tuple(manifest["source_names"]),
            notes=tuple(manifest["notes"]),
            **{name: manifest[name] for name in _PLAIN_FIELDS},
            **column,
        )
        if plan.fingerprint != manifest["fingerprint"]:
            raise errors.PlanError(
                f"{directory / 'plan.json'} does not fit its own fingerprint: shares or"
                " settings were edited; make the plan again"
            )
        return plan

    def _table(self) -> pa.Table:
        position = np.full(len(self.candidate_id), -1, np.int64)
        if len(self.herded_order):
            position[self.entry[self.herded_order]] = np.arange(self.num_kept)
        return pa.table(
            {
                "example_id": self.candidate_id,
                "uid": pa.array(self.candidate_uid.tolist(), pa.string()),
                "cluster_id": self.candidate_cluster,
                "copies": self.copies,
                "kept_by": self.kept_by,
                "num_labels": self.num_labels,
                "user_weight": self.user_weight,
                "source_id": self.source_id,
                "distance": self.distance,
                "norm": self.norm,
                "loss": self.loss,
                "herded_position": position,
            }
        )

    def _manifest(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "num_candidates": len(self.candidate_id),
            "num_kept": self.num_kept,
            "cluster_size": self.cluster_size,
            "cluster_share": self.cluster_share,
            # Decimal digits are for people; the hexadecimal ones are exact.
            "cluster_share_hex": [float(share).hex() for share in self.cluster_share],
            "quota": self.quota,
            "source_names": list(self.source_names),
            "notes": list(self.notes),
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
        }


_PLAIN_FIELDS = (
    "method",
    "weighting",
    "normalise",
    "num_corpus",
    "fingerprints",
    "settings",
    "herded_for",
)


def _serialise(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _serialise_array(values: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.save(sink, values)
    return sink.getvalue()


def _read_manifest(directory: epath.Path) -> dict[str, Any]:
    path = directory / "plan.json"
    if not path.exists():
        raise errors.PlanError(
            f"{directory} holds no plan (no plan.json); expected a directory written by"
            " SelectionPlan.save or the select stage"
        )
    try:
        manifest = files.read_json(path)
    except ValueError as error:
        raise errors.PlanError(f"{path} is damaged: {error}") from error
    if manifest.get("format") != FORMAT or (
        manifest.get("format_version") != FORMAT_VERSION
    ):
        raise errors.PlanError(
            f"{path} has format {manifest.get('format')!r} version"
            f" {manifest.get('format_version')!r}; this version reads {FORMAT!r}"
            f" version {FORMAT_VERSION}"
        )
    return manifest


def _read_checked(path: epath.Path, checksum: str) -> bytes:
    if not path.exists():
        raise errors.PlanError(f"{path} is missing; make the plan again")
    content = path.read_bytes()
    if files.hash_arrays(content) != checksum:
        raise errors.PlanError(
            f"{path} does not fit the checksum in plan.json: it was changed or is half"
            " written; make the plan again"
        )
    return content


def _order_of_positions(position: np.ndarray, herded_for: dict) -> np.ndarray:
    if not herded_for:
        return np.zeros(0, np.int64)
    return np.argsort(position, kind="stable")
