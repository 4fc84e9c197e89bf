"""The shape of the device mesh, which is known before any device is found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshShape:
    """A mesh of `data` replicas of the model, each spread over `model` devices. The command line writes it as `1x8`."""

    data: int
    model: int

    def __post_init__(self) -> None:
        if self.data < 1 or self.model < 1:
            raise ValueError(f"mesh {self} has an empty axis: both sides of DxM are at least 1")

    def __str__(self) -> str:
        return f"{self.data}x{self.model}"

    @property
    def num_devices(self) -> int:
        return self.data * self.model

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Returns the shape that `DxM` names. Raises ValueError that says what is wrong with any other text."""
        sides = text.split("x")
        # isascii, because isdigit alone also accepts digits that int() refuses.
        if len(sides) != 2 or not all(side.isascii() and side.isdigit() for side in sides):
            raise ValueError(f"mesh {text!r} is not DxM: write replicas x devices of each, for example 1x8")
        return cls(int(sides[0]), int(sides[1]))
