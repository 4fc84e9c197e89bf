"""One list of realistic products: matrices of models and the numbers of rows that steps have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MatmulCase:
    """x [rows, in] times a matrix [out, in]."""

    name: str
    num_rows: int
    size_in: int
    size_out: int

    def __str__(self) -> str:
        return self.name


# in, out
_MATRICES = {
    "demo-qkv": (84, 108),  # the demo model: 84 is no multiple of any vector
    "demo-down": (224, 84),
    "narrow": (7, 5),
    "narrower": (9, 3),
    "s-qkv": (384, 640),
    "s-down": (2048, 384),
    "0.6b-o": (2048, 1024),
}
# Around the sizes of tiles, and a chunk of a prompt.
_ROWS = (1, 2, 3, 4, 7, 16, 33)

CASES = tuple(
    MatmulCase(f"{name}-{rows}", rows, size_in, size_out)
    for name, (size_in, size_out) in _MATRICES.items()
    for rows in _ROWS
)
