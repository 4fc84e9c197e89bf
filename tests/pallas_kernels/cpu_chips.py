"""This machine's CPU, the same with narrower vectors, which it computes in parts of its registers, and with AMX."""

from collections.abc import Sequence
from dataclasses import replace

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.host import host_chip


def narrower(lanes: int) -> CpuChip:
    """Returns this CPU with vectors of at most `lanes` float32."""
    dropped = {16: (), 8: ("avx512",), 4: ("avx512", "avx2")}[lanes]
    chip = host_chip()
    kept = [feature for feature in chip.features.split(",") if not feature[1:].startswith(dropped)]
    return replace(chip, features=",".join(kept))


CPU_CHIPS = {chip.lanes: chip for chip in (narrower(lanes) for lanes in (16, 8, 4))}
# The widest, which emulates AMX.
WITH_AMX = replace(host_chip(), emulated=("amx-tile", "amx-bf16", "amx-int8"))
# And this CPU itself, if it has AMX.
AMX_CHIPS = (WITH_AMX, host_chip()) if host_chip().has_bf16_tiles and host_chip().has_byte_tiles else (WITH_AMX,)
# One that has AMX, by the name that LLVM gave it.
SAPPHIRE_RAPIDS = CpuChip(
    name="rocketlake",
    triple="x86_64-unknown-linux-gnu",
    features="+avx,+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512bf16,+avx512vnni,+amx-tile,+amx-bf16,+amx-int8",
)


def in_pairs[Case, Way](
    cases: Sequence[Case], ways: Sequence[Way], dtypes: Sequence[str] = ("float32", "bfloat16")
) -> list[tuple[Case, str, Way]]:
    """Returns every pair of a case, a way to compute it and a dtype. Each case has all ways, and these dtypes by turns.

    A kernel takes shapes, widths of vectors and dtypes apart, so that half of all triples show what all of them do.
    """
    return [
        (case, dtypes[(number + at) % len(dtypes)], way)
        for number, case in enumerate(cases)
        for at, way in enumerate(ways)
    ]
