"""One list of realistic products with packed matrices, for any number of rows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PackedCase:
    """x [num_rows, size_in] times matrices [parts, size_out, size_in], whose panels are their own."""

    name: str
    num_rows: int
    size_in: int
    size_out: int
    parts: int = 1

    def __str__(self) -> str:
        return self.name


CASES = (
    PackedCase("demo-qkv-1", 1, 84, 36, parts=3),  # the demo model: 84 is no multiple of any vector
    PackedCase("demo-qkv-16", 16, 84, 36, parts=3),
    PackedCase("demo-down-7", 7, 224, 84),
    PackedCase("an-input-too-many-5", 5, 7, 5),  # the last of pairs
    PackedCase("s-qkv-2", 2, 384, 128, parts=5),
    PackedCase("s-head-1", 1, 384, 4096),
    # More rows than an item has, and more inputs than one part of a panel has.
    PackedCase("s-down-200", 200, 2048, 384),
    PackedCase("long-sums-3", 3, 5001, 130),
)
