"""Sizes of rows of Parquet once they are decoded: one value of a dictionary may stand for many rows."""

from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gateway.cli.embed.plan import EmbedFailed, Source

# pyarrow has no types.
ColumnFacts: TypeAlias = Any
Array: TypeAlias = Any

# As the file states its sizes, and at most with all values of a dictionary as long as its longest.
BATCH_BYTES, BATCH_BYTES_MAX = 8 * 1024 * 1024, 256 * 1024 * 1024
BATCH_ROWS_MAX = 4096
ROW_BYTES_MAX = 1024 * 1024 * 1024
# A row group that is larger than a batch may stand for this many times its bytes in the file.
RATIO_MAX = 10_000
NUMBER_BYTES = 8


class RowSizes:
    """Sizes of the rows of a file. Raises: EmbedFailed; pyarrow's errors if the file is damaged."""

    def __init__(self, source: Source, file: pq.ParquetFile, buffer_bytes: int) -> None:
        self._source = source
        self._metadata = file.metadata
        self._names = self._names_of_dictionaries()
        self._encoded = pq.ParquetFile(
            source.path, read_dictionary=self._names, buffer_size=buffer_bytes, pre_buffer=False
        )

    def close(self) -> None:
        """Close the file."""
        self._encoded.close()

    def _names_of_dictionaries(self) -> list[str]:
        """Return the columns of bytes that have a dictionary in any row group."""
        found: dict[str, None] = {}
        for group in range(self._metadata.num_row_groups):
            facts = self._metadata.row_group(group)
            for index in range(facts.num_columns):
                column = facts.column(index)
                if column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page:
                    found[column.path_in_schema] = None
        return list(found)

    def batch_rows(self, group: int) -> int:
        """Return how many rows of a row group may be decoded at once."""
        facts = self._metadata.row_group(group)
        rows = max(1, facts.num_rows)
        columns = [facts.column(index) for index in range(facts.num_columns)]
        self._check(group, rows, sum(column.num_values * NUMBER_BYTES // 2 for column in columns))
        longest = self._longest(group)
        decoded = sum(self._decoded_bytes(index, column, longest) for index, column in enumerate(columns))
        self._check(group, rows, decoded)
        stored = max(1, sum(column.total_compressed_size for column in columns))
        if decoded > BATCH_BYTES_MAX and decoded > RATIO_MAX * stored:
            raise EmbedFailed(
                f"{self._source.path}: {stored:,} bytes of row group {group + 1} stand for {decoded:,} bytes "
                f"of rows; at most {RATIO_MAX:,} times as many are read"
            )
        by_file = BATCH_BYTES // max(1, facts.total_byte_size // rows)
        by_values = BATCH_BYTES_MAX // max(1, decoded // rows)
        return int(max(1, min(BATCH_ROWS_MAX, by_file, by_values)))

    def _check(self, group: int, rows: int, decoded: int) -> None:
        if decoded // rows > ROW_BYTES_MAX:
            raise EmbedFailed(
                f"{self._source.path}: a row of row group {group + 1} has {decoded // rows:,} bytes; at most "
                f"{ROW_BYTES_MAX:,} are read"
            )

    def _decoded_bytes(self, index: int, column: ColumnFacts, longest: dict[str, int]) -> int:
        if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
            return int(column.num_values * self._metadata.schema.column(index).length)
        if column.physical_type != "BYTE_ARRAY":
            return int(column.num_values * NUMBER_BYTES)
        of_dictionary = longest.get(column.path_in_schema, 0) if column.has_dictionary_page else 0
        return int(column.total_uncompressed_size + column.num_values * of_dictionary)

    def _longest(self, group: int) -> dict[str, int]:
        """Return the length of the longest value in each dictionary that the first row needs."""
        if not self._names:
            return {}
        # The dictionary is read whole with the first row. Other rows stay encoded, and are not read.
        batch = next(self._encoded.iter_batches(1, row_groups=[group], columns=self._names), None)
        longest: dict[str, int] = {}
        for name, column in zip(() if batch is None else batch.schema.names, batch or (), strict=False):
            for path in self._names:
                if path == name or path.startswith(f"{name}."):
                    found = _dictionaries(column)
                    longest[path] = max((_longest_value(values) for values in found), default=0)
        return longest


def _dictionaries(column: Array) -> list[Array]:
    """Return the dictionaries in a column, which may have lists and structs around them."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return [column.dictionary]
    if pa.types.is_struct(kind):
        return [found for index in range(kind.num_fields) for found in _dictionaries(column.field(index))]
    if pa.types.is_map(kind):
        return [*_dictionaries(column.keys), *_dictionaries(column.items)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _dictionaries(column.values)
    return []


def _longest_value(values: Array) -> int:
    return pc.max(pc.binary_length(values)).as_py() or 0
