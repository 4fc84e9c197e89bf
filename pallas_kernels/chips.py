"""Facts of the chips that we compile for. The tile models of kernels, the planner and rooflines use them.

Every number is of one JAX device, which is not always a chip: a v5p device is both TensorCores of a chip (megacore),
a v7x device is one of the two, with half of the memory and rates. Rates are the published peaks, dense; sizes are what
a program can really use. Nothing here asks for a device, so kernels take a chip as an argument and compile anywhere.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

KIB = 2**10
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class TpuChip:
    """One TPU device. The generation alone tells TPUs apart, so each name has one device kind."""

    name: str
    device_kind: str  # `jax.Device.device_kind`
    hbm_bytes: int  # of the whole device, after what the runtime keeps for itself
    hbm_bandwidth: float  # bytes/s, of the whole device
    bf16_flops: float  # FLOP/s, of the whole device
    link_bandwidth: float  # bytes/s that a chip sends to one neighbour
    devices_per_chip: int
    num_cores: int  # TensorCores in the device
    vmem_bytes: int  # of one TensorCore: the most that a kernel's buffers and the compiler's own may take together
    smem_bytes: int  # of one TensorCore
    computes_bf16: bool  # whether its vector unit does. Matrix units of all do
    multiplies: tuple[str, ...]  # the dtypes of eight bits that its matrix unit multiplies

    def ring_bandwidth(self, num_chips: int) -> float:
        """Returns the bytes/s that each of the chips sends when they form a ring that is used in both directions."""
        return self.link_bandwidth * (2 if num_chips > 2 else 1)  # two chips have one link between them


@dataclass(frozen=True, kw_only=True)
class GpuChip:
    """One NVIDIA GPU. Cards that share a name but not these facts (PCIe, NVL, MIG slices) are not this chip."""

    name: str
    device_kind: str  # `jax.Device.device_kind`
    compute_capability: tuple[int, int]
    hbm_bytes: int
    hbm_bandwidth: float  # bytes/s
    bf16_flops: float  # FLOP/s, with sums in float32; of float16 where it does not multiply bfloat16
    link_bandwidth: float  # bytes/s that it sends to the other GPUs of its machine
    num_sms: int
    clock_ghz: float  # boost
    fp32_lanes_per_sm: int
    threads_per_sm: int
    shared_memory_per_block: int  # bytes, with the opt-in above 48 KiB that every kernel of ours takes
    shared_memory_per_sm: int  # bytes
    l2_bytes: int
    devices_per_chip: ClassVar[int] = 1

    @property
    def ptx_target(self) -> str:
        """The name of its generation in PTX, such as sm_89.

        From Hopper on, instructions that only one generation has (wgmma, tcgen05) need the suffix a: sm_90a.
        """
        major, minor = self.compute_capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @property
    def computes_bf16(self) -> bool:
        """Whether its matrix units multiply bfloat16, as those of all but Turing do."""
        return self.compute_capability >= (8, 0)

    @property
    def has_async_copies(self) -> bool:
        """Whether threads copy into shared memory and go on (`cp.async`), as they do on all but Turing."""
        return self.compute_capability >= (8, 0)

    @property
    def has_copy_engine(self) -> bool:
        """Whether it copies tiles into shared memory by itself (TMA), and tells by a barrier when they are there."""
        return self.compute_capability >= (9, 0)

    def ring_bandwidth(self, num_chips: int) -> float:
        """Returns the bytes/s that each GPU sends when they form a ring: a switch gives any number all of its links."""
        return self.link_bandwidth


@dataclass(frozen=True, kw_only=True)
class CpuChip:
    """A CPU as LLVM sees it. `pallas_kernels.cpu.host` finds this machine's."""

    name: str  # LLVM's name of the CPU, such as znver4
    triple: str  # such as x86_64-unknown-linux-gnu
    features: str  # LLVM's, with signs: +avx2,-avx512f
    # Features that it lacks and that kernels use all the same: their instructions become other code, which computes the
    # same. Tests run the kernels of other CPUs so.
    emulated: tuple[str, ...] = ()

    def has(self, feature: str) -> bool:
        """Returns whether kernels use the instructions of this feature, by LLVM's name for it.

        The name of a CPU says less: a virtual machine may hide features, or have more than the CPU that LLVM takes it
        for (a Xeon with AMX was called rocketlake).
        """
        return f"+{feature}" in self.features.split(",") or feature in self.emulated

    def without(self, *features: str) -> Self:
        """Returns the same CPU without these features."""
        known = self.features.split(",")
        return replace(self, features=",".join(f"-{one[1:]}" if one[1:] in features else one for one in known))

    @property
    def lanes(self) -> int:
        """The number of float32 in a vector register."""
        return 16 if self.has("avx512f") and self.has("avx512bw") else 8 if self.has("avx2") else 4

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The numbers of rows that a kernel takes at a time, the largest first, with sums of four vectors for each.

        24 sums, six rows and one vector more fit the 32 registers of AVX-512 and NEON. AVX2 has 16. With four rows at
        most, products of 16 to 512 rows took 1.07 to 1.22 times as long (float32, Zen 4).
        """
        return (2, 1) if self.lanes == 8 else (6, 4, 2, 1)

    @property
    def panel_columns(self) -> int:
        """The outputs of a panel (`packed_matmul.panels`): four vectors, or two where there are 16 registers (AVX2)."""
        return 16 if self.lanes == 8 else 4 * self.lanes

    @property
    def has_scale(self) -> bool:
        """Whether it multiplies vectors of float32 by powers of two."""
        return "+avx512f" in self.features.split(",")

    @property
    def has_bf16_dot(self) -> bool:
        """Whether it multiplies pairs of bfloat16 and adds them up in float32."""
        return (self.has("avx512bf16") and self.lanes == 16) or self.has("bf16")  # x86-64's and ARM64's

    @property
    def has_bf16_tiles(self) -> bool:
        """Whether it multiplies matrices of bfloat16 in tile registers (AMX), beside vectors of AVX-512.

        Four tiles are as wide as a panel for AVX-512. No CPU has AMX alone, but a virtual machine may show it so.
        """
        return self.has("amx-tile") and self.has("amx-bf16") and self.has("avx512f")

    @property
    def has_byte_tiles(self) -> bool:
        """Whether it multiplies matrices of bytes in tile registers (AMX), beside vectors of AVX-512."""
        return self.has("amx-tile") and self.has("amx-int8") and self.has("avx512f")


Chip = TpuChip | GpuChip

# Rates: cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}. HBM, VMEM and SMEM: the limits that libtpu 0.0.48.1 names when a
# program asks for too much (v5e: 15.75 of 16 GiB). Links: a chip's bidirectional ICI bandwidth there (400, 1200, 800,
# 1200 GB/s) over its four ports (v5e, v6e) or six, and half of that one way. A ring has two ports of a chip; corners of
# slices up to 8 chips have no more (v5p's cube: three).
_TPUS = (
    TpuChip(
        name="v5e", device_kind="TPU v5 lite", hbm_bytes=int(15.75 * GIB), hbm_bandwidth=819e9, bf16_flops=197e12,
        link_bandwidth=50e9, devices_per_chip=1, num_cores=1, vmem_bytes=128 * MIB, smem_bytes=MIB,
        computes_bf16=False, multiplies=("int8",),
    ),
    TpuChip(
        name="v5p", device_kind="TPU v5", hbm_bytes=int(95.73 * GIB), hbm_bandwidth=2765e9, bf16_flops=459e12,
        link_bandwidth=100e9, devices_per_chip=1, num_cores=2, vmem_bytes=64 * MIB, smem_bytes=MIB,
        computes_bf16=False, multiplies=("int8",),
    ),
    TpuChip(
        name="v6e", device_kind="TPU v6 lite", hbm_bytes=int(31.24 * GIB), hbm_bandwidth=1638e9, bf16_flops=918e12,
        link_bandwidth=100e9, devices_per_chip=1, num_cores=1, vmem_bytes=128 * MIB, smem_bytes=MIB,
        computes_bf16=True, multiplies=("int8",),
    ),
    # A chip has 192 GiB, 7380 GB/s and 2307 TFLOP/s; a device is half of it.
    TpuChip(
        name="v7x", device_kind="TPU7x", hbm_bytes=int(94.74 * GIB), hbm_bandwidth=3690e9, bf16_flops=1153.5e12,
        link_bandwidth=100e9, devices_per_chip=2, num_cores=1, vmem_bytes=64 * MIB, smem_bytes=MIB,
        computes_bf16=True, multiplies=("float8_e4m3fn", "float8_e5m2"),
    ),
)  # fmt: skip

# Rates: NVIDIA's data sheets of the SXM boards, and of T4, A10, L4 and L40S, halved where they are given with sparsity.
# GeForce: the appendices of the white papers on GA102, Ada and RTX Blackwell, "with FP32 accumulate", which has half of
# the rate with sums in float16. RTX PRO 6000: four times the 126 TFLOPS of float32 of the Workstation Edition. The
# Server Edition has a lower clock and memory of 1597 GB/s. GB10: NVIDIA publishes 1 PFLOP/s of FP4 with sparsity and
# nothing else, of which bfloat16 is an eighth where sums in float32 are as fast as others. So that is a bound.
# Links: half of NVLink's bandwidth there, which is the sum of both directions. The others have PCIe 3.0 (T4), 5.0 (RTX
# 5090, RTX PRO 6000) or 4.0 with 16 lanes, and GB10 a network of 200 Gbit/s.
# Sizes, counts and clocks as the driver reports them: openxla/xla, xla/backends/gpu/target_config/specs, deviceQuery,
# and where there was neither the MiB that nvidia-smi shows. Shared memory and threads: the table of compute
# capabilities in the CUDA programming guide. Clocks of boards that raise them further: the published boost.
_HOPPER = {"fp32_lanes_per_sm": 128, "threads_per_sm": 2048, "shared_memory_per_block": 227 * KIB,
           "shared_memory_per_sm": 228 * KIB}  # fmt: skip
_AMPERE = _HOPPER | {"fp32_lanes_per_sm": 64, "shared_memory_per_block": 163 * KIB, "shared_memory_per_sm": 164 * KIB}
_GRAPHICS = {"fp32_lanes_per_sm": 128, "threads_per_sm": 1536, "shared_memory_per_block": 99 * KIB,
             "shared_memory_per_sm": 100 * KIB}  # fmt: skip
# A device that is not in the table counts as the first one here of its compute capability.
_GPUS = (
    GpuChip(
        name="h100", device_kind="NVIDIA H100 80GB HBM3", compute_capability=(9, 0), hbm_bytes=84_942_979_072,
        hbm_bandwidth=3352e9, bf16_flops=989e12, link_bandwidth=450e9, num_sms=132, clock_ghz=1.98,
        l2_bytes=50 * MIB, **_HOPPER,
    ),
    GpuChip(
        name="h200", device_kind="NVIDIA H200", compute_capability=(9, 0), hbm_bytes=151_397_597_184,
        hbm_bandwidth=4800e9, bf16_flops=989e12, link_bandwidth=450e9, num_sms=132, clock_ghz=1.98,
        l2_bytes=50 * MIB, **_HOPPER,
    ),
    GpuChip(
        name="b200", device_kind="NVIDIA B200", compute_capability=(10, 0), hbm_bytes=191_514_411_008,
        hbm_bandwidth=7672e9, bf16_flops=2250e12, link_bandwidth=900e9, num_sms=148, clock_ghz=1.965,
        l2_bytes=132_644_864, **_HOPPER,
    ),
    GpuChip(
        name="a100", device_kind="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0), hbm_bytes=85_100_068_864,
        hbm_bandwidth=2039e9, bf16_flops=312e12, link_bandwidth=300e9, num_sms=108, clock_ghz=1.41,
        l2_bytes=40 * MIB, **_AMPERE,
    ),
    GpuChip(
        name="a100-40gb", device_kind="NVIDIA A100-SXM4-40GB", compute_capability=(8, 0), hbm_bytes=42_331_013_120,
        hbm_bandwidth=1555e9, bf16_flops=312e12, link_bandwidth=300e9, num_sms=108, clock_ghz=1.41,
        l2_bytes=40 * MIB, **_AMPERE,
    ),
    # ECC takes a part of the memory of A10, L4 and L40S: nvidia-smi shows 23034 of L4's 24 GB.
    GpuChip(
        name="a10", device_kind="NVIDIA A10", compute_capability=(8, 6), hbm_bytes=23_028 * MIB,
        hbm_bandwidth=600e9, bf16_flops=125e12, link_bandwidth=32e9, num_sms=72, clock_ghz=1.695,
        l2_bytes=6 * MIB, **_GRAPHICS,
    ),
    GpuChip(
        name="rtx3090", device_kind="NVIDIA GeForce RTX 3090", compute_capability=(8, 6), hbm_bytes=24_268 * MIB,
        hbm_bandwidth=936e9, bf16_flops=71e12, link_bandwidth=32e9, num_sms=82, clock_ghz=1.695,
        l2_bytes=6 * MIB, **_GRAPHICS,
    ),
    GpuChip(
        name="l4", device_kind="NVIDIA L4", compute_capability=(8, 9), hbm_bytes=23_034 * MIB,
        hbm_bandwidth=300e9, bf16_flops=121e12, link_bandwidth=32e9, num_sms=58, clock_ghz=2.04,
        l2_bytes=48 * MIB, **_GRAPHICS,
    ),
    GpuChip(
        name="l40s", device_kind="NVIDIA L40S", compute_capability=(8, 9), hbm_bytes=46_068 * MIB,
        hbm_bandwidth=864e9, bf16_flops=362e12, link_bandwidth=32e9, num_sms=142, clock_ghz=2.52,
        l2_bytes=96 * MIB, **_GRAPHICS,
    ),
    GpuChip(
        name="rtx4090", device_kind="NVIDIA GeForce RTX 4090", compute_capability=(8, 9), hbm_bytes=24_217 * MIB,
        hbm_bandwidth=1008e9, bf16_flops=165.2e12, link_bandwidth=32e9, num_sms=128, clock_ghz=2.52,
        l2_bytes=72 * MIB, **_GRAPHICS,
    ),
    GpuChip(
        name="rtx5090", device_kind="NVIDIA GeForce RTX 5090", compute_capability=(12, 0), hbm_bytes=33_677_180_928,
        hbm_bandwidth=1792e9, bf16_flops=209.5e12, link_bandwidth=64e9, num_sms=170, clock_ghz=2.407,
        l2_bytes=96 * MIB, **_GRAPHICS,
    ),
    GpuChip(
        name="pro6000", device_kind="NVIDIA RTX PRO 6000 Blackwell Workstation Edition", compute_capability=(12, 0),
        hbm_bytes=97_887 * MIB, hbm_bandwidth=1792e9, bf16_flops=503.8e12, link_bandwidth=64e9, num_sms=188,
        clock_ghz=2.617, l2_bytes=128 * MIB, **_GRAPHICS,
    ),
    # Its memory is that of the CPU, too: CUDA showed 121.6 of 128 GB.
    GpuChip(
        name="gb10", device_kind="NVIDIA GB10", compute_capability=(12, 1), hbm_bytes=130_596_048_896,
        hbm_bandwidth=273e9, bf16_flops=125e12, link_bandwidth=25e9, num_sms=48, clock_ghz=2.52,
        l2_bytes=24 * MIB, **_GRAPHICS,
    ),
    GpuChip(
        name="t4", device_kind="Tesla T4", compute_capability=(7, 5), hbm_bytes=15_843_721_216,
        hbm_bandwidth=320e9, bf16_flops=65e12, link_bandwidth=16e9, num_sms=40, clock_ghz=1.59,
        l2_bytes=4 * MIB, fp32_lanes_per_sm=64, threads_per_sm=1024, shared_memory_per_block=64 * KIB,
        shared_memory_per_sm=64 * KIB,
    ),
)  # fmt: skip

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (*_TPUS, *_GPUS)}
_CHIP_OF_KIND = {chip.device_kind: chip for chip in CHIPS.values()}


def chip_of(device_kind: str) -> Chip:
    """Returns the chip whose device calls itself `device_kind` (`jax.devices()[0].device_kind`).

    Raises ValueError for a device that is not in the table.
    """
    if device_kind not in _CHIP_OF_KIND:
        raise ValueError(f"no chip is known for the device kind {device_kind!r}: known are {', '.join(_CHIP_OF_KIND)}")
    return _CHIP_OF_KIND[device_kind]


def chip_named(name: str) -> Chip:
    """Returns the chip called `name`, e.g. "v5e" or "h200". Raises ValueError for a name that is not in the table."""
    if name not in CHIPS:
        raise ValueError(f"no chip is called {name!r}: known are {', '.join(CHIPS)}")
    return CHIPS[name]
