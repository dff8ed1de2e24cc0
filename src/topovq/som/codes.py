"""What every estimator here shares: the door for data, using the codes, clusters and labels of codes, saving."""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import scipy.sparse
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.utils.validation import (
    _check_n_features,
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from topovq.distributed import pick_device
from topovq.ops.search import check_metric
from topovq.quantizers.arguments import refuse_arguments
from topovq.som import saving
from topovq.som.checks import check_choice, checked_tensor, like_input
from topovq.som.passes import Passes, Scaling, TablePasses, check_size, check_weight, table_of
from topovq.som.questions import Closest, Errors
from topovq.som.rows import ReadPasses, Rows, as_rows, is_batches
from topovq.som.tables import DenseTable, SparseTable, Table

CLUSTERINGS = ("agglomerative", "kmeans")
ENGINES = ("local", "ray")


class CodesEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """An estimator whose fitted state is codes [K, D].

    It is a transformer (X to the distances to all codes), and `predict` gives the closest code. It is not one of
    scikit-learn's clusterers: a code is a place, many are close to each other, and some may have no sample; clusters
    are what `cluster` makes of them.
    """

    codes_: np.ndarray
    labels_: np.ndarray
    quantization_error_: float
    quantization_errors_: np.ndarray
    n_features_in_: int
    mean_: np.ndarray  # of an estimator that standardizes
    scale_: np.ndarray
    metric: str = "euclidean"
    tol: float | None = None
    device: str | torch.device = "auto"
    n_jobs: int | None = None
    engine: str = "local"

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        parameters = inspect.signature(cls).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            unknown = {name: value for name, value in options.items() if name not in parameters}
            refuse_arguments(cls.__name__, unknown, {}, cls)  # with the spelling that was meant
        return super().__new__(cls)

    def fit(self, X: Any, y: Any = None) -> Self:
        raise NotImplementedError

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        raise NotImplementedError

    def predict(self, X: Any) -> Any:
        """The closest code of each sample, int64 [N]; a tensor for a tensor."""
        return like_input(self._closest(X), X)

    def transform(self, X: Any) -> Any:
        """The distance of each sample to each code, [N, K], in the metric the codes were fitted with."""
        table = self._fitted_table(X)
        with self._threads():
            return like_input(table.distances(self._codes(table), self.metric), X)

    def fit_predict(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """`fit(X).labels_`; of a table that is read, whose labels a fit does not keep, `fit(X).predict(X)`."""
        self.fit(X, y, **fit_params)
        return like_input(torch.from_numpy(self.labels_), X) if hasattr(self, "labels_") else self.predict(X)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Minus the mean distance of a sample to its closest code: higher is better."""
        passes = self._fitted_passes(X, sample_weight)
        with self._threads():
            errors = passes.added(Errors(self._codes(passes), self.metric))
        check_weight(errors)
        return -float(errors["error"] / errors["weight"])

    # Fitting

    def _took_batches(self, X: Any, sample_weight: Any) -> bool:
        """Whether X was an iterable of batches (a generator, a DataLoader); each then went to `partial_fit`."""
        if not is_batches(X):
            rows = as_rows(X)
            if rows is not None and not isinstance(X, np.memmap):
                raise TypeError(
                    f"{rows.source!r:.80} is read in blocks, which `fit` can do: partial_fit takes one batch, such as "
                    "an array, or an iterable of batches"
                )
            return False
        if sample_weight is not None:
            raise ValueError("sample_weight goes with one batch, but X is an iterable of them: call once for each")
        empty = True
        for batch in X:
            # A DataLoader over a TensorDataset gives lists: the data, then perhaps labels.
            labelled = isinstance(batch, (list, tuple)) and len(batch) > 0 and isinstance(batch[0], Tensor)
            self.partial_fit(batch[0] if labelled else batch)
            empty = False
        if empty:
            raise ValueError("the iterable of batches is empty: expected at least one batch")
        return True

    def _forget(self) -> None:
        """Drop what an earlier fit left, labels and clusters of its codes included."""
        from_this_data = ("n_features_in_", "feature_names_in_")  # set while X was checked, before the start
        for name in [name for name in vars(self) if name.endswith("_") and name not in from_this_data]:
            delattr(self, name)

    def _converged(self) -> bool:
        """Whether the last pass lowered the quantization error by less than `tol` of it."""
        if self.tol is None or len(self.quantization_errors_) < 2:
            return False
        before, now = self.quantization_errors_[-2:]
        return bool(before - now < self.tol * abs(before))

    # Clusters and labels of codes

    def cluster(self, n_clusters: int, method: str = "agglomerative") -> np.ndarray:
        """Put the codes into clusters, int64 [K], kept as `code_clusters_`; `predict_cluster` gives those of samples.

        method  "agglomerative" (Ward's), or "kmeans"
        """
        check_is_fitted(self, "codes_")
        check_choice("method", method, CLUSTERINGS)
        if not isinstance(n_clusters, (int, np.integer)) or not 1 <= n_clusters <= len(self.codes_):
            raise ValueError(
                f"n_clusters={n_clusters!r} must be an int from 1 to {len(self.codes_)}, the codes there are"
            )
        codes = self.codes_
        if self.metric == "cosine":  # which sees directions alone
            codes = codes / np.linalg.norm(codes, axis=1, keepdims=True).clip(np.finfo(codes.dtype).tiny)
        if method == "kmeans":
            made = KMeans(n_clusters, n_init=10, random_state=0).fit(codes)
        else:
            made = AgglomerativeClustering(n_clusters).fit(codes)
        self.code_clusters_ = made.labels_.astype(np.int64)
        return self.code_clusters_

    def predict_cluster(self, X: Any) -> Any:
        """The cluster of each sample, int64 [N]: that of its closest code."""
        check_is_fitted(self, "code_clusters_", msg="call cluster(n_clusters) before predict_cluster")
        return self._of_winner(self.code_clusters_, X)

    def label(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Give each code the class that most of its samples have; `predict_label` then gives that of new ones.

        A code without samples takes the label of the closest code that has some. Kept as `code_labels_` [K] and
        `class_shares_` [K, classes], which is 0 for codes without samples; `classes_` are their names.
        """
        passes = self._fitted_passes(X, sample_weight)
        y = column_or_1d(y.cpu().numpy() if isinstance(y, Tensor) else y)
        self.classes_, class_N = np.unique(y, return_inverse=True)
        counts = np.zeros((len(self.codes_), len(self.classes_)))
        done = 0
        with self._threads():
            for table, weight_N in passes:
                index_N = table.closest(self._codes(table), self.metric)[0].cpu().numpy()
                class_n = class_N[done : done + table.n]
                done += table.n
                if len(class_n) == table.n:
                    np.add.at(counts, (index_N, class_n), weight_N.double().cpu().numpy())
        if len(y) != done:
            raise ValueError(f"y has {len(y)} entries, but X has {done} samples: expected one label for each")
        total = counts.sum(1, keepdims=True)
        self.class_shares_ = counts / np.where(total > 0, total, 1)
        labelled = np.flatnonzero(total > 0)
        codes = torch.from_numpy(self.codes_)
        borrowed = DenseTable(codes).closest(codes[labelled], self.metric)[0].numpy()
        source = np.where(total[:, 0] > 0, np.arange(len(codes)), labelled[borrowed])
        self.code_labels_ = self.classes_[counts[source].argmax(1)]
        return self

    def predict_label(self, X: Any) -> Any:
        """The label of each sample's closest code, [N]."""
        check_is_fitted(self, "code_labels_", msg="call label(X, y) before predict_label")
        return self._of_winner(self.code_labels_, X)

    def _of_winner(self, value_K: np.ndarray, X: Any) -> Any:
        value_N = value_K[self._closest(X).cpu().numpy()]
        numeric = np.issubdtype(value_N.dtype, np.number)
        return like_input(torch.from_numpy(value_N), X) if isinstance(X, Tensor) and numeric else value_N

    def _closest(self, X: Any) -> Tensor:
        """The closest code of each row."""
        passes = self._fitted_passes(X)
        with self._threads():
            return torch.cat([index_N for index_N, _ in passes.told(Closest(self._codes(passes), self.metric))])

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the parameters and the fitted state as one safetensors file, whole or not at all."""
        check_is_fitted(self)
        saving.save(self, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The estimator that `save` wrote."""
        return saving.load(cls, Path(path))

    # The door for data

    def _table(self, X: Any, *, reset: bool) -> Table:
        """X checked and wrapped, all of it; `reset` where this data says how many features there are."""
        rows = as_rows(X)
        if rows is not None and not isinstance(X, np.memmap):
            raise TypeError(
                f"{rows.source!r:.80} is read in blocks, which `predict` can do, and `fit` of a SelfOrganizingMap with "
                "rule='batch' or of a NeuralGas: this takes an array"
            )
        x_ND = self._checked(X, reset=reset)
        if not isinstance(x_ND, Tensor):
            return SparseTable(x_ND)
        return table_of(x_ND if reset else self._scaled(x_ND))

    def _passes(self, X: Any, sample_weight: Any = None, *, reset: bool) -> Passes:
        """X checked and cut into blocks, or about to be read in such."""
        check_choice("engine", self.engine, ENGINES)
        rows = as_rows(X)
        if rows is not None:
            return self._read(rows, sample_weight, reset=reset)
        x_ND = self._checked(X, reset=reset)
        if self.engine == "ray":
            if not isinstance(x_ND, Tensor):
                raise ValueError("engine='ray' takes no sparse matrix: make it dense, or use engine='local'")
            weights = self._weights(sample_weight, X, DenseTable(x_ND)).cpu().numpy()
            names = getattr(self, "feature_names_in_", None)
            passes = self._read(Rows(x_ND.cpu().numpy()), weights, reset=reset)
            if names is not None:  # an array in parts has none
                self.feature_names_in_ = names
            return passes
        if not isinstance(x_ND, Tensor):
            table = SparseTable(x_ND)
            return TablePasses([table], [self._weights(sample_weight, X, table)])
        weight_N = self._weights(sample_weight, X, DenseTable(x_ND))
        return TablePasses.cut(x_ND if reset else self._scaled(x_ND), weight_N)

    def _read(self, rows: Rows, sample_weight: Any, *, reset: bool) -> Passes:
        check_metric(self.metric)
        if sample_weight is not None and rows.weight is not None:
            raise ValueError(
                f"weights were given twice, as sample_weight and as weight={rows.weight!r}: give one of them"
            )
        if isinstance(sample_weight, str):
            rows, sample_weight = rows.weighted(sample_weight), None
        reader = rows.reader(None if reset else getattr(self, "feature_names_in_", None))
        if reset:
            self.n_features_in_ = reader.dim
            if reader.names is not None:
                self.feature_names_in_ = np.array(reader.names, dtype=object)
            elif hasattr(self, "feature_names_in_"):
                del self.feature_names_in_
        elif reader.dim != self.n_features_in_:
            raise ValueError(
                f"{reader.name} has {reader.dim} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input"
            )
        device = self._device()
        if reader.device is not None and self.device == "auto":
            device = reader.device
        if sample_weight is not None:
            sample_weight = np.asarray(sample_weight, dtype=np.float64)
            if sample_weight.ndim != 1:
                raise ValueError(f"sample_weight of shape {sample_weight.shape} must have one entry for each row")
        passes = ReadPasses(rows, reader, device, sample_weight, self._scaled if not reset else lambda x_ND: x_ND)
        if self.engine == "local":
            return passes
        from topovq.som.ray_passes import RayPasses

        return RayPasses(passes, reader.names, str(self.device))

    def _device(self) -> torch.device:
        """Where rows go; with "auto" tensors stay where they are. For a cluster they are on the CPU: it may have GPUs
        where this machine has none."""
        return torch.device("cpu") if self.engine == "ray" else pick_device(str(self.device), None)

    def _scaled(self, x_ND: Tensor) -> Tensor:
        """Rows as the codes were fitted to them."""
        if not hasattr(self, "scale_"):
            return x_ND
        return Scaling(torch.from_numpy(self.mean_), torch.from_numpy(self.scale_))(x_ND)

    def _checked(self, X: Any, *, reset: bool) -> Any:
        """X as a tensor on the device, or as a CSR matrix."""
        check_metric(self.metric)
        device = self._device()
        if isinstance(X, Tensor):
            x_ND = checked_tensor(X)
            _check_n_features(self, x_ND, reset=reset)
            return x_ND.to(device) if self.device != "auto" else x_ND
        X = validate_data(
            self, X, reset=reset, accept_sparse="csr", dtype=[np.float64, np.float32], order="C",
            ensure_all_finite=True if scipy.sparse.issparse(X) else "allow-nan",
        )  # fmt: skip
        if scipy.sparse.issparse(X):
            check_size(torch.from_numpy(X.data))
            return X
        with warnings.catch_warnings():  # torch warns of arrays that are read-only: nothing here writes to them
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(X).to(device)

    def _fitted_table(self, X: Any) -> Table:
        check_is_fitted(self, "codes_")
        return self._table(X, reset=False)

    def _fitted_passes(self, X: Any, sample_weight: Any = None) -> Passes:
        check_is_fitted(self, "codes_")
        return self._passes(X, sample_weight, reset=False)

    def _weights(self, sample_weight: Any, X: Any, table: Table) -> Tensor:
        """weight_N, on the device and in the type of the table; a sample of weight 2 counts as two."""
        if sample_weight is None:
            return torch.ones(table.n, dtype=table.dtype, device=table.device)
        if isinstance(sample_weight, Tensor):
            sample_weight = sample_weight.detach().cpu().numpy()
        rows = np.empty((table.n, 1)) if isinstance(X, Tensor) else X
        weight = _check_sample_weight(sample_weight, rows, dtype=np.float64, ensure_non_negative=True)
        return torch.from_numpy(weight).to(device=table.device, dtype=table.dtype)

    def _codes(self, table: Table | Passes) -> Tensor:
        return torch.from_numpy(self.codes_).to(device=table.device, dtype=table.dtype)

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """n_jobs threads within; None leaves torch's number alone, -1 takes every core."""
        if self.n_jobs is None:
            yield
            return
        if not isinstance(self.n_jobs, (int, np.integer)) or self.n_jobs == 0:
            raise ValueError(f"n_jobs={self.n_jobs!r} must be None, a number of threads, or -1 for every core")
        before = torch.get_num_threads()
        cores = os.cpu_count() or 1
        torch.set_num_threads(int(self.n_jobs) if self.n_jobs > 0 else max(1, cores + 1 + int(self.n_jobs)))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @property
    def _n_features_out(self) -> int:
        return len(self.codes_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
