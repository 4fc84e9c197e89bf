"""Which arrays a TPU's program keeps in VMEM: read from the text of its optimized HLO.

The sizes of temporaries count HBM alone. A copy of a weight or of pages that XLA makes in VMEM is not among them: a
scan over layers whose `ragged_dot` copies 64 MiB of experts in each reports 0.15 MiB of temporaries on v5e.
"""

import re

from jaxvllm.planner.collectives import array_bytes

# `bf16[8,128]{1,0:T(8,128)(2,1)S(1)}`: the array, then its layout, whose memory space 1 is VMEM.
_IN_VMEM = re.compile(r"\b(\w+\[[\d,]*\])\{[^}]*S\(1\)")


def largest_vmem_array(hlo: str) -> tuple[int, str]:
    """Bytes of the largest single array in VMEM, and its type; 0 and "" when there is none.

    What a Pallas kernel allocates for itself is not among them, and on a GPU memory space 1 means something else.
    """
    return max(((array_bytes(array), array) for array in set(_IN_VMEM.findall(hlo))), default=(0, ""))
