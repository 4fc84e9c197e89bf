"""The rule that all sizes and factors of a model obey."""

import math


def require_positive(value: object, names: str) -> None:
    """Raises ValueError if one of the attributes in `names` is neither a finite number above zero nor None."""
    for name in names.split():
        number = getattr(value, name)
        if number is not None and not (math.isfinite(number) and number > 0):
            raise ValueError(f"{name} must be positive, not {number}")
