"""The shape of the device mesh, which is known before any device is found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshShape:
    """A mesh of `data` replicas of the model, each of `stages` parts of its layers, each spread over `model` devices.

    The command line writes it as `1x8`, or with several stages as `2x1x4`: stages, replicas, devices of each.
    """

    data: int
    model: int
    stages: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.model, self.stages) < 1:
            raise ValueError(f"mesh {self} has an empty axis: every side of DxM or PxDxM is at least 1")

    def __str__(self) -> str:
        return f"{self.data}x{self.model}" if self.stages == 1 else f"{self.stages}x{self.data}x{self.model}"

    @property
    def num_devices(self) -> int:
        return self.data * self.replica_devices

    @property
    def replica_devices(self) -> int:
        """The devices that run one replica together."""
        return self.stages * self.model

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Returns the shape that `DxM` or `PxDxM` names. Raises ValueError that says what is wrong with other texts."""
        sides = text.split("x")
        # isascii, because isdigit alone also accepts digits that int() refuses.
        if len(sides) not in (2, 3) or not all(side.isascii() and side.isdigit() for side in sides):
            raise ValueError(
                f"mesh {text!r} is not DxM: write replicas x devices of each, for example 1x8, or PxDxM with stages "
                "before them, for example 2x1x4"
            )
        *stages, data, model = map(int, sides)
        return cls(data, model, *stages)
