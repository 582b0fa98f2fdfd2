"""Tensors of the wire's protobuf messages, both ways.

What arrives is only believed once its parts agree: a few bytes can claim any shape. Arrays are little-endian.

Shape legend: N rows, K columns, Z listed values of a sparse tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from rl.tinker.errors import InvalidRequestError

DTYPES: dict[int, np.dtype] = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: np.dtype("<i8")}
MASKED_LOGPROB = -99999.0
"""Of an empty cell of a top-k table, whose token id is 0."""


class Decoder:
    """Turns the tensors of one request into arrays, as long as they fit into `max_values` together."""

    def __init__(self, *, max_values: int) -> None:
        self._max_values = max_values
        self._num_values = 0

    def array(self, message: pb.Tensor, *, where: str) -> np.ndarray:
        """[N] or [N, K] float32 or int64; a sparse one made dense with zeros.

        Raises:
            InvalidRequestError: naming `where` and what does not agree.
        """
        if (dtype := DTYPES.get(message.dtype)) is None:
            raise InvalidRequestError(
                f"{where}.dtype: {_dtype_name(message.dtype)}, must be float32 or int64"
            )
        shape = tuple(message.shape)
        if len(shape) > 2 or not all(0 <= size <= self._max_values for size in shape):
            raise InvalidRequestError(
                f"{where}.shape: {list(shape)}, must be [N] or [N, K], each from 0 to {self._max_values}"
            )
        self._count(math.prod(shape), where=where)
        encoding = message.WhichOneof("encoding")
        if encoding == "sparse_csr":
            return _dense(message.sparse_csr, dtype=dtype, shape=shape, where=where)
        if encoding is None:
            raise InvalidRequestError(f"{where}: has neither dense nor sparse_csr values")
        values = from_bytes(message.dense, dtype, where=f"{where}.dense")
        if not shape:
            self._count(values.size, where=where)
            return values
        if values.size != math.prod(shape):
            raise InvalidRequestError(
                f"{where}.shape: {list(shape)} is of {math.prod(shape)} values, but there are {values.size}"
            )
        return values.reshape(shape)

    def _count(self, num_values: int, *, where: str) -> None:
        self._num_values += num_values
        if self._num_values > self._max_values:
            raise InvalidRequestError(
                f"{where}: with it the request's tensors have {self._num_values} values, more than the "
                f"{self._max_values} that one request may have; send fewer data at once"
            )


def from_bytes(data: bytes, dtype: np.dtype, *, where: str) -> np.ndarray:
    """A copy in this machine's order of bytes, of its own memory."""
    if len(data) % dtype.itemsize:
        raise InvalidRequestError(
            f"{where}: {len(data)} bytes are no whole number of {dtype.name} values of {dtype.itemsize} bytes"
        )
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))


def _dense(csr: pb.SparseCsr, *, dtype: np.dtype, shape: tuple[int, ...], where: str) -> np.ndarray:
    if len(shape) != 2:
        raise InvalidRequestError(f"{where}.shape: {list(shape)}, must be [N, K] of a sparse tensor")
    num_rows, num_columns = shape
    values_Z = from_bytes(csr.values, dtype, where=f"{where}.sparse_csr.values")
    starts = from_bytes(csr.crow_indices, np.dtype("<i8"), where=f"{where}.sparse_csr.crow_indices")
    columns_Z = from_bytes(csr.col_indices, np.dtype("<i8"), where=f"{where}.sparse_csr.col_indices")
    if starts.size != num_rows + 1 or starts[0] != 0 or starts[-1] != values_Z.size:
        raise InvalidRequestError(
            f"{where}.sparse_csr.crow_indices: must be {num_rows + 1} numbers from 0 to the number of "
            f"values, {values_Z.size}; there are {starts.size}"
        )
    counts_N = np.diff(starts)
    # Differences of numbers out of range could overflow into good ones.
    if (starts < 0).any() or (starts > values_Z.size).any() or (counts_N < 0).any():
        raise InvalidRequestError(f"{where}.sparse_csr.crow_indices: must never decrease")
    if columns_Z.size != values_Z.size:
        raise InvalidRequestError(
            f"{where}.sparse_csr.col_indices: {columns_Z.size} of them, but {values_Z.size} values"
        )
    if columns_Z.size and (columns_Z.min() < 0 or columns_Z.max() >= num_columns):
        raise InvalidRequestError(f"{where}.sparse_csr.col_indices: must be from 0 to {num_columns - 1}")
    rows_Z = np.repeat(np.arange(num_rows), counts_N)
    same_row = rows_Z[1:] == rows_Z[:-1]
    if (same_row & (columns_Z[1:] <= columns_Z[:-1])).any():
        raise InvalidRequestError(f"{where}.sparse_csr.col_indices: must increase within each row")
    dense_NK = np.zeros(shape, dtype.newbyteorder("="))
    dense_NK[rows_Z, columns_Z] = values_Z
    return dense_NK


def batched(arrays: Sequence[np.ndarray]) -> Iterator[tuple[int, pb.BatchedTensor]]:
    """Float32 arrays in messages that each hold neighbours of one trailing shape, with their number."""
    for trailing, group in groupby(arrays, key=lambda array: array.shape[1:]):
        members = [np.ascontiguousarray(array, "<f4") for array in group]
        ends = np.cumsum([0, *(array.nbytes for array in members)], dtype="<i8")
        yield (
            len(members),
            pb.BatchedTensor(
                data=b"".join(array.tobytes() for array in members),
                offsets=ends.tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=trailing,
            ),
        )


def _dtype_name(number: int) -> str:
    names = pb.DType.DESCRIPTOR.values_by_number
    return names[number].name if number in names else str(number)
